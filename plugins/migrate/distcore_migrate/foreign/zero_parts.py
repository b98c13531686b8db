"""Join the parts into which DeepSpeed's ZeRO cuts weights and optimizer state."""

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
"""Tensors of the parameters, flat or whole, by DeepSpeed's name of a parameter, then by key.

``step`` may be a number.
"""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the whole parameters, in the order in which stage 3 lays them out."""


def stages_1_and_2(shards: Sequence[Mapping[str, Any]], shapes: Shapes) -> Parts:
    """Join what each rank holds of flat groups of parameters.

    The file of a rank says where the piece of each parameter is in its groups.
    """
    pieces: dict[str, dict[str, list[Tensor]]] = {}
    steps: dict[str, Any] = {}
    for shard in shards:
        for number, slices_by_name in enumerate(shard["param_slice_mappings"]):
            flat_group = dict(shard["base_optimizer_state"]["state"].get(number, {}))
            step = flat_group.pop("step", None)
            flat_group[WEIGHT] = shard["single_partition_of_fp32_groups"][number]
            for name, flat_slice in slices_by_name.items():
                steps[name] = step
                end = flat_slice.start + flat_slice.numel
                for key, values in flat_group.items():
                    piece = values[flat_slice.start : end]
                    pieces.setdefault(name, {}).setdefault(key, []).append(piece)
    parts: Parts = {}
    for name, pieces_by_key in pieces.items():
        parts[name] = _joined_by_key(name, pieces_by_key, shapes)
        parts[name]["step"] = steps[name]
    return parts


def stage_3(shards: Sequence[Mapping[str, Any]], shapes: Shapes) -> Parts:
    """Join parameters that lie one after the other in the tensors of every rank.

    Every rank has an equal part of each, the last one padded.
    """
    flat_by_rank = []
    for shard in shards:
        tensors, step = _flat_tensors(shard)
        flat_by_rank.append(tensors)
    parts: Parts = {}
    start = 0
    for name, shape in shapes.items():
        end = start + math.ceil(math.prod(shape) / len(shards))
        pieces_by_key = {}
        for key in flat_by_rank[0]:
            pieces_by_key[key] = [tensors[key][start:end] for tensors in flat_by_rank]
        parts[name] = _joined_by_key(name, pieces_by_key, shapes)
        parts[name]["step"] = step
        start = end
    return parts


def _flat_tensors(shard: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Return a rank's weights and optimizer state of stage 3, each one flat tensor, and the step.

    A rank has them in groups, one after the other.
    """
    states_by_group = shard["optimizer_state_dict"]["state"]
    states = [dict(state) for _, state in sorted(states_by_group.items())]
    steps = [state.pop("step", None) for state in states]
    tensors = {}
    for key in states[0]:
        tensors[key] = torch.cat([state[key].flatten() for state in states])
    tensors[WEIGHT] = torch.cat([group.flatten() for group in shard["fp32_flat_groups"]])
    return tensors, steps[0]


def universal(folder: Path, shapes: Shapes) -> Parts:
    """Return the parameters of a universal checkpoint, which has a folder for each."""
    parts: Parts = {}
    for name in shapes:
        tensors = {}
        for file in sorted((folder / name).glob("*.pt")):
            if file.stem == "step":
                continue
            value = load_any(file)
            tensors[file.stem] = value["param"] if isinstance(value, dict) else value
        if WEIGHT not in tensors:
            raise ConfigError(f"checkpoint {folder / name}: holds no {WEIGHT}.pt; it is not whole")
        pieces_by_key = {key: [tensor.flatten()] for key, tensor in tensors.items()}
        parts[name] = _joined_by_key(name, pieces_by_key, shapes)
    return parts


def _joined_by_key(
    name: str, pieces_by_key: Mapping[str, Sequence[Tensor]], shapes: Shapes
) -> dict[str, Any]:
    """Return the whole tensors of one parameter by key, such as its weight and its moments."""
    return {key: _joined(name, pieces, shapes) for key, pieces in pieces_by_key.items()}


def _joined(name: str, pieces: Sequence[Tensor], shapes: Shapes) -> Tensor:
    """Return one tensor of a parameter's shape; raises ConfigError if elements are missing.

    Elements behind the last one are padding.
    """
    joined = torch.cat(list(pieces))
    shape = shapes[name]
    size = math.prod(shape)
    if joined.numel() < size:
        raise ConfigError(
            f"checkpoint: {name!r} has {joined.numel()} of {size} elements: a rank's is missing"
        )
    return joined[:size].reshape(shape)
