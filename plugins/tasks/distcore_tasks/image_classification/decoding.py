"""Encoded images to pixels, by Pillow, which is imported where it is needed: arrays do without it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from distcore import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""Pillow's modes of at most 8 bits per channel; deeper ones it would cut off at 255."""
CHUNK = 256
"""Images that are checked at a time."""


def check_pillow(name: str) -> None:
    """Raise DataError if Pillow is not installed; ``name`` says what needs it."""
    if find_spec("PIL") is None:
        raise DataError(f"{name}: the package Pillow is not installed. Install it with: pip install pillow")


def decode(encoded: bytes) -> Image:
    """Return an encoded image, its first one where it has several, upright and in red, green and blue.

    Grey becomes equal parts of each, a palette its colors, and transparency is left out. Raises ValueError, one line,
    for what is no image, is damaged, or has more than 8 bits per channel.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            mode = opened.mode
            if mode in EIGHT_BITS:
                image = ImageOps.exif_transpose(opened)
                # Pillow warns of a palette whose colors are transparent by degrees unless it becomes this first.
                return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
    except UnidentifiedImageError:
        raise ValueError("is no image that Pillow knows" if encoded else "is empty") from None
    except Exception as error:  # each format has errors of its own for damaged files
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"cannot be decoded: {reason}") from None
    raise ValueError(f"has more than 8 bits per channel (Pillow's mode {mode}): convert it to 8 bits")


def resized(image: Image, size: int, resample: int) -> np.ndarray:
    """Return the pixels of an image in red, green and blue, made a square: uint8 ``(size, size, 3)``."""
    return np.asarray(image if image.size == (size, size) else image.resize((size, size), resample))


def check_images(count: int, read: Callable[[int], bytes], places: Callable[[Sequence[int]], str]) -> np.ndarray:
    """Decode all images and return their SHA-256, uint8 ``(count, 32)``.

    ``read(i)`` returns image i as it is encoded, or raises OSError; ``places`` says where images are. Raises
    ValueError, one line, which names the images that cannot be used.
    """

    def check(row: int) -> tuple[bytes, str | None]:
        try:
            encoded = read(row)
            decode(encoded)
        except (OSError, ValueError) as error:
            return b"", str(error.strerror or error) if isinstance(error, OSError) else str(error)
        return hashlib.sha256(encoded).digest(), None

    digests, problems = np.empty((count, 32), np.uint8), {}
    with ThreadPoolExecutor() as pool:  # Pillow decodes without Python's lock; no thread is left when ranks start
        for start in range(0, count, CHUNK):
            rows = range(start, min(start + CHUNK, count))
            for row, (digest, problem) in zip(rows, pool.map(check, rows), strict=True):
                if problem is None:
                    digests[row] = np.frombuffer(digest, np.uint8)
                else:
                    problems[row] = problem
    if problems:
        first, *others = problems
        some = f"; {len(others)} more cannot be used: {places(others[:3])}{' …' * (len(others) > 3)}" if others else ""
        raise ValueError(f"{places([first])}: {problems[first]}{some}")
    return digests
