"""Write rows as webdataset, mosaicml-streaming and litdata do: ``python write_shards.py OUT
FORM … < rows.json``.

Runs in an environment that has these packages, which need not be that of distcore; what a missing
one writes is left out. A column ``image`` is the path of an image.
"""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

from PIL import Image

PER_SHARD = 3


def as_webdataset(out: Path, rows: list[dict[str, Any]], packed: str) -> None:
    import webdataset

    out.mkdir(parents=True)
    pattern = f"{out}/%05d.tar{packed and '.gz'}"
    with webdataset.ShardWriter(
        pattern, maxcount=PER_SHARD, verbose=0, compress=bool(packed)
    ) as writer:
        for number, row in enumerate(rows):
            members = {"json": {"label": row["label"]}} if packed else {"cls": row["label"]}
            content = {"png": Image.open(row["image"])} if "image" in row else {"txt": row["text"]}
            writer.write({"__key__": f"{number:06}", **content, **members})


def as_mds(out: Path, rows: list[dict[str, Any]], packed: str) -> None:
    if "streaming" not in sys.modules:  # its own imports torchvision, which writing does not need
        spec = importlib.util.find_spec("streaming")
        if spec is None:
            raise ModuleNotFoundError("No module named 'streaming'")
        sys.modules["streaming"] = package = types.ModuleType("streaming")
        package.__path__ = list(spec.submodule_search_locations or [])
    from streaming.base import MDSWriter

    columns = {"image": "png"} if "image" in rows[0] else {"text": "str"}
    columns |= {"label": "int" if isinstance(rows[0]["label"], int) else "str"}
    size = 3000 if "image" in rows[0] else 300
    with MDSWriter(
        out=str(out), columns=columns, compression=packed or None, size_limit=size, hashes=["sha1"]
    ) as writer:
        for row in rows:
            writer.write(row | ({"image": Image.open(row["image"])} if "image" in row else {}))


def same(row: Any) -> Any:
    if isinstance(row, dict) and "image" in row:
        return row | {"image": Path(row["image"]).read_bytes()}
    return row


def as_list(row: dict[str, Any]) -> Any:
    return tuple(row.values())


def as_jpeg(row: dict[str, Any]) -> Any:
    """Add a picture, which keeps litdata from writing the rows as Arrow columns."""
    content = io.BytesIO()
    Image.new("RGB", (64, 64)).save(content, "JPEG")
    return row | {"image": Image.open(content)}


def as_litdata(out: Path, rows: list[dict[str, Any]], packed: str) -> None:
    from litdata import optimize

    make = {"list": as_list, "jpeg": as_jpeg}.get(packed.partition(" ")[0], same)
    level = next((level for level in ("chunk", "batch", "sample") if packed.endswith(level)), None)
    optimize(
        fn=make,
        inputs=rows,
        output_dir=str(out),
        chunk_size=PER_SHARD,
        num_workers=1,
        start_method="fork",
        compression="zstd" if level or packed == "zstd" else None,
        compression_level=level,
    )


WRITERS = {"webdataset": as_webdataset, "mds": as_mds, "litdata": as_litdata}
if __name__ == "__main__":
    rows = json.load(sys.stdin)
    for form in sys.argv[2:]:
        kind, _, more = form.partition(" ")
        try:
            WRITERS[kind](Path(sys.argv[1], form), rows, more)
        except ModuleNotFoundError as error:
            print(error)
