"""Keep weights apart that the model's config ties, and that differ in the files.

``from_pretrained`` of transformers does so, too: it ties a head to the embedding only where the
files have one of them, or the same values twice. A model on the meta device is built from its
config, which does not know the files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distcore import MetaModelError
from distcore_tasks.shared.converted_weights import safetensors_folder
from distcore_tasks.shared.matched_weights import say_once

WEIGHTS = "model.safetensors"
"""The file of weights, unless an index names several."""
COMPARED_AT_ONCE = 2**24
"""Elements of each of two tensors that are in memory while they are compared."""


def tied_pairs(model: nn.Module) -> dict[str, str]:
    """Map the name of each parameter that shares another one's weight to the name of the other."""
    pairs: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return dict(pairs)


def keep_apart(name: str, meta_model: Any, loaded: Any, folder: Path) -> None:
    """Untie the weights of ``meta_model`` that differ in the files of ``folder``, in place.

    ``loaded`` is the same model as transformers loads it from the names and shapes in the files: it
    ties no weights that the files have twice, because it does not know whether they are equal.
    Raises MetaModelError if a weight has another name in the files.
    """
    for tied, source in tied_pairs(meta_model).items():
        is_there_twice = loaded.get_parameter(tied) is not loaded.get_parameter(source)
        if is_there_twice and differ_in_files(meta_model, folder, tied, source):
            untie(meta_model, tied)
    describe_ties(name, meta_model, folder)


def untie(model: Any, tied: str) -> None:
    """Give the parameter ``tied`` a weight of its own, with the same values."""
    path, _, attribute = tied.rpartition(".")
    shared = model.get_parameter(tied)
    weight = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
    setattr(model.get_submodule(path), attribute, weight)
    model.all_tied_weights_keys.pop(tied, None)


def describe_ties(name: str, model: Any, folder: Path) -> None:
    """Have the config of ``model`` say that it ties nothing where nothing is tied, and name in
    the log what differs.

    Other programs, which read the config of an export, would drop the head. A config that ties
    still other weights stays as it is: it could not say which. ``folder`` has the model's files.
    """
    # An older transformers ties whatever the files have, so nothing is apart.
    if not hasattr(model, "all_tied_weights_keys"):
        return
    by_config = model.get_expanded_tied_weights_keys(all_submodels=True)
    apart = sorted(by_config.keys() - tied_pairs(model).keys())
    if not apart:
        return
    first = apart[0]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # As that of a T5 v1.1, whose other embeddings transformers ties by the same key all the same.
    is_said_in_config = config.get("tie_word_embeddings") is False
    if not is_said_in_config:
        say_once(
            f"model {name}: config.json ties {first} to {by_config[first]}, but its files have two"
            " that differ: both are kept, and each is trained by itself"
        )
    if not tied_pairs(model):
        model.config.tie_word_embeddings = False


def differ_in_files(model: Any, folder: Path, tied: str, source: str) -> bool:
    """Return True if the parameters ``tied`` and ``source`` of ``model`` have different values in
    the files of ``folder``.
    """
    files = _files_by_key(folder)
    is_converted = not files
    if is_converted:
        files = _files_by_key(safetensors_folder(folder))
    spellings = {name: _spelling(model, name, files) for name in (tied, source)}
    # The conversion writes one tensor by two names once, so the other name is not there.
    if is_converted and None in spellings.values():
        return False
    tensors = []
    for name, key in spellings.items():
        if key is None:
            raise MetaModelError(
                f"{name} has another name in the files, which may have two weights that are tied"
            )
        file = files[key]
        tensors.append(_StoredTensor(file, file.stat().st_mtime_ns, key))
    first, second = tensors
    return _differ(first, second)


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor in a file; ``_differ`` remembers its answer by it."""

    file: Path
    changed: int
    """Time of the file's last change in nanoseconds: after another one the tensor is read again."""
    key: str
    """Name of the tensor in the file."""


@cache
def _differ(first: _StoredTensor, second: _StoredTensor) -> bool:
    """Return True if two tensors have different values. Some rows at a time are in memory."""
    from safetensors import safe_open

    with safe_open(first.file, "pt") as first_file, safe_open(second.file, "pt") as second_file:
        first_rows = first_file.get_slice(first.key)
        second_rows = second_file.get_slice(second.key)
        shape = first_rows.get_shape()
        if shape != second_rows.get_shape():
            return True
        elements_of_row = max(1, prod(shape[1:]))
        rows_at_once = max(1, COMPARED_AT_ONCE // elements_of_row)
        for start in range(0, shape[0], rows_at_once):
            end = start + rows_at_once
            # In fp32: two files may have one weight in two dtypes.
            first_part = first_rows[start:end].float()
            second_part = second_rows[start:end].float()
            if not torch.equal(first_part, second_part):
                return True
        return False


def _files_by_key(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in ``folder``; none if it has no safetensors files."""
    from safetensors import safe_open

    file, index = folder / WEIGHTS, folder / f"{WEIGHTS}.index.json"
    if file.is_file():
        with safe_open(file, "pt") as opened:
            return dict.fromkeys(opened.keys(), file)
    if index.is_file():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: folder / name for key, name in names.items()}
    return {}


def _spelling(model: Any, parameter: str, files: dict[str, Path]) -> str | None:
    """Return the name of a parameter in the files, with or without the prefix of a base model;
    ``None`` if neither is there.
    """
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    spellings = (parameter, parameter.removeprefix(prefix), prefix + parameter)
    return next((spelling for spelling in spellings if spelling in files), None)
