"""Preference tuning keeps the laws from its side: with a loss of rows, and with that of kto."""

from pathlib import Path
from typing import ClassVar

import pytest

from distcore.testing import TaskContract

pytestmark = pytest.mark.programs

SMALL = {
    "task_options.data": str(Path(__file__).with_name("pairs.jsonl")),
    "task_options.max_seq_len": 40,
    "task_options.tokenizer.vocab_size": 400,
}


class TestPreference(TaskContract):
    task = "preference"
    settings: ClassVar = SMALL


class TestKTO(TaskContract):
    task = "preference"
    settings: ClassVar = SMALL | {"task_options.loss": "kto"}
