"""The options of a causal language model: its model, its data files and its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from distcore import Direction, OnResume
from distcore_tasks.causal_lm.sequence_packing import PackingOptions
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.shared.token_metrics import METRICS

Form = Literal["documents", "prompts", "messages"]


@dataclass(frozen=True)
class Columns:
    """Names of the columns in data files; which of them a file needs depends on the form of its rows."""

    text: str = "text"
    """Column with a document."""
    prompt: str = "prompt"
    """Column with what the model is given."""
    completion: str = "completion"
    """Column with what it should answer."""
    messages: str = "messages"
    """Column with a conversation: a list of objects with ``role`` and ``content``."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer that a built-in model, which has no vocabulary, trains on the training rows."""

    vocab_size: Annotated[int, Field(ge=300)] = 2048
    """Tokens in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class CausalOptions(PackingOptions):
    """The options of a causal language model."""

    flags: ClassVar = {
        "text-column": "columns.text",
        "prompt-column": "columns.prompt",
        "completion-column": "columns.completion",
        "messages-column": "columns.messages",
    }
    built_in: ClassVar = SHAPES
    metrics: ClassVar[dict[str, Direction]] = METRICS
    on_resume: ClassVar[dict[str, OnResume]] = PackingOptions.on_resume | {
        "model": "other rows",  # its tokenizer makes the tokens
        "max_seq_len": "other rows",
        "max_new_tokens": "free",
        "samples": "free",
        "tokenizer": "free",  # the tokens that it makes are compared
    }

    model: str = "gpt2-tiny"
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str = "stdlib-source"
    """Data file (.json .jsonl .csv .parquet), dataset of datasets (FOLDER@SPLIT or hub name), or an embedded one."""
    form: Literal["auto", "documents", "prompts", "messages"] = "auto"
    """What a row is: a document, a prompt with its completion, or a list of messages; auto: what the columns say."""
    columns: Columns = Columns()
    """Names of the columns in data files."""
    tokenizer: Tokenizer = Tokenizer()
    """The vocabulary that a built-in model trains."""
    max_seq_len: Annotated[int, Field(ge=4)] = 128
    """Tokens that the model reads at once: documents are cut into blocks of so many, longer conversations are cut."""
    max_new_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that evaluation lets the model generate, the likeliest each time, for each of ``samples``; 0: none."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """Evaluation rows that the model goes on from, the first ones; null: every row."""
