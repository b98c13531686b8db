"""The base of an adapter, identified by its content: checkpoints leave the base's weights out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from distcore.config import RunConfig
from distcore.errors import ModelError
from distcore.files import sha256_of
from distcore.model.adapters import adapter_of
from distcore.plugin.strategy.contract import BaseModelRef
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Task

FILES = ("*.safetensors", "pytorch_model*.bin")
"""Files of weights in a model folder. transformers reads the first existing kind."""
NOT_THE_WEIGHTS = (
    "dropout",
    "pdrop",
    "drop_path",
    "_name_or_path",
    "version",
    "dtype",
    "id2label",
    "label2id",
)
"""Parts of transformers config keys that do not change random weights."""


def base_of(config: RunConfig, task: Task, module: nn.Module) -> BaseModelRef | None:
    """Return the base of ``module``, an adapted model; ``None`` without LoRA.

    No other parameters than the base's are frozen.

    Reads the files of weights whole. Raises ModelError if they cannot be read.
    """
    if config.lora.rank is None:
        return None
    parameters = frozenset(
        name for name, parameter in module.named_parameters() if not parameter.requires_grad
    )
    bound = BoundTask.wrap(task)
    folder = bound.weights_folder(config)
    seed = config.seed if bound.from_scratch else None
    named = named_by_content(module, folder, seed, parameters)
    if recipe := adapter_of(config).recipe(config):
        digest = _digest([f"{named.digest} {recipe}".encode()])
        named = replace(named, digest=digest, what=f"{named.what}, in {recipe}")
    return replace(named, parameters=parameters)


def named_by_content(
    module: nn.Module, folder: Path | None, seed: int | None, names: frozenset[str]
) -> BaseModelRef:
    """Return the digest of the parameters ``names`` of ``module``.

    It is of the ``folder`` that they were read from, else of the ``seed`` that they were drawn
    with, else of their values.
    """
    kind = type(module).__name__
    if folder is not None:
        digest, what = digest_of_files(folder), f"the weights in {folder}"
    elif seed is not None:
        digest, what = _digest_of_recipe(module, seed), f"a {kind} of seed {seed}"
    else:  # the task may have read weights from anywhere
        digest, what = _digest_of_values(module, names), f"a {kind} of the task"
    return BaseModelRef(digest=digest, what=what, folder=folder, parameters=frozenset())


def digest_of_files(folder: Path) -> str:
    """Return a SHA-256 over names and contents of the files of weights in ``folder``.

    Raises ModelError.
    """
    files: list[Path] = []
    for kind in FILES:
        files = files or sorted(folder.glob(kind))
    try:
        with ThreadPoolExecutor() as threads:  # hashlib releases the interpreter's lock
            digests = list(threads.map(sha256_of, files))
    except OSError as error:
        raise ModelError(
            f"model {folder}: {error.filename} cannot be read: {error.strerror}"
        ) from None
    pairs = zip(files, digests, strict=True)
    return _digest(f"{file.name} {digest}\n".encode() for file, digest in pairs)


def _digest_of_recipe(module: Any, seed: int) -> str:
    """Return a digest of the class, the architecture and the seed of a random model."""
    tree = {}
    for name, value in module.named_parameters():
        tree[name] = [str(value.dtype), *value.shape]
    if hasattr(module, "config"):
        tree = {}
        for key, value in module.config.to_dict().items():
            if not any(part in key for part in NOT_THE_WEIGHTS):
                tree[key] = value
    recipe = {"class": type(module).__name__, "config": tree, "seed": seed}
    return _digest([json.dumps(recipe, sort_keys=True, default=str).encode()])


def _digest_of_values(module: nn.Module, names: frozenset[str]) -> str:
    """Return a digest of the parameters ``names``: name, dtype, shape and bytes of each."""
    parameters = {name: value for name, value in module.named_parameters() if name in names}

    def parts() -> Iterator[bytes | memoryview]:
        for name, value in sorted(parameters.items()):
            yield f"{name} {value.dtype} {tuple(value.shape)}\n".encode()
            yield value.detach().cpu().contiguous().numpy().data

    return _digest(parts())


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
