"""Reward models keep the laws from their side."""

from pathlib import Path
from typing import ClassVar

import pytest

from distcore.testing import TaskContract

pytestmark = pytest.mark.programs

SMALL = {
    "task_options.data": str(Path(__file__).parents[1] / "preference/pairs.jsonl"),
    "task_options.max_seq_len": 40,
    "task_options.tokenizer.vocab_size": 400,
}


class TestRewardModel(TaskContract):
    task = "reward-model"
    settings: ClassVar = SMALL | {"task_options.center": 0.1}
