"""Rows of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from distcore_data import Record
from distcore_tasks.rows.pipeline import RowPipeline
from distcore_tasks.shared.sources import text_problem

Texts = tuple[str, ...]
"""The texts of a row, one per column."""


@dataclass(frozen=True)
class TextRows(RowPipeline[Texts]):
    """Rows of texts, none of them blank, in the columns that ``options.columns`` names."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Return the columns by config key."""
        return {f"columns.{key}": name for key, name in asdict(self.options.columns).items()}

    def check(self, record: Record) -> str | None:
        """Return the problem of the first text that cannot be tokenized."""
        for key, text in zip(self.columns, record, strict=True):
            if problem := text_problem(text, key.removeprefix("columns.")):
                return problem
        return None

    def value(self, record: Record) -> Texts:
        """Return the texts."""
        return tuple(map(str, record))
