"""Options of every shipped task, and values derived from them: model folder,
learning rate and paths.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol

from pydantic import Field

from distcore import ConfigError, DataError, Direction, OnResume
from distcore_tasks.shared.named_files import check_file
from distcore_tasks.shared.pretrained import TOKENIZERS, model_folder

if TYPE_CHECKING:
    from distcore import RunConfig


EVALUATION = "evaluation."
"""Begins the name of the dataset of one of several evaluation sets."""


class Shape(Protocol):
    """Size of a built-in model."""

    @property
    def lr(self) -> float:
        """Peak learning rate from random weights."""
        ...


@dataclass(frozen=True)
class Filter:
    """Rows of the data, evaluation and test files to keep; embedded datasets
    have no other columns.
    """

    column: str | None = None
    """Column to look at; null: all rows are kept."""
    matches: str | None = None
    """Regular expression of Python to find in the column; a row with null there is left out."""

    def __post_init__(self) -> None:
        """Raise ConfigError unless there are both, or neither, and the expression is valid."""
        if (self.column is None) != (self.matches is None):
            missing = "column" if self.column is None else "matches"
            raise ConfigError(
                f"filter.{missing}: is missing; a filter has a column and what matches in it"
            )
        try:
            re.compile(self.matches or "")
        except re.error as error:
            raise ConfigError(
                f"filter.matches = {self.matches!r}: no regular expression: {error}"
            ) from None


Weights = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


@dataclass(frozen=True)
class Order:
    """Order of the training rows, a function of seed and epoch."""

    kind: Literal["full", "windows"] = "full"
    """All rows shuffled; or shards of 64 rows shuffled, and their rows in windows of shards."""
    window_shards: Annotated[int, Field(ge=1)] = 1024
    """Shards in a window."""
    mix: Weights | None = None
    """Weights of the sources in ``data``, by their names without folder and extension;
    null: all rows alike.
    """
    mix_at: dict[Annotated[int, Field(ge=1)], Weights] | None = None
    """Other weights, by the step after which they hold; a weight of 0 leaves a source
    out for a time.
    """
    mix_by: Literal["rows", "tokens"] = "rows"
    """What the weights are shares of."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a size of windows without windows, shares without weights,
        and weights of nothing.
        """
        if self.kind == "full" and self.window_shards != Order.window_shards:
            problem = "order.kind = 'full' has no windows; leave it out, or set order.kind=windows"
            raise ConfigError(f"order.window_shards = {self.window_shards}: {problem}")
        if self.mix is None and self.mix_by != Order.mix_by:
            raise ConfigError(
                "order.mix_by = 'tokens': order.mix has no weights; leave it out, or set order.mix"
            )
        if self.mix is None and self.mix_at:
            raise ConfigError(
                "order.mix_at: order.mix has no weights for the steps before; set them, too"
            )
        for key, weights in self.stages.values():
            if weights and not any(weights.values()):
                raise ConfigError(f"{key}: all weights are 0; give a source more")
        for name, weight in (self.mix or {}).items():
            if not weight and not any(other.get(name) for _, other in self.stages.values()):
                raise ConfigError(
                    f"order.mix.{name} = 0: no row of it would come up; leave it out of --data"
                )

    @property
    def stages(self) -> dict[int, tuple[str, dict[str, float]]]:
        """The config key and its weights, by the number of steps before, ascending;
        empty without a mixture.
        """
        later = {
            step: (f"order.mix_at.{step}", weights)
            for step, weights in sorted((self.mix_at or {}).items())
        }
        return {} if self.mix is None else {0: ("order.mix", self.mix)} | later


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options that all of these tasks have."""

    metrics: ClassVar[dict[str, Direction]]
    built_in: ClassVar[Mapping[str, Shape]]
    """The built-in models, by the name that follows ``--model``."""
    built_in_type: ClassVar[str] = "bert"
    """Model type of the built-in models in transformers."""
    embedded: ClassVar[Collection[str]] = ()
    """Names of the datasets that come with the task."""
    pretrained_lr: ClassVar[float] = 5e-5
    """Peak learning rate for fine-tuning pretrained weights."""
    beside: ClassVar[tuple[str, ...]] = TOKENIZERS
    """A key of ``pretrained.BESIDE``: a model folder needs one of these files,
    besides config and weights.
    """
    on_resume: ClassVar[dict[str, OnResume]] = {
        "data": "free",  # the path may change, because rows are compared by content
        "eval_data": "free",
        "test_data": "free",
        "skip_bad_rows": "free",
        "filter": "free",
        "dropout": "ask",
        "order": "other rows",
        "stream": "other rows",
    }

    model: str
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str
    """Data files (.json .jsonl .csv .parquet .arrow .tar .txt .list; a file, a folder, a pattern,
    or several with commas), folder of shards (MDS, litdata), dataset of datasets (FOLDER@SPLIT or
    hub name), or an embedded one.
    """
    eval_data: str | dict[str, str] | None = None
    """File of evaluation rows; default: a part of ``data``. Repeated with
    names for several sets.
    """
    test_data: str | None = None
    """File of rows for the final test; default: the evaluation rows."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Fraction of the rows to hold out for evaluation; of ``data``."""
    skip_bad_rows: Annotated[int, Field(ge=0)] = 0
    """Most rows to pass over that cannot be read or used; ``bad_rows.txt`` of
    the run lists them.
    """
    filter: Filter = Filter()
    """Rows to keep, by a column and a regular expression."""
    order: Order = Order()
    """Order of the training rows."""
    stream: bool = False
    """Read and encode rows when their step comes: of sources only an index, labels and
    few rows are stored.
    """
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Probability of dropout; null: the model's own."""

    @classmethod
    def check_early(cls, options: Mapping[str, object]) -> None:
        """Raise DataError for a data file that is not there, in the options as they were given.

        Called before torch is imported. What else a source may be is looked at by ``prepare``.
        """
        for name in ("data", "eval_data", "test_data"):
            given = options.get(name)
            sources = given if isinstance(given, Mapping) else {"": given}
            for dataset, source in sources.items():
                if not isinstance(source, str) or source in cls.embedded:
                    continue
                try:
                    check_file(source)
                except DataError as error:
                    line = f"evaluation set {dataset}: {error}" if dataset else str(error)
                    raise DataError(line) from None

    @property
    def from_scratch(self) -> bool:
        """True for a built-in model, which starts from random weights and
        trains its own tokenizer.
        """
        return self.model in self.built_in

    @property
    def path_options(self) -> tuple[str, ...]:
        """Options with a file or a folder, rather than a built-in model or an embedded dataset."""
        shipped = (*self.built_in, *self.embedded)
        options = []
        for name in ("model", "data", "eval_data", "test_data"):
            value = getattr(self, name)
            if value is not None and value not in shipped:
                options.append(name)
        return tuple(options)

    @property
    def held_out(self) -> dict[str, str]:
        """The sources beside ``data``, by the name of their dataset:
        ``evaluation``, or ``evaluation.NAME``, ``test``.

        Raises ConfigError for a name of an evaluation set that is no part of the name of a metric.
        """
        named = self.eval_data if isinstance(self.eval_data, dict) else {}
        for name, source in named.items():
            if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
                raise ConfigError(
                    f"--eval-data {name}={source}: {name!r} cannot name an evaluation set, because"
                    " its metrics are named after it; use letters, digits, '.', '_' and '-'"
                )
        if named == self.eval_data == {}:
            raise ConfigError("eval_data = {}: names no file; leave it out, or name one")
        alone = {"evaluation": self.eval_data, "test": self.test_data}
        sets = {f"{EVALUATION}{name}": source for name, source in named.items()}
        return sets | {name: source for name, source in alone.items() if isinstance(source, str)}

    @property
    def sources(self) -> dict[str, str]:
        """The source of each dataset by its name; without ``eval_data``
        that of ``evaluation`` is ``data``.
        """
        whole = {} if self.eval_data is not None else {"evaluation": self.data}
        return {"train": self.data} | whole | self.held_out

    def model_folder(self) -> Path:
        """Return the local folder of a model that is not built in. Raises ModelError, one line."""
        return model_folder(self.model, self.built_in, self.beside)

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return the folder with the model's weights; ``None`` for a built-in model."""
        return None if self.from_scratch else self.model_folder()

    def suggest(self, config: RunConfig) -> dict[str, object]:
        """Return ``lr``, the model's peak learning rate, for ``auto`` in the config."""
        return {"lr": self.built_in[self.model].lr if self.from_scratch else self.pretrained_lr}
