"""Sharded checkpoints of ``torch.distributed.checkpoint``: PyTorch, Accelerate, the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcore import ConfigError
from distcore_migrate.foreign.dcp_metadata import FILE, values
from distcore_migrate.foreign.model_names import ModelNames
from distcore_migrate.foreign.pickles import malformed
from distcore_migrate.foreign.state import ForeignState

MODEL, OPTIMIZER = ("model",), ("optimizer", "optim")
"""Usual names of both in what is saved."""


def find(folder: Path) -> list[Path]:
    """Return the folder of a checkpoint, or those of its model and its optimizer.

    Empty if the checkpoint is of another kind.
    """
    if (folder / FILE).is_file():
        return [folder]
    # Accelerate's names
    both = [*folder.glob(f"pytorch_model_fsdp_*/{FILE}"), *folder.glob(f"optimizer_*/{FILE}")]
    if len(both) > 2:
        raise ConfigError(
            f"checkpoint {folder}: has several models ({both[1].parent.name}), and a run here"
            " has one"
        )
    return [file.parent for file in both]


def read(folders: list[Path], progress: Mapping[str, Any], names: ModelNames) -> ForeignState:
    """Return the state in the folders; raises ConfigError, one line.

    ``progress`` is the content of trainer_state.json, empty without one.
    """
    weights: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for folder in folders:
        for path, value in values(folder):
            match _without_wrapper(path):
                case ("model", str(name)) if isinstance(value, Tensor):
                    weights[name] = value
                case ("optimizer", "state", str(name), str(key)) if isinstance(value, Tensor):
                    state.setdefault(name, {})[key] = value.float() if key == "step" else value
                case ("optimizer", "param_groups", int(number), str(key)):
                    groups.setdefault(number, {})[key] = value
    if not weights or not state:
        missing = "model" if not weights else "optimizer"
        raise ConfigError(
            f"checkpoint {folders[-1]}: holds no {missing!r}, beside which it is expected in one"
            " dictionary"
        )
    in_order = [groups[number] for number in sorted(groups)]
    optimizer: dict[str, Any] = {"state": state, "param_groups": in_order}
    with malformed(folders[-1]):
        moments = names.by_name(optimizer)
        group_names = names.in_groups(optimizer)
        steps = [int(tensors["step"]) for tensors in moments.values() if "step" in tensors]
        step = int(progress["global_step"]) if progress else max(steps, default=0)
        for tensors in moments.values():
            tensors["step"] = torch.tensor(float(step))
    if not step:
        raise ConfigError(f"checkpoint {folders[-1]}: does not say how many steps were done")
    source = "the Trainer of transformers, sharded" if progress else "torch.distributed.checkpoint"
    return ForeignState(
        source=source,
        weights=names.weights(weights),
        moments=moments,
        step=step,
        groups=in_order,
        group_names=group_names,
        total_steps=progress.get("max_steps"),
    )


def _without_wrapper(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a path from its part ``model`` or ``optimizer`` on.

    Scripts like to put both under one more name.
    """
    for start, part in enumerate(path[:2]):
        if part in MODEL:
            return ("model", ".".join(map(str, path[start + 1 :])))
        if part in OPTIMIZER:
            return ("optimizer", *path[start + 1 :])
    return path
