"""Masked language modeling keeps the laws from its side."""

from pathlib import Path
from typing import ClassVar

import pytest

from distcore.testing import TaskContract

pytestmark = pytest.mark.programs


class TestMaskedLM(TaskContract):
    task = "masked-lm"
    settings: ClassVar = {
        "task_options.data": str(Path(__file__).with_name("texts.jsonl")),
        "task_options.max_seq_len": 24,
        "task_options.tokenizer.vocab_size": 200,
        "task_options.mask_probability": 0.3,
    }
