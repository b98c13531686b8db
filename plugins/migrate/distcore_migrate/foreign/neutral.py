"""Writes a run folder with one checkpoint in distcore's own format, which docs/checkpoint-format.md describes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from distcore import ConfigError

FILE_BYTES = 2**30
"""Most bytes of tensors in a file."""
DTYPES = {"float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "bool": "BOOL", "uint8": "U8"}
"""Names in safetensors of the dtypes of a model that trains in fp32 master weights."""


def write(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write the checkpoint ``folder``: complete, or not at all. Raises ConfigError, one line."""
    staging = folder.with_name(f".writing-{folder.name}")
    try:
        staging.mkdir(parents=True)
        entries: dict[str, Any] = {}
        for number, group in enumerate(_in_files(tensors)):
            for kind in ("model", "optimizer"):
                own = {name: values for name, values in group.items() if name[0].startswith(f"{kind}/")}
                _write_file(staging / f"{kind}-00000-{number:03d}.safetensors", own, tensors, entries)
        (staging / "state.json").write_text(json.dumps(state, indent=1, ensure_ascii=False), encoding="utf-8")
        files = {file.name: _file_entry(file) for file in sorted(staging.iterdir())}
        text = json.dumps({"format": 2, "files": files, "tensors": entries}, indent=1, ensure_ascii=False)
        (staging / "manifest.json").write_text(text, encoding="utf-8")
        digest = hashlib.sha256(text.encode()).hexdigest()
        (staging / "manifest.json.sha256").write_text(f"{digest}  manifest.json\n", encoding="utf-8")
        staging.rename(folder)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise ConfigError(f"--out {folder}: cannot be written: {error.strerror or error}") from None


Piece = tuple[str, int]
"""A tensor's name, and the first of its flattened elements."""


def _in_files(tensors: Mapping[str, Tensor]) -> Iterator[dict[Piece, Tensor]]:
    """Yield the pieces of one file after the other."""
    group: dict[Piece, Tensor] = {}
    room = FILE_BYTES
    for name, tensor in tensors.items():
        many = FILE_BYTES // tensor.element_size()
        parts = [tensor] if tensor.numel() <= many else torch.split(tensor.reshape(-1), many)
        for number, part in enumerate(parts):
            if group and part.nbytes > room:
                yield group
                group, room = {}, FILE_BYTES
            group[name, number * many] = part.contiguous()
            room -= part.nbytes
    yield group


def _write_file(
    file: Path, pieces: Mapping[Piece, Tensor], tensors: Mapping[str, Tensor], entries: dict[str, Any]
) -> None:
    """Write a file, if it has any piece, and add the pieces to the manifest's entries."""
    keyed = {}
    for (name, start), values in pieces.items():
        whole, bare = tensors[name], name.partition("/")[2]
        dtype = DTYPES[str(whole.dtype).removeprefix("torch.")]
        entry = entries.setdefault(name, {"dtype": dtype, "shape": list(whole.shape), "pieces": []})
        if values.numel():  # a tensor without elements is in no file
            key = bare if values.numel() == whole.numel() else f"{bare}@{start}"
            entry["pieces"].append({"file": file.name, "key": key, "start": start, "count": values.numel()})
            keyed[key] = values
    if keyed:
        save_file(keyed, file)


def _file_entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}
