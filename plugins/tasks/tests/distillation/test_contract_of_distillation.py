"""Distillation keeps the laws from its side, with and without hidden states."""

from pathlib import Path
from typing import ClassVar

import pytest

from distcore.testing import TaskContract

pytestmark = pytest.mark.programs

SMALL = {
    "task_options.data": str(Path(__file__).parents[1] / "text_classification/rows.json"),
    "task_options.tokenizer.vocab_size": 200,
}


class TestDistillation(TaskContract):
    task = "distillation"
    settings: ClassVar = SMALL


class TestHiddenStates(TaskContract):
    task = "distillation"
    settings: ClassVar = SMALL | {
        "task_options.teacher": "bert-tiny",
        "task_options.hidden_weight": 0.5,
    }
