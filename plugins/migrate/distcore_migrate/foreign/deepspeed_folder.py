"""DeepSpeed's checkpoints: without ZeRO, of its stages 1 to 3, and universal ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcore import ConfigError
from distcore_migrate.foreign.model_names import ModelNames
from distcore_migrate.foreign.pickles import load, malformed, scale_of
from distcore_migrate.foreign.state import ForeignState
from distcore_migrate.foreign.zero_parts import (
    WEIGHT,
    Parts,
    Shapes,
    stage_3,
    stages_1_and_2,
    universal,
)


def find(folder: Path) -> Path | None:
    """Return the folder of a tag with DeepSpeed's files, in ``folder`` or below.

    ``None`` if it is no checkpoint.
    """
    for inner in (folder, folder / "pytorch_model"):  # Accelerate's name
        markers = [inner / name for name in ("latest", "latest_universal")]
        latest = next((marker for marker in markers if marker.is_file()), None)
        tag = ""
        if latest is not None:
            # The name alone: a tag with a path would lead out of the checkpoint.
            tag = Path(latest.read_text(encoding="utf-8", errors="replace").strip()).name
        for candidate in (inner, inner / tag):
            if any(candidate.glob("*mp_rank_*_model_states.pt")):
                return candidate
        if latest is not None:
            raise ConfigError(
                f"checkpoint {latest}: names {tag!r}, which is no checkpoint of DeepSpeed there"
            )
    return None


def read(folder: Path, names: ModelNames) -> ForeignState:
    """Return the state in the folder of a tag; raises ConfigError, one line."""
    if any("mp_rank_00" not in file.name for file in folder.glob("*mp_rank_*_states.pt")):
        raise ConfigError(
            f"checkpoint {folder}: a model split over ranks is not read, only one split by ZeRO"
        )
    models = [load(file) for file in _by_rank(folder, "model_states")]
    first = models[0]
    with malformed(folder):
        step = int(first["global_steps"])
        if first.get("optimizer"):
            return _without_zero(folder, first, step, names)
        shapes: dict[str, tuple[int, ...]] = {}
        for shapes_of_group in first["param_shapes"]:
            for name, shape in shapes_of_group.items():
                shapes[name] = tuple(shape)
        source, parts, groups, scaler = _parts(folder, shapes)
        trained = {name: tensors.pop(WEIGHT) for name, tensors in parts.items()}
        buffers = {name: first["module"][name] for name in first["buffer_names"]}
        weights = trained | _frozen(models) | buffers
        names_here = names.renamed(weights)
        steps_of_groups = [group["step"] for group in groups if "step" in group]
        moments = {}
        for name, tensors in parts.items():
            # Some optimizers count steps by group, not by parameter.
            moments[names_here[name]] = _with_step(tensors, *steps_of_groups[:1], step)
        group_names = _group_names(groups, first["param_shapes"], names_here)
    return ForeignState(
        source=source,
        weights=names.weights(weights),
        moments=moments,
        step=step,
        groups=groups,
        group_names=group_names,
        scaler=scale_of(scaler),
    )


def _group_names(
    groups: Sequence[Mapping[str, Any]],
    shapes_of_parts: Sequence[Mapping[str, Any]],
    names_here: Mapping[str, str],
) -> list[list[str]]:
    """Return the parameters of each group of the optimizer, by their names here.

    Stage 3 cuts a large group into parts: each entry of a group's ``params`` is one of
    ``shapes_of_parts``, which are in the order of the groups.
    """
    parts = iter(shapes_of_parts)
    group_names = []
    for group in groups:
        names = []
        for _ in group["params"]:
            names += [names_here[name] for name in next(parts)]
        group_names.append(names)
    return group_names


def _parts(folder: Path, shapes: Shapes) -> tuple[str, Parts, list[dict[str, Any]], object]:
    """Return the trainer in words, the parameters, the optimizer's groups, and the loss scale."""
    zero = folder / "zero"
    if zero.is_dir():
        saved = load(zero / "optimizer_state.pt")
        parts = universal(zero, shapes)
        source = "a universal checkpoint of DeepSpeed"
        return source, parts, _groups(saved), saved.get("loss_scaler")
    files = _by_rank(folder, "optim_states")
    shards = [load(file)["optimizer_state_dict"] for file in files]
    first = shards[0]
    stage = int(first.get("zero_stage", 1))
    ranks = first["partition_count"]
    # Stages 1 and 2 have one number a group.
    ranks = max(ranks) if isinstance(ranks, list) else ranks
    # Without the file of a rank, its part of each parameter is missing.
    if ranks != len(files):
        raise ConfigError(
            f"checkpoint {folder}: has the files of {len(files)} ranks, and {ranks} wrote it"
        )
    parts = stage_3(shards, shapes) if stage == 3 else stages_1_and_2(shards, shapes)
    source = f"DeepSpeed, ZeRO {stage} of {ranks} ranks"
    return source, parts, _groups(first), first.get("loss_scaler")


def _groups(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of the optimizer that DeepSpeed wraps, in a way of each stage's own."""
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        saved = saved.get(key, saved)
    return list(saved["param_groups"])


def _with_step(tensors: Mapping[str, Any], *alternatives: Any) -> dict[str, Tensor]:
    """Return the moments with their own step, else with the first alternative that is known."""
    steps = (tensors.get("step"), *alternatives)
    step = next(step for step in steps if step is not None)
    return {**tensors, "step": torch.as_tensor(float(step))}


def _without_zero(
    folder: Path, first: Mapping[str, Any], step: int, names: ModelNames
) -> ForeignState:
    """Return the state of stage 0, whose optimizer is torch's own."""
    optimizer = first["optimizer"]
    if "state" not in optimizer:
        raise ConfigError(
            f"checkpoint {folder}: 16-bit weights without ZeRO are not read; save it under ZeRO 1"
        )
    states = names.by_name(optimizer)
    return ForeignState(
        source="DeepSpeed without ZeRO",
        weights=names.weights(first["module"]),
        moments={name: _with_step(state, step) for name, state in states.items()},
        step=step,
        groups=list(optimizer["param_groups"]),
        group_names=names.in_groups(optimizer),
    )


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the weights that are not trained.

    They are whole in the first file; at stage 3 each file has a part.
    """
    frozen: dict[str, Tensor] = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].flatten() for model in models]
        # The last part may be padded.
        frozen[name] = torch.cat(parts)[: shape.numel()].reshape(shape)
    return frozen


def _by_rank(folder: Path, kind: str) -> list[Path]:
    """Return the files of a kind in the order of ranks: one a rank, or one for all."""
    files = list(folder.glob(f"*mp_rank_00_{kind}.pt"))
    if not files:
        raise ConfigError(
            f"checkpoint {folder}: has no file *_{kind}.pt, so no optimizer state to continue with"
        )

    def numbers(file: Path) -> list[int]:
        # As numbers: by name, rank 10 would come before rank 2.
        return [int(number) for number in re.findall(r"\d+", file.name)]

    return sorted(files, key=numbers)
