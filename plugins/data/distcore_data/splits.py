"""Datasets of the library ``datasets``: folders of ``save_to_disk``, and names of the hub.

Both are Arrow files, which are memory-mapped and never read as a whole. A
folder needs only pyarrow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from distcore import DataError, nearest

DICT, STATE = "dataset_dict.json", "state.json"
"""Files by which a folder is known: of several splits, and of one dataset."""
_HUB = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")
_FILES = (
    ".json",
    ".jsonl",
    ".csv",
    ".parquet",
    ".npz",
    ".txt",
    ".arrow",
    ".tar",
    ".list",
    ".gz",
    ".zst",
)


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of one split; its string is the user's name of it."""

    dataset: str
    """The folder or the name of the hub."""
    name: str | None
    """``None`` for a folder with one dataset."""
    files: tuple[Path, ...]
    """Arrow streams."""
    others: tuple[str, ...] = ()
    """Names of the other splits."""
    suffix: ClassVar[str] = ".arrow"

    def __str__(self) -> str:
        """Return ``chats@train``, or ``chats`` for a folder with a single dataset."""
        return self.dataset if self.name is None else f"{self.dataset}@{self.name}"


def find_split(source: str) -> Split | None:
    """Return the split of ``source``; ``None`` unless it is a folder of ``datasets`` or a
    name of the hub.

    ``FOLDER`` or ``FOLDER@SPLIT``; ``OWNER/NAME``, ``OWNER/NAME:CONFIG``, either with ``@SPLIT``.
    The default split is ``train``, or the only one. A dataset of the hub is downloaded if it is not
    cached. Raises DataError, one line.
    """
    for text, split in ((source, None), _parted(source)):
        folder = Path(text).expanduser()
        if (folder / DICT).is_file():
            return _of_dict(folder, split)
        if (folder / STATE).is_file():
            return _of_folder(folder, split)
        if folder.exists():
            return None
    match = _HUB.fullmatch(source)
    if match is None or Path(match["name"]).suffix.lower() in _FILES:
        return None
    from distcore_data.hub import hub_files

    called = match["name"] + (f":{match['config']}" if match["config"] else "")
    return _chosen(called, match["split"], hub_files(match["name"], match["config"]))


def _parted(source: str) -> tuple[str, str | None]:
    folder, _, split = source.rpartition("@")
    return (folder, split) if folder else (source, None)


def _of_dict(folder: Path, split: str | None) -> Split:
    names = _json(folder, DICT, "splits")
    chosen = _chosen(shown(folder), split, {str(name): () for name in names})
    files = _data_files(folder / str(chosen.name), f"dataset {chosen}")
    return Split(chosen.dataset, chosen.name, files, chosen.others)


def _of_folder(folder: Path, split: str | None) -> Split:
    name = shown(folder)
    if split is not None:
        raise DataError(f"dataset {name}: has no splits, it is one dataset; leave @{split} out")
    return Split(name, None, _data_files(folder, f"dataset {name}"))


def _chosen(dataset: str, split: str | None, files: Mapping[str, Sequence[Path]]) -> Split:
    """Return the split that is asked for, else ``train``, else the only one; raises DataError."""
    name = split or (next(iter(files)) if len(files) == 1 else "train")
    if name not in files:
        there = ", ".join(f"{dataset}@{other}" for other in files) or "none"
        problem = (
            f"has no split {name!r}{nearest(name, files)}"
            if split
            else "has no split 'train': name one"
        )
        raise DataError(f"dataset {dataset}: {problem} (found: {there})")
    return Split(
        dataset, name, tuple(files[name]), tuple(other for other in files if other != name)
    )


def _data_files(folder: Path, name: str) -> tuple[Path, ...]:
    if not (folder / STATE).is_file():
        raise DataError(
            f"{name}: {folder} has no {STATE}, so datasets did not write it, or not all of it"
        )
    try:
        return tuple(folder / entry["filename"] for entry in _json(folder, STATE, "_data_files"))
    except (TypeError, KeyError):
        raise DataError(f"{name}: {folder / STATE} does not name its data files") from None


def _json(folder: Path, file: str, key: str) -> list[Any]:
    try:
        value = json.loads((folder / file).read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"dataset {shown(folder)}: {file} cannot be used: {type(error).__name__} {error}"
        ) from None
    return list(value)


def shown(path: Path) -> str:
    """Return a path as messages show it: relative where it is below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
