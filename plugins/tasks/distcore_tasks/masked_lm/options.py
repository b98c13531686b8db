"""Options of a masked language model: model, data files, tokens and masking."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from distcore import Direction, OnResume
from distcore_tasks.padding_free.options import PaddingFreeOptions
from distcore_tasks.shared.bert import SHAPES
from distcore_tasks.shared.chunked_cross_entropy.options import CrossEntropyOptions
from distcore_tasks.shared.token_metrics import METRICS

RATES = {"bert-tiny": 2e-3, "bert-mini": 1e-3}
"""Peak learning rates from random weights, unlike those of a classifier. Only that
of bert-tiny is measured.
"""


@dataclass(frozen=True)
class Columns:
    """Names of the columns in files with named columns."""

    text: str = "text"
    """Column of texts."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a built-in model, which is trained on the training rows."""

    vocab_size: Annotated[int, Field(ge=64)] = 1024
    """Tokens in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class MaskedOptions(PaddingFreeOptions, CrossEntropyOptions, head="masked tokens"):
    """Options of masked language modeling."""

    flags: ClassVar = {"text-column": "columns.text"}
    built_in: ClassVar = SHAPES | {name: replace(SHAPES[name], lr=lr) for name, lr in RATES.items()}
    metrics: ClassVar[dict[str, Direction]] = METRICS
    on_resume: ClassVar[dict[str, OnResume]] = CrossEntropyOptions.on_resume | {
        "columns": "free",
        "model": "other rows",  # its tokenizer makes the tokens
        "max_seq_len": "other rows",
        "split_texts": "other rows",
        "mask_probability": "other rows",
        "tokenizer": "free",  # the tokens that it makes are compared
    }

    model: str = "bert-tiny"
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str = "stdlib-lines"
    """Data files (.json .jsonl .csv .parquet .arrow .tar .txt), shards, FOLDER@SPLIT, hub
    name or embedded dataset.
    """
    columns: Columns = Columns()
    """Names of the columns in data files."""
    tokenizer: Tokenizer = Tokenizer()
    """The vocabulary of a built-in model."""
    max_seq_len: Annotated[int, Field(ge=4)] = 128
    """Length of a row in tokens, special tokens included."""
    split_texts: bool = True
    """Split a longer text into several rows; otherwise cut it."""
    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Fraction of the tokens of a row to mask and predict, at least one."""
