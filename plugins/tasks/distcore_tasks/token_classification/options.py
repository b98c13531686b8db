"""Options of token classification: model, data files and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from distcore import Direction, OnResume
from distcore_tasks.padding_free.options import PaddingFreeOptions
from distcore_tasks.shared.bert import SHAPES
from distcore_tasks.shared.options import TaskOptions


@dataclass(frozen=True)
class Columns:
    """Names of the columns in files with named columns."""

    tokens: str = "tokens"
    """Column of words, a list of strings for each row."""
    tags: str = "tags"
    """Column of tags, a list of strings or integers, one per word."""
    id: str | None = None
    """Column of ids, which identify rows in predictions; default: none, only file and
    row number identify them.
    """


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a built-in model, which is trained on the training rows."""

    vocab_size: Annotated[int, Field(ge=64)] = 4000
    """Tokens in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class TagOptions(PaddingFreeOptions, head="token classifier"):
    """Options of token classification."""

    flags: ClassVar = {
        "tokens-column": "columns.tokens",
        "tags-column": "columns.tags",
        "id-column": "columns.id",
    }
    built_in: ClassVar = SHAPES
    metrics: ClassVar[dict[str, Direction]] = {
        "loss": "min", "accuracy": "max", "precision": "max", "recall": "max", "f1": "max",
    }  # fmt: skip
    on_resume: ClassVar[dict[str, OnResume]] = TaskOptions.on_resume | {
        "columns": "free",
        "model": "other rows",  # its tokenizer makes the tokens
        "max_seq_len": "other rows",
        "tokenizer": "free",  # the tokens that it makes are compared
    }

    model: str = "bert-tiny"
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str = "stdlib-code"
    """Data files (.json .jsonl .parquet .arrow .tar), shards, FOLDER@SPLIT or hub name,
    or an embedded dataset.
    """
    columns: Columns = Columns()
    """Names of the columns in data files."""
    tokenizer: Tokenizer = Tokenizer()
    """The vocabulary of a built-in model."""
    max_seq_len: Annotated[int, Field(ge=4)] = 128
    """Length of a row in tokens, special tokens included; later words are cut."""
