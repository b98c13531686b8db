"""Decode images with Pillow, which is imported only in functions, because arrays do not need it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distcore import DataError
from distcore.files import GIT_LFS
from distcore.registry import is_installed
from distcore_data import BadRows

if TYPE_CHECKING:
    from PIL.Image import Image

EIGHT_BITS = (
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
)
"""Pillow's modes of at most 8 bits per channel. Pillow would clip deeper ones at 255."""
CHUNK = 256
"""Number of images to check at a time."""


def check_pillow(name: str) -> None:
    """Raise DataError if Pillow is not installed. ``name``: the data that needs it."""
    if not is_installed("PIL"):
        raise DataError(
            f"{name}: the package Pillow is not installed. Install it with: pip install pillow"
        )


def decode(encoded: bytes) -> Image:
    """Decode the first image of a file, upright and in RGB.

    Gray levels are repeated for each channel, palettes are expanded, and transparency is dropped.
    Raises ValueError, one line, for bytes that are no image, are damaged, or have more than 8 bits
    per channel.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            mode = opened.mode
            if mode in EIGHT_BITS:
                image = ImageOps.exif_transpose(opened)
                # Without this step Pillow warns about palettes with partial transparency.
                return (image.convert("RGBA") if "transparency" in image.info else image).convert(
                    "RGB"
                )
    except UnidentifiedImageError:
        if encoded.startswith(GIT_LFS):
            raise ValueError(
                "is a pointer of Git LFS, not the image; fetch it: git lfs pull"
            ) from None
        raise ValueError("is no image that Pillow knows" if encoded else "is empty") from None
    except Exception as error:  # each format has errors of its own for damaged files
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"cannot be decoded: {reason}") from None
    raise ValueError(
        f"has more than 8 bits per channel (Pillow's mode {mode}): convert it to 8 bits"
    )


@dataclass(frozen=True, slots=True)
class Resizing:
    """The map from an image of any size to a square."""

    size: int
    """Height and width of the square, in pixels."""
    resample: int
    """Pillow's number of the resize filter."""
    cut_from: int | None = None
    """The length to which an image is resized before its middle is cut out; ``None``: to ``size``,
    and none is cut.
    """
    keeps_sides: bool = False
    """Whether this is the length of the shorter side, and the longer one stays in proportion."""

    def changes(self, height: int, width: int) -> bool:
        """Return True unless images of this size stay as they are."""
        return self.cut_from is not None or (height, width) != (self.size, self.size)

    def pixels(self, image: Image) -> np.ndarray:
        """Return the pixels of the square of an RGB image: uint8 ``(size, size, 3)``."""
        width, height = image.size
        if not self.changes(height, width):
            return np.asarray(image)
        if self.cut_from is None:
            return np.asarray(image.resize((self.size, self.size), self.resample))
        sides = (self.cut_from, self.cut_from)
        if self.keeps_sides:
            shorter = min(width, height)
            # As transformers rounds: towards zero.
            sides = (int(self.cut_from * width / shorter), int(self.cut_from * height / shorter))
        whole = np.asarray(image.resize(sides, self.resample))
        middle_rows = _middle(whole, self.size)
        return _middle(middle_rows.swapaxes(0, 1), self.size).swapaxes(0, 1)


def _middle(pixels: np.ndarray, size: int) -> np.ndarray:
    """Return the middle ``size`` rows of ``pixels``; of fewer rows all, with
    black ones around them.
    """
    rows = len(pixels)
    if rows >= size:
        start = (rows - size) // 2
        return pixels[start : start + size]
    framed = np.zeros((size, *pixels.shape[1:]), pixels.dtype)
    before = (size - rows + 1) // 2
    framed[before : before + rows] = pixels
    return framed


def check_images(
    count: int, read: Callable[[int], bytes], *, decodes: bool = True
) -> tuple[np.ndarray, dict[int, str]]:
    """Return the SHA-256 of all images, ``(count, 32)``, and the problems of invalid ones.

    The digests are uint8, the problems by the number of the image. ``read(i)`` returns the bytes of
    image i. Unless it ``decodes`` all, none is invalid.
    """

    def check(row: int) -> tuple[bytes, str | None]:
        try:
            encoded = read(row)
            if decodes:
                decode(encoded)
        except ValueError as error:
            return b"", str(error)
        return hashlib.sha256(encoded).digest(), None

    digests = np.zeros((count, 32), np.uint8)
    problems: dict[int, str] = {}
    # Pillow releases the GIL; the threads have ended when ranks start.
    with ThreadPoolExecutor() as pool:
        # In chunks: `map` would queue all images at once.
        for start in range(0, count, CHUNK):
            rows = range(start, min(start + CHUNK, count))
            results = pool.map(check, rows)
            for row, (digest, problem) in zip(rows, results, strict=True):
                if problem is None:
                    digests[row] = np.frombuffer(digest, np.uint8)
                else:
                    problems[row] = problem
    return digests, problems


def valid_images(
    digests: np.ndarray,
    problems: Mapping[int, str],
    bad: BadRows,
    error: Callable[[int, str], DataError],
    places: Callable[[Sequence[int]], str],
) -> list[int]:
    """Return the numbers of the valid images, and add the others to ``bad``.

    ``digests`` and ``problems`` are those of ``check_images``; ``error`` returns the error of an
    image, ``places`` names the files or rows of several. Raises DataError, one line that names
    invalid images, if there are more than ``bad`` allows, or none is valid.
    """
    lines = {row: str(error(row, problem)) for row, problem in problems.items()}
    # As a set: a row may have been reported before, by the check that fills the cache.
    bad_rows = {*lines.values(), *bad.problems}
    is_none_valid = len(lines) == len(digests) > 0
    if len(bad_rows) > bad.limit or is_none_valid:
        first, *others = problems
        further = ""
        if others:
            ellipsis = " …" if len(others) > 3 else ""
            further = f"; {len(others)} more cannot be used: {places(others[:3])}{ellipsis}"
        limit = ""
        if 0 < bad.limit < len(lines):
            limit = f"; more bad rows than the {bad.limit} of --skip-bad-rows"
        raise DataError(f"{lines[first]}{further}{limit}")
    for line in lines.values():
        bad.pass_over(DataError(line))
    return [row for row in range(len(digests)) if row not in problems]
