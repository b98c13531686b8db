"""Causal language modeling keeps the laws from its side, on documents and on conversations."""

from pathlib import Path
from typing import ClassVar

from distcore.testing import TaskContract

SMALL = {
    "task_options.data": str(Path(__file__).with_name("chats.jsonl")),
    "task_options.max_seq_len": 40,
    "task_options.tokenizer.vocab_size": 400,
}


class TestConversations(TaskContract):
    task = "causal-lm"
    settings: ClassVar = SMALL | {"task_options.max_new_tokens": 2}


class TestPaddedConversations(TaskContract):
    task = "causal-lm"
    settings: ClassVar = SMALL | {"padding_free": "off", "task_options.model": "llama-tiny"}


class TestDocuments(TaskContract):
    task = "causal-lm"
    settings: ClassVar = SMALL | {
        "task_options.form": "documents",
        "task_options.data": str(Path(__file__).with_name("documents.jsonl")),
        "task_options.split_documents": True,
    }


class TestExperts(TaskContract):
    task = "causal-lm"
    settings: ClassVar = SMALL | {"task_options.model": "mixtral-tiny"}
