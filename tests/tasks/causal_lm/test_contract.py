"""Causal language modelling keeps the laws from its side, on documents and on conversations."""

from typing import ClassVar

from distcore.testing import TaskContract

SMALL = {"task_options.max_seq_len": 24, "task_options.tokenizer.vocab_size": 400, "task_options.data": "stdlib-help"}


class TestPrompts(TaskContract):
    task = "causal-lm"
    settings: ClassVar = SMALL | {"task_options.max_new_tokens": 2}


class TestPaddedPrompts(TaskContract):
    task = "causal-lm"
    settings: ClassVar = SMALL | {"task_options.packing": False, "task_options.model": "llama-tiny"}
