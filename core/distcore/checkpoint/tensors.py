"""Write safetensors files, and hash them meanwhile, so that they need not be read again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from distcore.checkpoint.files import Files
from distcore.checkpoint.manifest import FileEntry

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""torch dtypes by safetensors' names."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 2**24
"""Bytes per write."""


def write_file(files: Files, path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write ``tensors``, by key, as a new safetensors file on disk; return size and SHA-256."""
    return write_hashed(files, path, _chunks(tensors))


def write_hashed(files: Files, path: Path, chunks: Iterator[bytes | memoryview]) -> FileEntry:
    """Write ``chunks`` to a new file and wait until it is on disk; return size and SHA-256."""
    size = 0
    digest = hashlib.sha256()

    def hash_chunks() -> Iterator[bytes | memoryview]:
        nonlocal size
        for chunk in chunks:
            digest.update(chunk)
            size += memoryview(chunk).nbytes
            yield chunk

    files.write(path, hash_chunks())
    files.sync(path)
    return FileEntry(size=size, sha256=digest.hexdigest())


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: length of the header, header, data.

    Tensors with wider elements come first, so that all data are aligned.
    """

    def widest_first(name: str) -> tuple[int, str]:
        return -tensors[name].element_size(), name

    names = sorted(tensors, key=widest_first)
    header = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # spaces after the header align the data
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        values = tensors[name].detach().cpu().contiguous().reshape(-1)
        data = values.view(torch.uint8).numpy().data  # as bytes, because numpy has no bfloat16
        for at in range(0, len(data), CHUNK):
            yield data[at : at + CHUNK]
