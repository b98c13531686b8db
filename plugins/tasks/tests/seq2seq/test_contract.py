"""Sequence to sequence keeps the laws from its side, with a smoothed loss and with
what the model writes.
"""

from pathlib import Path
from typing import ClassVar

import pytest

from distcore.testing import TaskContract

pytestmark = pytest.mark.programs

SMALL = {
    "task_options.data": str(Path(__file__).with_name("pairs.jsonl")),
    "task_options.max_seq_len": 24,
    "task_options.max_target_len": 8,
    "task_options.tokenizer.vocab_size": 400,
}


class TestPlain(TaskContract):
    task = "seq2seq"
    settings: ClassVar = SMALL


class TestSmoothedAndWritten(TaskContract):
    task = "seq2seq"
    settings: ClassVar = SMALL | {
        "task_options.label_smoothing": 0.1,
        "task_options.max_new_tokens": 2,
    }
