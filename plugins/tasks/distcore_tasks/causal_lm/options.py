"""Options of a causal language model: model, data files and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from distcore import Direction, OnResume
from distcore_tasks.causal_lm.router import RouterOptions
from distcore_tasks.causal_lm.sequence_packing import PackingOptions
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.shared.chunked_cross_entropy.options import CrossEntropyOptions
from distcore_tasks.shared.token_metrics import METRICS

Form = Literal["documents", "prompts", "messages"]


@dataclass(frozen=True)
class Columns:
    """Names of the columns in data files. A file needs those of its form:
    documents, prompts or messages.
    """

    text: str = "text"
    """Column of documents."""
    prompt: str = "prompt"
    """Column of prompts, the model's input."""
    completion: str = "completion"
    """Column of completions, the expected answers."""
    messages: str = "messages"
    """Column of conversations: lists of objects with ``role`` and ``content``."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a built-in model, which is trained on the training rows."""

    vocab_size: Annotated[int, Field(ge=300)] = 2048
    """Tokens in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class CausalOptions(PackingOptions, RouterOptions, CrossEntropyOptions):
    """Options of a causal language model."""

    flags: ClassVar = {
        "text-column": "columns.text",
        "prompt-column": "columns.prompt",
        "completion-column": "columns.completion",
        "messages-column": "columns.messages",
    }
    built_in: ClassVar = SHAPES
    metrics: ClassVar[dict[str, Direction]] = METRICS
    on_resume: ClassVar[dict[str, OnResume]] = (
        PackingOptions.on_resume
        | CrossEntropyOptions.on_resume
        | {
            "model": "other rows",  # its tokenizer makes the tokens
            "max_seq_len": "other rows",
            "end_documents": "other rows",
            "max_new_tokens": "free",
            "samples": "free",
            "generation": "free",
            "special_tokens": "free",
            "tokenizer": "free",  # the tokens that it makes are compared
        }
    )

    model: str = "gpt2-tiny"
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str = "stdlib-source"
    """Data files (.json .jsonl .csv .parquet .arrow .tar .txt), shards, FOLDER@SPLIT, hub
    name or embedded dataset.
    """
    form: Literal["auto", "documents", "prompts", "messages"] = "auto"
    """Content of a row: a document, a prompt with its completion, or a list of messages; auto:
    as the columns say.
    """
    columns: Columns = Columns()
    """Names of the columns in data files."""
    tokenizer: Tokenizer = Tokenizer()
    """The vocabulary of a built-in model."""
    max_seq_len: Annotated[int, Field(ge=4)] = 128
    """Length of a row in tokens: documents are cut into blocks of this size,
    longer conversations are truncated.
    """
    end_documents: bool = True
    """Whether an end token follows each document; false: documents are joined as they
    are, as run_clm does.
    """
    max_new_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that evaluation generates, greedily, for each of ``samples``; 0: none."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """Number of evaluation rows, from the first, for which text is generated; null: all rows."""
    generation: dict[str, JsonValue] = field(default_factory=dict)
    """Settings that come before those of the model's generation_config.json; null
    takes a setting away.
    """
    special_tokens: bool = False
    """Whether generated texts show the special tokens that a model writes, such as
    those of a tool call.
    """
