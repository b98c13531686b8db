"""Checkpoints of the Trainer of transformers, of ``Accelerator.save_state``, and of Lightning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from distcore import ConfigError
from distcore_migrate.foreign.model_names import ModelNames
from distcore_migrate.foreign.pickles import load, malformed, scale_of
from distcore_migrate.foreign.state import ForeignState

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin", "model.bin")
OPTIMIZER = ("optimizer.pt", "optimizer.bin")
TRAINER = "trainer_state.json"


def knows(folder: Path) -> bool:
    """Return True for a folder of the Trainer or of Accelerate, complete or not."""
    return any((folder / name).is_file() for name in (*OPTIMIZER, TRAINER, *WEIGHTS))


def read(folder: Path, names: ModelNames) -> ForeignState:
    """Return the state in a folder of the Trainer or of Accelerate; raises ConfigError."""
    files = [folder / name for name in OPTIMIZER]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        parts = "optimizer.pt, optimizer.bin, .metadata or files of DeepSpeed"
        raise ConfigError(
            f"checkpoint {folder}: has no {parts}; to begin from weights alone, give it as --model"
        )
    optimizer = load(file)
    progress = trainer_state(folder)
    weights = names.weights(_weights(folder))
    with malformed(file):
        moments = {name: _tensors(state) for name, state in names.by_name(optimizer).items()}
        # Accelerate has no file of progress; a parameter that was frozen at first has fewer steps.
        steps = [int(state["step"]) for state in moments.values() if "step" in state]
        step = int(progress["global_step"]) if progress else max(steps, default=0)
        groups = list(optimizer["param_groups"])
        group_names = names.in_groups(optimizer)
    scaler = folder / "scaler.pt"
    if not step:
        raise ConfigError(f"checkpoint {file}: does not say how many steps were done")
    return ForeignState(
        source="the Trainer of transformers" if progress else "Accelerate",
        weights=weights,
        moments=moments,
        step=step,
        groups=groups,
        group_names=group_names,
        total_steps=progress.get("max_steps") if progress else None,
        scaler=scale_of(load(scaler)) if scaler.is_file() else {},
    )


def read_lightning(file: Path, names: ModelNames) -> ForeignState:
    """Return the state in a .ckpt of Lightning; raises ConfigError, one line."""
    tree = load(file)
    optimizers = tree.get("optimizer_states")
    if not optimizers:
        raise ConfigError(
            f"checkpoint {file}: has no optimizer_states of Lightning; to begin from weights, use"
            " --model"
        )
    if len(optimizers) > 1:
        raise ConfigError(
            f"checkpoint {file}: has {len(optimizers)} optimizers, and a run here has one"
        )
    optimizer = optimizers[0]
    with malformed(file):
        states = names.by_name(optimizer)
        return ForeignState(
            source=f"Lightning {tree.get('pytorch-lightning_version', '')}".strip(),
            weights=names.weights(tree["state_dict"]),
            moments={name: _tensors(state) for name, state in states.items()},
            step=int(tree["global_step"]),
            groups=list(optimizer["param_groups"]),
            group_names=names.in_groups(optimizer),
            scaler=scale_of(tree.get("MixedPrecision")),
        )


def trainer_state(folder: Path) -> dict[str, Any]:
    """Return trainer_state.json of a folder; empty without one."""
    if not (file := folder / TRAINER).is_file():
        return {}
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint file {file}: is not JSON: {error}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("global_step"), int):
        raise ConfigError(f"checkpoint file {file}: names no global_step")
    return tree


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of one parameter; the number of steps is one, too."""
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    if "step" in state:
        # Some optimizers keep a number.
        tensors["step"] = torch.as_tensor(float(state["step"]))
    return tensors


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights in one file, or in those that an index names."""
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            with malformed(index):
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                parts = sorted(set(weight_map.values()))
            weights: dict[str, Tensor] = {}
            for part in parts:
                # The name alone: a path in the index could lead out of the folder.
                weights.update(_read_file(folder / Path(part).name))
            return weights
        if (folder / name).is_file():
            # Accelerate numbers the files of further models.
            further_models = sorted(folder.glob(f"{Path(name).stem}_[0-9]*.safetensors"))
            if further_models:
                raise ConfigError(
                    f"checkpoint {folder}: has several models ({further_models[0].name}), and a run"
                    " here has one"
                )
            return _read_file(folder / name)
    raise ConfigError(f"checkpoint {folder}: has no weights ({', '.join(WEIGHTS[:3])})")


def _read_file(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of safetensors, or of torch's, by name."""
    if file.suffix != ".safetensors":
        return load(file)
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"checkpoint file {file}: cannot be read: {error}") from None
