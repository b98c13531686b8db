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
    """Return the folder of a tag with DeepSpeed's files, in ``folder`` or below; ``None``
    if it is no checkpoint.
    """
    for inner in (folder, folder / "pytorch_model"):  # Accelerate's name
        latest = next(
            (inner / name for name in ("latest", "latest_universal") if (inner / name).is_file()),
            None,
        )
        tag = (
            Path(latest.read_text(encoding="utf-8", errors="replace").strip()).name
            if latest
            else ""
        )
        for place in (inner, inner / tag):
            if any(place.glob("*mp_rank_*_model_states.pt")):
                return place
        if latest:
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
        shapes = {
            name: tuple(shape) for group in first["param_shapes"] for name, shape in group.items()
        }
        source, parts, groups, scaler = _parts(folder, shapes)
        whole = {name: tensors.pop(WEIGHT) for name, tensors in parts.items()}
        buffers = {name: first["module"][name] for name in first["buffer_names"]}
        weights = whole | _frozen(models) | buffers
        own = names.renamed(weights)
        steps = [group["step"] for group in groups if "step" in group]
        parted = iter(first["param_shapes"])  # stage 3 parts a large group
        group_names = [
            [own[name] for _ in group["params"] for name in next(parted)] for group in groups
        ]
    return ForeignState(
        source=source,
        weights=names.weights(weights),
        moments={
            own[name]: _with_step(tensors, *steps[:1], step) for name, tensors in parts.items()
        },
        step=step,
        groups=groups,
        group_names=group_names,
        scaler=scale_of(scaler),
    )


def _parts(folder: Path, shapes: Shapes) -> tuple[str, Parts, list[dict[str, Any]], object]:
    """Return the trainer in words, the parameters, the optimizer's groups, and the loss scale."""
    if (zero := folder / "zero").is_dir():
        saved = load(zero / "optimizer_state.pt")
        return (
            "a universal checkpoint of DeepSpeed",
            universal(zero, shapes),
            _groups(saved),
            saved.get("loss_scaler"),
        )
    files = _by_rank(folder, "optim_states")
    shards = [load(file)["optimizer_state_dict"] for file in files]
    stage, ranks = int(shards[0].get("zero_stage", 1)), shards[0]["partition_count"]
    ranks = max(ranks) if isinstance(ranks, list) else ranks
    if ranks != len(files):
        raise ConfigError(
            f"checkpoint {folder}: has the files of {len(files)} ranks, and {ranks} wrote it"
        )
    parts = stage_3(shards, shapes) if stage == 3 else stages_1_and_2(shards, shapes)
    return (
        f"DeepSpeed, ZeRO {stage} of {ranks} ranks",
        parts,
        _groups(shards[0]),
        shards[0].get("loss_scaler"),
    )


def _groups(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        saved = saved.get(key, saved)
    return list(saved["param_groups"])


def _with_step(tensors: Mapping[str, Any], *otherwise: Any) -> dict[str, Tensor]:
    step = next(step for step in (tensors.get("step"), *otherwise) if step is not None)
    return {**tensors, "step": torch.as_tensor(float(step))}


def _without_zero(
    folder: Path, first: Mapping[str, Any], step: int, names: ModelNames
) -> ForeignState:
    optimizer = first["optimizer"]
    if "state" not in optimizer:
        raise ConfigError(
            f"checkpoint {folder}: 16-bit weights without ZeRO are not read; save it under ZeRO 1"
        )
    return ForeignState(
        source="DeepSpeed without ZeRO",
        weights=names.weights(first["module"]),
        moments={name: _with_step(state, step) for name, state in names.by_name(optimizer).items()},
        step=step,
        groups=list(optimizer["param_groups"]),
        group_names=names.in_groups(optimizer),
    )


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the weights that are not trained: whole in the first file, at stage 3
    a part in each.
    """
    whole: dict[str, Tensor] = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].flatten() for model in models]
        whole[name] = torch.cat(parts)[: shape.numel()].reshape(shape)
    return whole


def _by_rank(folder: Path, kind: str) -> list[Path]:
    """Return the files of a kind in the order of ranks: of the optimizer, or, at stage 3,
    of the model too.
    """
    files = list(folder.glob(f"*mp_rank_00_{kind}.pt"))
    if not files:
        raise ConfigError(
            f"checkpoint {folder}: has no file *_{kind}.pt, so no optimizer state to continue with"
        )
    return sorted(files, key=lambda file: [int(number) for number in re.findall(r"\d+", file.name)])
