"""Datasets of the library datasets for tests, which are skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip(
    "datasets", reason="needs the package datasets: pip install datasets"
)


def save(
    folder: Path, rows: list[dict[str, Any]], features: Any = None, shards: int = 1, **splits: Any
) -> Path:
    """Write the rows as ``save_to_disk`` does: one dataset or, with ``splits``,
    several, ``train`` the first.
    """
    made = {
        name: datasets.Dataset.from_list(split_rows, features=features)
        for name, split_rows in splits.items()
    }
    train = datasets.Dataset.from_list(rows, features=features)
    if splits:
        counts = dict.fromkeys(splits, 1) | {"train": shards}
        datasets.DatasetDict({"train": train, **made}).save_to_disk(folder, num_shards=counts)
    else:
        train.save_to_disk(folder, num_shards=shards)
    return folder


def texts(count: int, word: str = "row") -> list[dict[str, Any]]:
    """Return rows with a text each."""
    return [{"text": f"{word} {number}"} for number in range(count)]
