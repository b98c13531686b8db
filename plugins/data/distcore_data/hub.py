"""Datasets of the Hugging Face hub. The library ``datasets`` is imported only to fetch one
that is not cached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distcore import DataError
from distcore.registry import is_installed
from distcore_data.cache import MANIFEST, cached_folder

FORMAT = 1
"""Version of a cache entry, part of its key."""
SPLITS = "splits.json"
"""File of a cache entry: the Arrow files of each split, which lie in the cache of datasets."""
SECONDS = 10
"""Longest wait for the hub; without an answer, the cache of ``datasets`` is used."""
REASON = 300
"""Largest number of characters of an error message of ``datasets``."""


def hub_files(name: str, config: str | None) -> dict[str, tuple[Path, ...]]:
    """Return the Arrow files of each split, by its name; raises DataError, one line.

    A dataset is looked up once. All ranks and later runs then read the same
    rows, without a network.
    """
    key = hashlib.sha256(json.dumps([FORMAT, name, config]).encode()).hexdigest()[:40]
    for _ in range(2):
        folder = cached_folder("hub", key, lambda folder: _fetch(folder, name, config))
        splits = json.loads((folder / SPLITS).read_text(encoding="utf-8"))
        if all(Path(file).is_file() for files in splits.values() for file in files):
            break
        # the cache of datasets was emptied: fetch it again
        (folder / MANIFEST).unlink(missing_ok=True)
    return {split: tuple(map(Path, files)) for split, files in splits.items()}


def _fetch(folder: Path, name: str, config: str | None) -> None:
    splits = _load(name, config)
    files = {
        split: [entry["filename"] for entry in rows.cache_files] for split, rows in splits.items()
    }
    (folder / SPLITS).write_text(json.dumps(files), encoding="utf-8")


def _load(name: str, config: str | None) -> Mapping[str, Any]:
    """Return the dataset's splits, downloaded and turned into Arrow files by datasets."""
    said = f"data {name!r}: neither a file nor a folder"
    if not is_installed("datasets"):
        needed = "names of the hub need the package datasets, which is not installed"
        raise DataError(f"{said}, and {needed}. Install it with: pip install datasets")
    with silence_datasets():
        try:
            return _load_or_read_cache(name, config)
        except Exception as error:  # each way to fail has an exception of its own
            reason = " ".join(str(error).split())[:REASON] or type(error).__name__
            hint = f"; a config is named as {name}:CONFIG" if "config" in reason.lower() else ""
            raise DataError(f"{said}, and not available from the hub: {reason}{hint}") from None


def _load_or_read_cache(name: str, config: str | None) -> Mapping[str, Any]:
    import datasets
    from datasets.packaged_modules.cache.cache import Cache as Cached
    from huggingface_hub import dataset_info

    splits: Mapping[str, Any]
    try:
        dataset_info(name, timeout=SECONDS)  # load_dataset itself tries for half a minute
    except Exception as error:
        try:
            owned = name.split("/")[1]
            cached = Cached(
                dataset_name=owned, repo_id=name, config_name=config, version="auto", hash="auto"
            )
            splits = cached.as_dataset()
        except ValueError as lacking:
            raise ValueError(f"{error}; in its cache: {lacking}") from None
    else:
        splits = datasets.load_dataset(name, config, keep_in_memory=False)
    return splits


@contextmanager
def silence_datasets() -> Iterator[None]:
    """Silence the progress bars and warnings of datasets, which the user cannot act on."""
    import datasets

    hidden, level = datasets.are_progress_bars_disabled(), datasets.utils.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(level)
        if not hidden:
            datasets.enable_progress_bars()
