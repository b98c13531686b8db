"""Images in folders: ``DIR/cat/1.png`` has the label ``cat``."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from distcore import DataError
from distcore_data import cached_folder
from distcore_tasks.image_classification.decoding import check_images, check_pillow
from distcore_tasks.image_classification.rows import Files, Images

FORMAT = 1
"""Version of a cache entry, part of its key. Raise it when the checks of images change."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
"""File name extensions of images."""
SHOWN = ", ".join(SUFFIXES[:4])


def open_folder(path: Path) -> Images:
    """Return the images in the class folders of ``path``, sorted by class and name. Raises DataError, one line.

    Decodes all images once, and again only after a change of any name, size or modification time.
    """
    name = f"image folder {path}"
    check_pillow(name)
    labels: list[str] = []
    names: list[str] = []
    facts: list[tuple[str, int, int]] = []
    others: list[str] = []
    for label in _classes(name, path):
        for entry in _files(path / label, others):
            stat = entry.stat()
            names.append(f"{label}/{entry.name}")
            facts.append((names[-1], stat.st_size, stat.st_mtime_ns))
            labels.append(label)
    store = Files(path, names)
    digests = _digests(name, store, facts)
    return Images(name=name, labels=labels, digests=digests, store=store, warnings=tuple(_left_out(name, others)))


def open_unlabeled(path: Path) -> Files:
    """Return all images below ``path``, sorted by path. Raises DataError as ``open_folder`` does."""
    name = f"image folder {path}"
    check_pillow(name)
    images = []
    for above, folders, files in os.walk(path):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        images += [Path(above, file) for file in files if _is_image(file) and not file.startswith(".")]
    facts = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in images]
    if not facts:
        raise DataError(f"{name}: has no images ({SHOWN} …)")
    facts.sort()
    store = Files(path, [file for file, _, _ in facts])
    _digests(name, store, facts)
    return store


def _digests(name: str, store: Files, facts: list[tuple[str, int, int]]) -> np.ndarray:
    """Return the result of ``check_images``, from the cache if no name, size or modification time has changed."""

    def check(folder: Path) -> None:
        try:
            np.save(folder / "digests.npy", check_images(len(store.names), store.encoded, store.places))
        except ValueError as error:
            raise DataError(f"{name}, {error}") from None

    key = hashlib.sha256(json.dumps([FORMAT, str(store.folder.resolve()), facts]).encode()).hexdigest()[:40]
    file = cached_folder("images", key, check) / "digests.npy"
    digests: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    return digests


def _classes(name: str, path: Path) -> list[str]:
    """Return the sorted names of the class folders. Raises DataError if there are none, or for images beside them."""
    try:
        entries = sorted(_visible(path), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}") from None
    classes = [entry.name for entry in entries if entry.is_dir()]
    loose = [entry.name for entry in entries if entry.is_file() and _is_image(entry.name)]
    if loose:
        raise DataError(f"{name}, {loose[0]}: lies in no class folder; an image of class cat belongs into {path}/cat")
    if not classes:
        raise DataError(f"{name}: has no class folders; an image of class cat belongs into {path}/cat")
    return classes


def _files(path: Path, others: list[str]) -> list[os.DirEntry[str]]:
    """Return the images of a class, sorted by name; append other entries to ``others``. Raises DataError if empty."""
    entries = sorted(_visible(path), key=lambda entry: entry.name)
    images = [entry for entry in entries if entry.is_file() and _is_image(entry.name)]
    if not images:
        inner = next((entry.name for entry in entries if entry.is_dir()), None)
        hint = f"it has folders of its own: is {path} the folder of all classes?" if inner else "remove it"
        raise DataError(f"class folder {path}: has no images ({SHOWN} …); {hint}")
    others += [f"{path.name}/{entry.name}" for entry in entries if not (entry.is_file() and _is_image(entry.name))]
    return images


def _visible(path: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _left_out(name: str, others: list[str]) -> Iterator[str]:
    if others:
        some = ", ".join(others[:3]) + ", …" * (len(others) > 3)
        yield f"{name}: {len(others)} entries of class folders are no images ({SHOWN} …) and are left out: {some}"
