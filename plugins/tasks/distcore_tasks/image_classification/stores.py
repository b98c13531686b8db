"""Labeled images of one source on disk. A batch reads its images one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from distcore import DataError
from distcore_tasks.image_classification.decoding import Resizing, decode
from distcore_tasks.shared.classification.labels import row_places


class Store(Protocol):
    """Storage of images, without labels."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def pixels(self, row: int, resizing: Resizing) -> np.ndarray:
        """Return an image, resized: uint8 ``(size, size, 3)``. Raises OSError or ValueError."""
        ...

    def places(self, rows: Sequence[int]) -> str:
        """Return how messages say where these images are."""
        ...

    def origin(self, row: int) -> dict[str, object]:
        """Return the origin of an image, for predictions."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Images:
    """Images with a label each; implements
    ``distcore_tasks.shared.classification.labels.Labeled``.
    """

    name: str
    """Name of the source in error messages, such as ``image folder photos``."""
    labels: list[int] | list[str]
    """One per image: all integers from 0, or all strings."""
    digests: np.ndarray
    """SHA-256 of the bytes of each image, uint8 ``(rows, 32)``."""
    store: Store
    """The images."""
    shape: tuple[int, int] | None = None
    """Height and width of all images, in pixels; ``None`` if they differ."""
    warnings: tuple[str, ...] = ()
    """Warnings about the source, one line each."""
    bad_rows: tuple[str, ...] = ()
    """A line for each image that was passed over."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def places(self, rows: Sequence[int]) -> str:
        """Return how messages say where these images are."""
        return self.store.places(rows)

    def problem(self, row: int, what: str) -> DataError:
        """Return the error of an image."""
        return DataError(f"{self.name}, {self.places([row])}: {what}")

    def pixels(self, row: int, resizing: Resizing) -> np.ndarray:
        """Return an image, resized: uint8 ``(size, size, 3)``. Raises DataError if it has
        changed since the check.
        """
        return read_pixels(self.name, self.store, row, resizing)


def read_pixels(name: str, store: Store, row: int, resizing: Resizing) -> np.ndarray:
    """Return an image, resized: uint8 ``(size, size, 3)``. Raises DataError; the
    message starts with ``name``.
    """
    try:
        return store.pixels(row, resizing)
    except (OSError, ValueError) as error:
        since = (
            ""
            if isinstance(store, Files) and not store.are_decoded
            else "changed since it was checked: "
        )
        raise DataError(f"{name}, {store.places([row])}: {since}{error}") from None


@dataclass(frozen=True, slots=True)
class Files:
    """Images in separate files; implements ``Store``."""

    folder: Path
    """Folder of the relative paths."""
    names: list[str]
    """Path of each file, relative to ``folder``."""
    are_decoded: bool = True
    """True if each has been decoded once."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.names)

    def pixels(self, row: int, resizing: Resizing) -> np.ndarray:
        """Read and decode a file."""
        return resizing.pixels(decode(self.encoded(row)))

    def encoded(self, row: int) -> bytes:
        """Return the bytes of a file."""
        return (self.folder / self.names[row]).read_bytes()

    def places(self, rows: Sequence[int]) -> str:
        """Return the names of the files."""
        return " and ".join(self.names[row] for row in rows)

    def origin(self, row: int) -> dict[str, object]:
        """Return the path of a file."""
        return {"file": str(self.folder / self.names[row])}


@dataclass(frozen=True, eq=False, slots=True)
class InFile:
    """Images that share a file."""

    source: str
    """The file."""

    def number(self, row: int) -> int:
        """Return the number of an image in the file, from 0."""
        return row

    def places(self, rows: Sequence[int]) -> str:
        """Return ``row 3``, ``rows 3 and 7``: counted from 1, while ``rows`` count from 0."""
        return row_places([self.number(row) for row in rows])

    def origin(self, row: int) -> dict[str, object]:
        """Return the file, and the row in the file, counted from 1."""
        return {"file": self.source, "row": self.number(row) + 1}


@dataclass(frozen=True, eq=False, slots=True)
class Given(InFile):
    """An image that was just read, whose number in the file is that of
    its row; implements ``Store``.
    """

    content: bytes
    """The encoded image."""

    def __len__(self) -> int:
        """Return 1."""
        return 1

    def pixels(self, row: int, resizing: Resizing) -> np.ndarray:
        """Decode the image."""
        return resizing.pixels(decode(self.content))


@dataclass(frozen=True, eq=False, slots=True)
class Blob(InFile):
    """Encoded images, concatenated in one memory-mapped file; implements ``Store``."""

    blob: np.ndarray
    """Bytes of all images, uint8."""
    offsets: np.ndarray
    """Start and end of each image: int64 ``(rows, 2)``."""
    numbers: np.ndarray
    """Number of each image in the file, from 0, int64 ``(rows,)``."""

    def number(self, row: int) -> int:
        """Return the number of an image in the file."""
        return int(self.numbers[row])

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.offsets)

    def pixels(self, row: int, resizing: Resizing) -> np.ndarray:
        """Decode an image."""
        return resizing.pixels(decode(self.encoded(row)))

    def encoded(self, row: int) -> bytes:
        """Return the bytes of an image."""
        start, end = self.offsets[row]
        return self.blob[start:end].tobytes()


@dataclass(frozen=True, eq=False, slots=True)
class Arrays(InFile):
    """Images as one array of pixels, memory-mapped; implements ``Store``."""

    array: np.ndarray
    """Pixels from 0 to 255, uint8: gray ``(rows, height, width)``, or with a last dimension of
    1, 3 or 4 channels.
    """
    numbers: np.ndarray
    """Number of each image among these, int64 ``(rows,)``."""

    def number(self, row: int) -> int:
        """Return the number of an image in the file."""
        return int(self.numbers[row])

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.numbers)

    def pixels(self, row: int, resizing: Resizing) -> np.ndarray:
        """Return an image in RGB. Gray levels are repeated for each channel,
        and transparency is dropped.
        """
        image = np.asarray(self.array[self.numbers[row]])
        image = image[..., None] if image.ndim == 2 else image[..., :3]
        image = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
        if not resizing.changes(*image.shape[:2]):
            return image
        from PIL import Image

        return resizing.pixels(Image.fromarray(np.ascontiguousarray(image)))
