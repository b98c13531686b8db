"""Text classification keeps the laws from its side."""

from pathlib import Path
from typing import ClassVar

from distcore.testing import TaskContract


class TestTextClassification(TaskContract):
    task = "text-classification"
    settings: ClassVar = {
        "task_options.model": "bert-tiny",
        "task_options.data": str(Path(__file__).with_name("rows.json")),
        "task_options.tokenizer.vocab_size": 200,
    }
