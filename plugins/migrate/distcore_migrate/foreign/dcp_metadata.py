"""Folders of ``torch.distributed.checkpoint``: what they hold, whole, by the path of each value.

``.metadata`` is a pickle. Only the classes that torch writes into it are made, none
of which runs anything.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from distcore import ConfigError
from distcore_migrate.foreign.pickles import load_any, malformed

FILE = ".metadata"
CLASSES = (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
"""Of ``torch.distributed.checkpoint.metadata``."""


class _RefusedError(pickle.UnpicklingError):
    """A pickle asks for a name that is not of the format."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the format; raises _RefusedError for any other name."""
        if module == metadata.__name__ and name in CLASSES:
            return getattr(metadata, name)
        if (module, name) == (filesystem.__name__, "_StorageInfo"):
            return getattr(filesystem, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return getattr(torch.serialization, name)
        if module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(torch, name)
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath
        raise _RefusedError(f"{module}.{name}")


def values(folder: Path) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each value of a folder with its path, such as
    ``("optimizer", "state", NAME, "exp_avg")``.

    Raises ConfigError, one line, for what is damaged, asks for other classes, or lies
    outside of the folder.
    """
    index = _metadata(folder)
    with malformed(folder / FILE):
        stored = {}
        for key, info in index.storage_data.items():
            # A piece of a tensor is found by where it begins.
            stored[key.fqn, tuple(key.offset or ())] = info
        for name, value in index.state_dict_metadata.items():
            path = tuple((index.planner_data or {}).get(name, (name,)))
            if isinstance(value, metadata.TensorStorageMetadata):
                yield path, _whole(folder, name, value, stored)
            else:
                yield path, _read(folder, stored[name, ()])


def _metadata(folder: Path) -> metadata.Metadata:
    file = folder / FILE
    try:
        with file.open("rb") as opened:
            index = _Unpickler(opened).load()
    except OSError as error:
        raise ConfigError(
            f"checkpoint file {file}: cannot be read: {error.strerror or error}"
        ) from None
    except _RefusedError as error:
        raise ConfigError(
            f"checkpoint file {file}: refused: its pickle asks for {error}, which is not of its"
            " format; nothing was run"
        ) from None
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        line = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"checkpoint file {file}: damaged: {type(error).__name__}: {line}"
        ) from None
    if not isinstance(index, metadata.Metadata):
        raise ConfigError(f"checkpoint file {file}: damaged: holds no Metadata")
    return index


def _whole(
    folder: Path, name: str, what: metadata.TensorStorageMetadata, stored: dict[Any, Any]
) -> torch.Tensor:
    """Return a tensor, put together from the pieces of all ranks."""
    whole = torch.empty(what.size, dtype=what.properties.dtype)
    if sum(chunk.sizes.numel() for chunk in what.chunks) != whole.numel():
        raise ConfigError(f"checkpoint {folder}: damaged: the pieces of {name!r} are not the whole")
    for chunk in what.chunks:
        place = tuple(
            slice(start, start + size)
            for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        whole[place].copy_(_read(folder, stored[name, tuple(chunk.offsets)]))
    return whole


def _read(folder: Path, info: Any) -> Any:
    """Return one piece of a file."""
    file = folder / info.relative_path
    if (
        Path(info.relative_path).name != info.relative_path
        or file.suffix != ".distcp"
        or info.transform_descriptors
    ):
        raise ConfigError(
            f"checkpoint {folder}: {info.relative_path} is not read, only .distcp files as they are"
        )
    try:
        with file.open("rb") as opened:
            opened.seek(info.offset)
            piece = io.BytesIO(opened.read(info.length))
    except OSError as error:
        raise ConfigError(
            f"checkpoint file {file}: cannot be read: {error.strerror or error}"
        ) from None
    return load_any(file, piece)
