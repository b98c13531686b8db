"""Token classification keeps the laws from its side, with words that are cut off
and without entities, too.
"""

from pathlib import Path
from typing import ClassVar

import pytest

from distcore.testing import TaskContract

pytestmark = pytest.mark.programs

SMALL = {
    "task_options.data": str(Path(__file__).with_name("words.jsonl")),
    "task_options.tokenizer.vocab_size": 120,
}


class TestEntities(TaskContract):
    task = "token-classification"
    settings: ClassVar = SMALL


class TestNumbersCut(TaskContract):
    task = "token-classification"
    settings: ClassVar = SMALL | {
        "task_options.columns.tags": "numbers",
        "task_options.max_seq_len": 8,
    }
