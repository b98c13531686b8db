"""Options of text classification: model, data files, labels and tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from distcore import ConfigError, Direction, OnResume
from distcore_tasks.padding_free.options import PaddingFreeOptions
from distcore_tasks.shared.bert import SHAPES
from distcore_tasks.shared.classification.predictions import METRICS
from distcore_tasks.shared.options import TaskOptions

if TYPE_CHECKING:
    from distcore_tasks.text_classification.problems.contract import Problem

PAIRED = ("stdlib-pairs",)
"""Embedded datasets with two texts per row."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns in a data file."""

    text: str = "text"
    """Column of texts."""
    label: str = "label"
    """Column of labels."""
    id: str | None = None
    """Column of ids, which identify rows in predictions; default: none, only file and
    row number identify them.
    """
    text_pair: str | None = None
    """Column of second texts, for pairs; default: rows have one text."""

    def settings(self, labeled: bool = True) -> dict[str, str]:
        """Return the columns of a file by config key.

        A row that is a list has its values in this order.

        Without ``labeled``, return only the columns of texts; the core itself reads the
        ids of such rows.
        """
        columns = {
            "columns.text": self.text,
            "columns.text_pair": self.text_pair,
            "columns.label": self.label if labeled else None,
            "columns.id": self.id if labeled else None,
        }
        return {setting: column for setting, column in columns.items() if column}


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a built-in model. It is trained on the training rows."""

    vocab_size: Annotated[int, Field(ge=64)] = 8000
    """Tokens in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(PaddingFreeOptions, head="row classifier"):
    """Options of text classification."""

    flags: ClassVar = {
        "text-column": "columns.text",
        "label-column": "columns.label",
        "id-column": "columns.id",
        "text-pair-column": "columns.text_pair",
    }
    built_in: ClassVar = SHAPES
    pretrained_lr: ClassVar = 3e-5
    metrics: ClassVar[dict[str, Direction]] = METRICS
    on_resume: ClassVar[dict[str, OnResume]] = TaskOptions.on_resume | {
        "columns": "free",
        "class_names": "free",
        "model": "other rows",  # the model's tokenizer makes the tokens
        "max_seq_len": "other rows",
        "tokenizer": "free",  # a resumed run compares the tokens themselves
    }

    model: str = "bert-mini"
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str = "stdlib-docs"
    """Data files (.json .jsonl .csv .parquet .arrow .tar), shards, FOLDER@SPLIT or hub
    name, or an embedded dataset.
    """
    columns: Columns = Columns()
    """Names of the columns in data files."""
    problem_type: Literal["single_label", "multi_label", "regression"] = "single_label"
    """Type of labels: a class, a list of classes, or a number."""
    class_names: tuple[str, ...] | None = None
    """Names for integer labels, from the smallest to the largest; null: the labels as written."""
    tokenizer: Tokenizer = Tokenizer()
    """Settings of a built-in model's tokenizer."""
    max_seq_len: Annotated[int, Field(ge=4)] = 128
    """Length of a row in tokens; longer rows are cut."""

    def __post_init__(self) -> None:
        """Declare the metrics of the problem type.

        Raises ConfigError for invalid ``class_names``.
        """
        names, single = self.class_names, self.problem_type == "single_label"
        if names is not None and (
            self.problem_type == "regression" or len(set(names)) != len(names)
        ):
            why = (
                "a regression has no classes"
                if self.problem_type == "regression"
                else "a name is repeated"
            )
            raise ConfigError(f"class_names = {list(names)}: {why}")
        binary: dict[str, Direction] = (
            {"f1": "max"} if names is not None and len(names) == 2 and single else {}
        )
        object.__setattr__(self, "metrics", self.problem.metrics | binary)  # only on this instance

    @property
    def problem(self) -> Problem:
        """Loss, outputs and metrics of the problem type."""
        # imports numpy, which --help does not need
        from distcore_tasks.text_classification.problems import PROBLEMS

        return PROBLEMS[self.problem_type]

    @property
    def used_columns(self) -> Columns:
        """Columns to read.

        A model trained on an embedded dataset of pairs takes pairs from every file.
        """
        if self.columns.text_pair or self.data not in PAIRED:
            return self.columns
        return replace(self.columns, text_pair="text_pair")
