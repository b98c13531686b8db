"""Weights that a model's config ties, and whose files have two: kept apart where they differ,
as a whole load keeps.

``from_pretrained`` of transformers ties a head to the embedding where the files have one of them,
or twice the same values. A model on the meta device is built from its config, which does not know
the files.
"""

from __future__ import annotations

import json
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
    """Return the parameters that share the weight of another one, which is the
    value, by their names.
    """
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

    Other programs, which read the config of an export, would drop the head. A config that
    ties still other weights
    stays as it is: it could not say which. ``folder`` has the model's files.
    """
    # an older transformers, which ties whatever the files have
    if not hasattr(model, "all_tied_weights_keys"):
        return
    by_config = model.get_expanded_tied_weights_keys(all_submodels=True)
    apart = sorted(by_config.keys() - tied_pairs(model).keys())
    if not apart:
        return
    first = apart[0]
    says_so = (
        json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings")
        is False
    )
    # that of a T5 v1.1 says so, but transformers ties its other embeddings by the same key
    if not says_so:
        say_once(
            f"model {name}: config.json ties {first} to {by_config[first]}, but its files have two"
            " that differ: both are kept, and each is trained by itself"
        )
    if not tied_pairs(model):
        model.config.tie_word_embeddings = False


def differ_in_files(model: Any, folder: Path, one: str, other: str) -> bool:
    """Return True if two parameters of ``model`` have different values in
    the files of ``folder``.
    """
    places = _places(folder)
    is_converted = not places
    if is_converted:
        places = _places(safetensors_folder(folder))
    spellings = [_spelling(model, parameter, places) for parameter in (one, other)]
    # one tensor by two names, which the conversion writes once
    if is_converted and None in spellings:
        return False
    for parameter, spelling in zip((one, other), spellings, strict=True):
        if spelling is None:
            raise MetaModelError(
                f"{parameter} has another name in the files, which may have two weights that are"
                " tied"
            )
    first, second = (
        (str(places[key]), places[key].stat().st_mtime_ns, key) for key in spellings if key
    )
    return _differ(first, second)


@cache
def _differ(one: tuple[str, int, str], other: tuple[str, int, str]) -> bool:
    """Compare two tensors, given by file, time of its last change and name, some rows at a time."""
    from safetensors import safe_open

    with safe_open(one[0], "pt") as first_file, safe_open(other[0], "pt") as second_file:
        first, second = first_file.get_slice(one[2]), second_file.get_slice(other[2])
        shape = first.get_shape()
        if shape != second.get_shape():
            return True
        elements_of_row = max(1, prod(shape[1:]))
        rows = max(1, COMPARED_AT_ONCE // elements_of_row)
        starts = range(0, shape[0], rows)
        return any(
            not torch.equal(
                first[start : start + rows].float(), second[start : start + rows].float()
            )
            for start in starts
        )


def _places(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in ``folder``; none if it has no safetensors files."""
    from safetensors import safe_open

    file, index = folder / WEIGHTS, folder / f"{WEIGHTS}.index.json"
    if file.is_file():
        with safe_open(file, "pt") as opened:
            return dict.fromkeys(opened.keys(), file)
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: folder / name for key, name in files.items()}
    return {}


def _spelling(model: Any, parameter: str, places: dict[str, Path]) -> str | None:
    """Return the name of a parameter in the files, which may lack, or have, the prefix
    of a base model.
    """
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    spellings = (parameter, parameter.removeprefix(prefix), prefix + parameter)
    return next((spelling for spelling in spellings if spelling in places), None)
