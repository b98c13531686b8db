"""Text classification keeps the laws from its side, whatever a label is, on texts and
on pairs of them.
"""

from pathlib import Path
from typing import ClassVar

from distcore.testing import TaskContract

SMALL = {"task_options.model": "bert-tiny", "task_options.tokenizer.vocab_size": 200}
PHRASES = SMALL | {
    "task_options.data": str(Path(__file__).with_name("phrases.jsonl")),
    "task_options.columns.text": "first",
    "task_options.columns.text_pair": "second",
    "task_options.max_seq_len": 24,
}


class TestTextClassification(TaskContract):
    task = "text-classification"
    settings: ClassVar = SMALL | {"task_options.data": str(Path(__file__).with_name("rows.json"))}


class TestPairs(TaskContract):
    task = "text-classification"
    settings: ClassVar = PHRASES | {
        "task_options.columns.label": "same",
        "task_options.class_names": ("other", "same"),
    }


class TestRegression(TaskContract):
    task = "text-classification"
    settings: ClassVar = PHRASES | {
        "task_options.columns.label": "score",
        "task_options.problem_type": "regression",
    }


class TestMultiLabel(TaskContract):
    task = "text-classification"
    settings: ClassVar = PHRASES | {
        "task_options.columns.text_pair": None,
        "task_options.columns.label": "topics",
        "task_options.problem_type": "multi_label",
    }
