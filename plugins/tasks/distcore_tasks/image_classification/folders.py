"""Images in folders: ``DIR/cat/1.png`` has the label ``cat``."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from distcore import DataError
from distcore_data import BadRows, cached_folder, skipping
from distcore_tasks.image_classification.decoding import check_images, check_pillow, valid_images
from distcore_tasks.image_classification.stores import Files, Images

FORMAT = 2
"""Version of a cache entry, part of its key. Raise it when the checks of images change."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
"""File name extensions of images."""
SHOWN = ", ".join(SUFFIXES[:4])


def named_paths(path: Path) -> list[Path]:
    """Return the paths that ``path`` names: itself, a pattern's matches, or several with commas."""
    # A folder's own name may have a comma.
    if path.is_dir():
        return [path]
    paths = []
    for part in str(path).split(","):
        pattern = part.strip()
        # A pattern without a match stays, for the error that names it.
        paths += sorted(glob.glob(pattern)) or [pattern]
    return [Path(path).expanduser() for path in paths]


def open_folder(folders: Sequence[Path], most_bad_rows: int, *, decodes: bool = True) -> Images:
    """Return the images in the class folders of ``folders``, sorted by class and name.

    Raises DataError, one line.

    Reads all images once, and again only after a change of any name, size or modification time; if
    it ``decodes`` them, those that cannot be are bad rows.
    """
    path = folders[0] if len(folders) == 1 else Path()
    name = f"image folder {','.join(map(str, folders))}"
    check_pillow(name)
    labels: list[str] = []
    names: list[str] = []
    facts: list[tuple[str, int, int]] = []
    others: list[str] = []
    for folder in folders:
        for label in _classes(folder):
            for entry in _files(folder / label, others):
                stat = entry.stat()
                names.append(os.path.relpath(entry.path, path))
                facts.append((names[-1], stat.st_size, stat.st_mtime_ns))
                labels.append(label)
    with skipping(most_bad_rows) as bad:
        digests, valid_rows = _checked(name, Files(path, names, decodes), facts, bad)
    return Images(
        name=name,
        labels=[labels[row] for row in valid_rows],
        digests=digests,
        store=Files(path, [names[row] for row in valid_rows], decodes),
        warnings=tuple(_left_out(name, others)),
        bad_rows=tuple(bad.problems),
    )


def open_unlabeled(path: Path) -> Files:
    """Return all images below ``path``, sorted by path; raises DataError as ``open_folder``."""
    name = f"image folder {path}"
    check_pillow(name)
    facts = []
    for parent, folders, files in os.walk(path):
        # In place, so that the walk does not enter hidden folders.
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        for file_name in files:
            if _is_image(file_name) and not file_name.startswith("."):
                file = Path(parent, file_name)
                stat = file.stat()
                facts.append((str(file.relative_to(path)), stat.st_size, stat.st_mtime_ns))
    if not facts:
        raise DataError(f"{name}: has no images ({SHOWN} …)")
    facts.sort()
    store = Files(path, [file for file, _, _ in facts])
    with skipping(0) as bad:
        _checked(name, store, facts, bad)
    return store


def _checked(
    name: str,
    store: Files,
    facts: list[tuple[str, int, int]],
    bad: BadRows,
) -> tuple[np.ndarray, list[int]]:
    """Return the digests and the numbers of the valid images.

    They come from the cache unless a name, a size or a date of ``facts`` has changed. Adds invalid
    images to ``bad``. Raises DataError for one too many, and for one that the disk does not give.
    """

    def read(row: int) -> bytes:
        try:
            return store.encoded(row)
        except OSError as error:
            raise DataError(f"{name}, {store.places([row])}: {error.strerror or error}") from None

    def error(row: int, problem: str) -> DataError:
        return DataError(f"{name}, {store.places([row])}: {problem}")

    def check(folder: Path) -> None:
        digests, problems = check_images(len(store), read, decodes=store.are_decoded)
        # Before anything is stored, so that a refused folder is checked again.
        valid_images(digests, problems, bad, error, store.places)
        np.save(folder / "digests.npy", digests)
        # As pairs: keys of JSON are texts, not numbers.
        text = json.dumps([*problems.items()])
        (folder / "problems.json").write_text(text, encoding="utf-8")

    identity = json.dumps([FORMAT, str(store.folder.resolve()), facts, store.are_decoded])
    key = hashlib.sha256(identity.encode()).hexdigest()[:40]
    folder = cached_folder("images", key, check)
    text = (folder / "problems.json").read_text(encoding="utf-8")
    problems: dict[int, str] = dict(json.loads(text))
    digests: np.ndarray = np.load(folder / "digests.npy", mmap_mode="r", allow_pickle=False)
    valid_rows = valid_images(digests, problems, bad, error, store.places)
    return digests[valid_rows] if problems else digests, valid_rows


def _classes(path: Path) -> list[str]:
    """Return the sorted names of the class folders.

    Raises DataError if there are none, or for images beside them.
    """
    name = f"image folder {path}"
    try:
        entries = sorted(_visible(path), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}") from None
    classes = [entry.name for entry in entries if entry.is_dir()]
    loose = [entry.name for entry in entries if entry.is_file() and _is_image(entry.name)]
    if loose:
        raise DataError(
            f"{name}, {loose[0]}: lies in no class folder; an image of class cat belongs into"
            f" {path}/cat"
        )
    if not classes:
        raise DataError(
            f"{name}: has no class folders; an image of class cat belongs into {path}/cat"
        )
    return classes


def _files(path: Path, others: list[str]) -> list[os.DirEntry[str]]:
    """Return the images of a class, sorted by name; append other entries to ``others``.

    Raises DataError if there are none.
    """
    entries = sorted(_visible(path), key=lambda entry: entry.name)
    images = []
    names_of_others = []
    for entry in entries:
        if entry.is_file() and _is_image(entry.name):
            images.append(entry)
        else:
            names_of_others.append(f"{path.name}/{entry.name}")
    if not images:
        hint = "remove it"
        if any(entry.is_dir() for entry in entries):
            hint = f"it has folders of its own: is {path} the folder of all classes?"
        raise DataError(f"class folder {path}: has no images ({SHOWN} …); {hint}")
    others += names_of_others
    return images


def _visible(path: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _left_out(name: str, others: list[str]) -> Iterator[str]:
    if others:
        shown = ", ".join(others[:3]) + ", …" * (len(others) > 3)
        yield (
            f"{name}: {len(others)} entries of class folders are no images ({SHOWN} …) and are left"
            f" out: {shown}"
        )
