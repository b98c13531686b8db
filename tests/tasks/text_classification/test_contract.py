"""Text classification keeps the laws from its side."""

from typing import ClassVar

from distcore.testing import TaskContract


class TestTextClassification(TaskContract):
    task = "text-classification"
    settings: ClassVar = {"task_options.model": "bert-tiny"}
