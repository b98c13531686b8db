"""Images as arrays, from ``.npz`` files or scikit-learn's digits. Neither needs Pillow."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from distcore import DataError
from distcore.files import is_git_lfs_pointer
from distcore_data import cached_folder, pass_over, row_error, skipping
from distcore_tasks.image_classification.decoding import Resizing, check_pillow
from distcore_tasks.image_classification.stores import Arrays, Images, Store
from distcore_tasks.shared.classification.labels import label_problem

FORMAT = 2
"""Version of a cache entry, part of its key. Raise it when the files of an entry change."""
NAMES = ("images", "labels")
"""The arrays that a file must have."""
BAD_ROWS = "bad_rows.json"
"""File of a cache entry with a line for each row that was passed over."""


def open_npz(path: Path, most_bad_rows: int = 0) -> Images:
    """Return the images of a ``.npz`` file. Raises DataError, one line, for arrays of another form.

    Passes over at most ``most_bad_rows`` that have no usable label.
    """
    name = f"data file {path}"

    def unpack(folder: Path) -> None:
        images, labels = _arrays_of(name, path, folder, NAMES)
        _check(name, images)
        if labels.shape != images.shape[:1]:
            raise DataError(
                f"{name}: labels have the shape {labels.shape}, expected one per image:"
                f" ({len(images)},)"
            )
        with skipping(most_bad_rows) as bad:
            rows = _usable(name, labels.tolist())
        _write_rows(folder, images, labels.tolist(), rows)
        (folder / BAD_ROWS).write_text(
            json.dumps([*bad.problems], ensure_ascii=False), encoding="utf-8"
        )

    return _open(name, str(path), f"npz-{FORMAT}-{_content(path)}", unpack)


def open_unlabeled(path: Path) -> Arrays:
    """Return the images of a ``.npz`` file, with or without labels. Raises DataError, one line."""
    name = f"data file {path}"

    def unpack(folder: Path) -> None:
        [images] = _arrays_of(name, path, folder, NAMES[:1])
        _check(name, images)

    folder = cached_folder("images", f"npz-unlabeled-{FORMAT}-{_content(path)}", unpack)
    array = np.asarray(np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False))
    return Arrays(str(path), array, np.arange(len(array)))


def check_resizing(name: str, store: Store, resizing: Resizing) -> None:
    """Raise DataError if arrays need resizing but Pillow is not installed.

    The message starts with ``name``.
    """
    if not isinstance(store, Arrays):
        return
    height, width = store.array.shape[1:3]
    if resizing.changes(height, width):
        check_pillow(f"{name}, from {height} x {width} pixels to {resizing.size} x {resizing.size}")


def digits() -> Images:
    """Return the handwritten digits that come with scikit-learn: 1,797 gray images of 8 x 8 pixels,
    labels 0 to 9.
    """

    def write(folder: Path) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = np.round(digits.images * (255 / 16)).astype(np.uint8)  # of 17 shades of gray
        np.save(folder / "images.npy", images)
        _write_rows(folder, images, digits.target.tolist(), range(len(images)))

    return _open("dataset digits", "digits", f"digits-{FORMAT}-{version('scikit-learn')}", write)


EMBEDDED: dict[str, Callable[[], Images]] = {"digits": digits}
"""Map each dataset name, as in ``--data NAME``, to the function that returns its images."""


def _open(name: str, source: str, key: str, build: Callable[[Path], None]) -> Images:
    """Return the images of the cache's folder ``key``, which ``build`` fills if it is new."""
    folder = cached_folder("images", key, build)
    mapped = np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False)
    # As a plain array: indexing numpy's memmap class is several times slower.
    array = np.asarray(mapped)
    rows = np.load(folder / "rows.npy", allow_pickle=False)
    bad_rows: tuple[str, ...] = ()
    file_of_bad_rows = folder / BAD_ROWS
    if file_of_bad_rows.is_file():
        bad_rows = tuple(json.loads(file_of_bad_rows.read_text(encoding="utf-8")))
    return Images(
        name=name,
        labels=json.loads((folder / "labels.json").read_text(encoding="utf-8")),
        digests=np.load(folder / "digests.npy", allow_pickle=False),
        store=Arrays(source, array, rows),
        shape=(array.shape[1], array.shape[2]),
        bad_rows=bad_rows,
    )


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:40]


def _arrays_of(name: str, path: Path, folder: Path, names: Sequence[str]) -> list[np.ndarray]:
    """Extract the arrays to ``folder``, and map them into memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member.removesuffix(".npy") for member in archive.namelist()]
            for array_name in names:
                if array_name not in members:
                    raise DataError(
                        f"{name}: has no array {array_name!r}, expected {' and '.join(names)}"
                        f" (found: {members})"
                    )
            # numpy cannot map an array inside of an archive.
            files = [archive.extract(f"{array_name}.npy", folder) for array_name in names]
        return [np.load(file, mmap_mode="r", allow_pickle=False) for file in files]
    except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
        if is_git_lfs_pointer(path):
            raise DataError(
                f"{name}: is a pointer of Git LFS, not the file; fetch it: git lfs pull"
            ) from None
        raise DataError(f"{name}: not a readable .npz file: {str(error).splitlines()[0]}") from None


def _check(name: str, images: np.ndarray) -> None:
    """Raise DataError unless ``images`` are rows of pixels from 0 to 255."""
    has_channels = images.ndim == 4 and images.shape[3] in (1, 3, 4)
    if images.ndim != 3 and not has_channels:
        expected = "(rows, height, width), or with 1, 3 or 4 channels behind"
        raise DataError(f"{name}: images have the shape {images.shape}, expected {expected}")
    if images.dtype != np.uint8:
        raise DataError(
            f"{name}: images are {images.dtype}, expected uint8 from 0 to 255: convert them"
        )
    if not len(images):
        raise DataError(f"{name}: holds no rows")


def _usable(name: str, labels: Sequence[object]) -> list[int]:
    """Return the numbers of the rows whose labels can be used; the others are bad rows."""
    rows, errors = list[int](), list[DataError]()
    for row, label in enumerate(labels):
        if problem := label_problem(label, label):  # labels of an array have one type
            errors.append(row_error(name, row + 1, problem))
            pass_over(errors[-1])
        else:
            rows.append(row)
    if not rows:
        raise errors[0]
    return rows


def _write_rows(
    folder: Path, images: np.ndarray, labels: Sequence[object], rows: Sequence[int]
) -> None:
    """Write the numbers of the rows, and the label and the digest of each of their images."""
    np.save(folder / "rows.npy", np.asarray(rows, np.int64))
    text = json.dumps([labels[row] for row in rows], ensure_ascii=False)
    (folder / "labels.json").write_text(text, encoding="utf-8")
    digests = bytearray()
    for row in rows:
        # The digest reads memory, which is in the order of pixels only then.
        pixels = np.ascontiguousarray(images[row])
        digests += hashlib.sha256(pixels.data).digest()
    np.save(folder / "digests.npy", np.frombuffer(digests, np.uint8).reshape(-1, 32))
