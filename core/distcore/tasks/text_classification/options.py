"""What can be set of text classification: its model, its data files and its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from distcore.plugin.task import Direction, OnResume
from distcore.tasks.bert import SHAPES
from distcore.tasks.options import TaskOptions


@dataclass(frozen=True)
class Columns:
    """Names of the columns in files with named columns."""

    text: str = "text"
    """Column that holds the text."""
    label: str = "label"
    """Column that holds the label."""
    id: str | None = None
    """Column that names the row in predictions; default: file and row number do."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer that a built-in model, which has no vocabulary, trains on the training rows."""

    vocab_size: Annotated[int, Field(ge=64)] = 8000
    """Tokens in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(TaskOptions):
    """The options of text classification."""

    built_in: ClassVar = SHAPES
    pretrained_lr: ClassVar = 3e-5
    metrics: ClassVar[dict[str, Direction]] = {"loss": "min", "accuracy": "max"}
    on_resume: ClassVar[dict[str, OnResume]] = TaskOptions.on_resume | {
        "columns": "free",
        "model": "other rows",  # its tokenizer makes the tokens
        "max_seq_len": "other rows",
        "tokenizer": "free",  # the tokens that it makes are compared
    }

    model: str = "bert-mini"
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str = "stdlib-docs"
    """Data file (.json .jsonl .csv .parquet), or the name of an embedded data set."""
    columns: Columns = Columns()
    """Names of the columns in data files."""
    tokenizer: Tokenizer = Tokenizer()
    """The vocabulary that a built-in model trains."""
    max_seq_len: Annotated[int, Field(ge=4)] = 128
    """Tokens of a row; longer rows are cut."""
