"""The parts into which DeepSpeed's ZeRO cuts weights and optimizer state, joined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcore import ConfigError
from distcore_migrate.foreign.pickles import load_any

WEIGHT = "fp32"
"""Key of a parameter's master weight among its tensors."""
Parts = dict[str, dict[str, Any]]
"""Tensors of the parameters, flat or whole, by DeepSpeed's name of one and then by key; ``step``
may be a number.
"""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the whole parameters, in the order in which stage 3 lays them out."""


def stages_1_and_2(shards: Sequence[Mapping[str, Any]], shapes: Shapes) -> Parts:
    """Join what each rank holds of flat groups of parameters; its file says where the
    pieces of each one are.
    """
    pieces: dict[str, dict[str, list[Tensor]]] = {}
    steps: dict[str, Any] = {}
    for shard in shards:
        for number, places in enumerate(shard["param_slice_mappings"]):
            flat = dict(shard["base_optimizer_state"]["state"].get(number, {}))
            step = flat.pop("step", None)
            flat[WEIGHT] = shard["single_partition_of_fp32_groups"][number]
            for name, place in places.items():
                steps[name] = step
                for key, values in flat.items():
                    piece = values[place.start : place.start + place.numel]
                    pieces.setdefault(name, {}).setdefault(key, []).append(piece)
    return {
        name: (
            {key: _joined(name, parts, shapes) for key, parts in tensors.items()}
            | {"step": steps[name]}
        )
        for name, tensors in pieces.items()
    }


def stage_3(shards: Sequence[Mapping[str, Any]], shapes: Shapes) -> Parts:
    """Join parameters of which every rank has an equal part, the last one padded,
    one after the other.
    """
    flat: list[dict[str, Tensor]] = []
    for shard in shards:
        states = [
            dict(state) for _, state in sorted(shard["optimizer_state_dict"]["state"].items())
        ]
        steps = [state.pop("step", None) for state in states]
        tensors = {key: torch.cat([state[key].flatten() for state in states]) for key in states[0]}
        flat.append(
            tensors | {WEIGHT: torch.cat([group.flatten() for group in shard["fp32_flat_groups"]])}
        )
    parts: Parts = {}
    start = 0
    for name, shape in shapes.items():
        count = math.ceil(math.prod(shape) / len(shards))
        pieces = {key: [tensors[key][start : start + count] for tensors in flat] for key in flat[0]}
        parts[name] = {key: _joined(name, each, shapes) for key, each in pieces.items()} | {
            "step": steps[0]
        }
        start += count
    return parts


def universal(folder: Path, shapes: Shapes) -> Parts:
    """Return the parameters of a universal checkpoint, which has a folder for each."""
    parts: Parts = {}
    for name in shapes:
        files = sorted((folder / name).glob("*.pt"))
        held = {file.stem: load_any(file) for file in files if file.stem != "step"}
        parts[name] = {
            key: value["param"] if isinstance(value, dict) else value for key, value in held.items()
        }
        if WEIGHT not in parts[name]:
            raise ConfigError(f"checkpoint {folder / name}: holds no {WEIGHT}.pt; it is not whole")
        parts[name] = {
            key: _joined(name, [value.flatten()], shapes) for key, value in parts[name].items()
        }
    return parts


def _joined(name: str, pieces: Sequence[Tensor], shapes: Shapes) -> Tensor:
    whole, shape = torch.cat(list(pieces)), shapes[name]
    if whole.numel() < math.prod(shape):
        raise ConfigError(
            f"checkpoint: {name!r} has {whole.numel()} of {math.prod(shape)} elements: a rank's is"
            " missing"
        )
    return whole[: math.prod(shape)].reshape(shape)
