"""Small images, made on the spot: of two classes, which differ in color, in folders,
Parquet files and arrays.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

CLASSES = ("blue", "red")


def pixels(row: int, size: int = 12) -> np.ndarray:
    """Image ``row``, of class ``row % 2``: noise in blue or red."""
    noise = np.random.default_rng(row).integers(0, 160, (size, size, 3)).astype(np.uint8)
    noise[..., 2 if row % 2 == 0 else 0] += 80
    return noise


def encoded(array: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return file.getvalue()


def in_folders(folder: Path, rows: int, size: int = 12) -> Path:
    """Write ``rows`` images as ``folder/blue/00.png`` and so on."""
    for row in range(rows):
        file = folder / CLASSES[row % 2] / f"{row:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(pixels(row, size)))
    return folder


def in_parquet(
    path: Path, images: list[Any], labels: list[Any], names: tuple[str, ...] = ()
) -> Path:
    """Write a Parquet file as Hugging Face does; ``names``: of the classes, kept in the schema."""
    table = pa.table({"image": images, "label": labels})
    if names:
        feature = {"names": list(names), "_type": "ClassLabel"}
        stored = json.dumps({"info": {"features": {"image": {"_type": "Image"}, "label": feature}}})
        table = table.replace_schema_metadata({"huggingface": stored})
    pq.write_table(table, path)
    return path
