"""Embeddings keep the laws from the task's side: of pairs, and of triplets in Matryoshka sizes."""

from pathlib import Path
from typing import ClassVar

import pytest

from distcore.testing import TaskContract

pytestmark = pytest.mark.programs

SMALL = {
    "task_options.data": str(Path(__file__).with_name("triplets.jsonl")),
    "task_options.tokenizer.vocab_size": 200,
}


class TestPairs(TaskContract):
    task = "embedding"
    settings: ClassVar = SMALL | {"task_options.symmetric": True}


class TestTriplets(TaskContract):
    task = "embedding"
    settings: ClassVar = SMALL | {
        "task_options.columns.negative": "negative",
        "task_options.pooling": "cls",
        "task_options.dims": (128, 32),
    }
