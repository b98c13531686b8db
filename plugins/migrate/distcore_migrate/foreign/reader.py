"""Checkpoints of other trainers for ``distcore train --resume``: the entry point ``trainers``."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from distcore import ConfigError, RunConfig
from distcore.model import freeze, optimizer_factory, scheduler_for
from distcore_migrate.foreign import dcp_folder, deepspeed_folder, trainer_folder
from distcore_migrate.foreign.model_names import ModelNames
from distcore_migrate.foreign.state import ForeignState

STATES = {
    "adamw": {"exp_avg", "exp_avg_sq"},
    "adam": {"exp_avg", "exp_avg_sq"},
    "deepspeed-adamw": {"exp_avg", "exp_avg_sq"},
    "sgd": {"momentum_buffer"},
}
"""Optimizers whose state is carried, with its tensors beside ``step``."""
STORED_ROWS = 2**22
"""Most rows of an order that is drawn (docs/data.md): that of more is another one, and
is named in state.json.
"""
FLAT = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that do not depend on the length of the run."""
SETTINGS = ("betas", "eps", "momentum", "nesterov")
"""Settings of an optimizer that must be those of the config, beside the weight
decay of each parameter.
"""


def knows(path: Path) -> bool:
    """Return True for a folder or file of a trainer that is read here; raises ConfigError if it
    is not one whole.
    """
    if path.is_file():
        return path.suffix == ".ckpt"
    return bool(dcp_folder.find(path) or deepspeed_folder.find(path)) or trainer_folder.knows(path)


def read(
    path: Path, config: RunConfig, model: nn.Module, rows: int
) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Return whole tensors, what state.json says, and a line about both;
    raises ConfigError, one line.

    ``model`` is on the meta device, ``rows`` is the number of training rows.
    """
    if config.lora.rank is not None or config.optimizer.name not in STATES:
        what = (
            "lora"
            if config.lora.rank is not None
            else f"optimizer.name = {config.optimizer.name!r}"
        )
        raise ConfigError(
            f"{what}: not with --resume {path}, of another trainer: whole models,"
            f" {', '.join(STATES)}"
        )
    freeze(config, model)
    names = ModelNames(model, str(path))
    state = state_of(path, names)
    per_epoch = -(-rows // config.global_batch_size)
    total = config.max_steps or config.epochs * per_epoch
    _check(state, config, total, str(path))
    _check_rate(state, config, total, per_epoch, str(path))
    _check_decay(state, names.decays(optimizer_factory(config)(names.model)), str(path))
    tensors = {f"model/{name}": value for name, value in state.weights.items()}
    for name, own in state.moments.items():
        tensors |= {f"optimizer/{name}/{key}": value for key, value in own.items()}
    within = state.step % per_epoch
    order = (
        f"; epochs are in distcore's order: rows of the last {within} steps may come again in"
        " this one"
    )
    line = f"made from {path}, of {state.source}{order if within else ''}"
    return tensors, job_state(state, config, rows, per_epoch, total), line


def state_of(source: Path, names: ModelNames) -> ForeignState:
    """Return the state in a folder or file, of whichever trainer it is;
    raises ConfigError, one line.
    """
    if source.is_file():
        return trainer_folder.read_lightning(source, names)
    if folders := dcp_folder.find(source):
        return dcp_folder.read(folders, trainer_folder.trainer_state(source), names)
    if (inner := deepspeed_folder.find(source)) is None:
        return trainer_folder.read(source, names)
    state = deepspeed_folder.read(inner, names)
    # of the Trainer, whose run DeepSpeed was part of
    progress = trainer_folder.trainer_state(source)
    return replace(state, total_steps=progress.get("max_steps", None))


def job_state(
    state: ForeignState, config: RunConfig, rows: int, per_epoch: int, total: int
) -> dict[str, Any]:
    """Return what state.json says.

    Rates are left to the schedule, and the rows are not compared at the resume.
    """
    epoch, step = divmod(state.step, per_epoch)
    return {
        "progress": {
            "step": state.step, "epoch": epoch, "step_in_epoch": step,
            "samples": epoch * rows + step * config.global_batch_size,
        },
        "learning_rates": [],
        "scaler": dict(state.scaler),
        "total_steps": total,
        "order": "permutation" if rows <= STORED_ROWS else "feistel",
        "config": config.model_dump(mode="json"),
        "best": None,
        "task_files": {},
    }  # fmt: skip


def _check(state: ForeignState, config: RunConfig, total: int, where: str) -> None:
    """Raise ConfigError for a run that would not go on as the other one: another length, optimizer
    or setting of it.
    """
    if state.step >= total:
        raise ConfigError(
            f"checkpoint {where}: is of step {state.step}, and the config's run ends at step"
            f" {total}"
        )
    if config.schedule.name not in FLAT and state.total_steps not in (None, total):
        raise ConfigError(
            f"checkpoint {where}: is of a run of {state.total_steps} steps, the config's has"
            f" {total}, so rates would differ; set max_steps: {state.total_steps}"
        )
    keys: set[str] = set()
    for moments in state.moments.values():
        keys.update(moments)
    keys.discard("step")
    expected_keys = STATES[config.optimizer.name]
    # SGD without momentum keeps nothing.
    is_plain_sgd = not keys and expected_keys == STATES["sgd"]
    if keys != expected_keys and not is_plain_sgd:
        listed = ", ".join(sorted(keys)) or "nothing"
        expected = ", ".join(sorted(expected_keys))
        raise ConfigError(
            f"checkpoint {where}: its optimizer keeps {listed}, and {config.optimizer.name!r} of"
            f" the config {expected}; name the same optimizer by optimizer.name"
        )
    mine = {**config.optimizer.options, "lr": config.lr}
    for key in (*SETTINGS, "lr"):
        said = [
            value
            for value in (_setting(group, key, config) for group in state.groups)
            if value is not None
        ]
        if said and key in mine and not _equal(max(said), mine[key]):
            name = key if key == "lr" else f"optimizer.{key}"
            raise ConfigError(
                f"checkpoint {where}: was trained with {key} = {max(said)}, and the config says"
                f" {mine[key]}; set {name} to the same"
            )


def _check_rate(
    state: ForeignState, config: RunConfig, total: int, per_epoch: int, where: str
) -> None:
    """Raise ConfigError for a rate of the next step that the config's schedule would not give."""
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
    schedule = scheduler_for(config, optimizer, total, per_epoch)
    mine = schedule.lr_lambdas[0](state.step) if isinstance(schedule, LambdaLR) else 1.0
    for group in state.groups:
        there, peak = group.get("lr"), group.get("initial_lr")
        if (
            there is not None
            and peak
            and not math.isclose(there / peak, mine, rel_tol=1e-4, abs_tol=1e-9)
        ):
            raise ConfigError(
                f"checkpoint {where}: its rate after step {state.step} is {there:g}, and the"
                f" config's would be {peak * mine:g}; set schedule.name and its warm-up to the same"
            )


def _check_decay(state: ForeignState, mine: dict[str, float], where: str) -> None:
    """Raise ConfigError for a parameter whose weight decay, 0 among them, would
    be another one here.
    """
    for group, names in zip(state.groups, state.group_names, strict=True):
        decay = group.get("weight_decay", 0.0)
        for name in names:
            if not math.isclose(decay, mine[name], rel_tol=1e-6):
                raise ConfigError(
                    f"checkpoint {where}: {name!r} was trained with weight_decay = {decay}, and"
                    f" would be with {mine[name]} here; optimizer.groups sets it, but biases and"
                    " normalization weights have none"
                )


def _setting(group: dict[str, Any], key: str, config: RunConfig) -> Any:
    """Return a setting of a group; its rate is the peak that a schedule began from,
    if it says one.
    """
    if key != "lr":
        return group.get(key)
    if "initial_lr" in group:
        return group["initial_lr"]
    # Under another schedule the rate of the moment says nothing of its peak.
    return group.get("lr") if config.schedule.name == "constant" else None


def _equal(one: Any, other: Any) -> bool:
    """Return True for numbers, or pairs of them, that are equal but for rounding."""
    if isinstance(one, list | tuple):
        return all(_equal(*pair) for pair in zip(one, other, strict=True))
    return math.isclose(one, other, rel_tol=1e-6)
