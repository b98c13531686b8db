"""Export a checkpoint by an exporter, a plugin that writes it as a folder for another library."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from distcore import registry
from distcore.checkpoint.job_state import check_base, saved_config
from distcore.checkpoint.provenance import provenance
from distcore.checkpoint.reader import Checkpoint, Evaluated, weights_of
from distcore.checkpoint.surroundings import check_task_files
from distcore.config import RunConfig
from distcore.engine.precision import DTYPES
from distcore.errors import CheckpointError
from distcore.model.adapters import adapter_of
from distcore.model.lora_base import base_of
from distcore.model.model_source import model_source
from distcore.resolve import tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """The model of a checkpoint, and the known facts about it: all that an exporter is given.

    An exporter is an entry point of ``distcore.exports``, a function ``export(trained, to, merged)``. It makes the
    folder ``to``, which is not there yet or empty. With ``merged`` the LoRA adapter of the model is merged. For an
    OSError or a DistcoreError that it raises, the core prints one line; after an OSError it removes the folder.
    """

    module: nn.Module
    """The model on the CPU, with the weights that are evaluated and, in a run with LoRA, the adapter of peft."""
    config: RunConfig
    """The resolved config of the run that trained it."""
    checkpoint: Path
    """The checkpoint's folder, in the folder ``checkpoints`` of its run."""
    is_average: bool
    """True if the weights are the moving average of those that were trained."""
    pretrained: Path | None
    """Folder of the weights that the training began with; ``None`` for random ones."""
    provenance: Mapping[str, str]
    """Task, data, steps, versions and more by name, in words, without folders."""
    save_task_files: Callable[[Path], None]
    """Write the task's files, such as a tokenizer, to a folder."""


def export_checkpoint(path: Path, to: Path, task_name: str | None, merged: bool, form: str, dtype: str) -> None:
    """Have the exporter ``form`` write the checkpoint at ``path``, with weights in ``dtype``, to the new folder ``to``.

    The training data is not needed: the task has saved its facts in the run folder. ``task_name`` replaces the task of
    the checkpoint. ``merged`` is for a run with LoRA. Raises DistcoreError.
    """
    if to.exists() and not to.is_dir():
        raise CheckpointError(f"--to {to}: is a file, expected a folder to make")
    if to.exists() and any(to.iterdir()):
        raise CheckpointError(f"--to {to}: already exists and is not empty; name another folder, or remove it")
    exporter = registry.load("exports", form)
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    config = saved_config(checkpoint.job_state(), path)
    if merged and config.lora.rank is None:
        raise CheckpointError(f"{path}: --merged is for a run with --lora; this one has all its weights already")
    trained = _trained_model(checkpoint, config, task_name)
    if merged:
        adapter_of(config).take_out(trained.module, merge=True)  # in fp32, before it is rounded
    trained.module.to(dtype=DTYPES.get(dtype))  # fp32 as it is
    try:
        exporter(trained, to, merged)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(to, ignore_errors=True)  # it had nothing in it before
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"--to {to}: cannot be written: {reason}") from error


def _trained_model(checkpoint: Checkpoint, config: RunConfig, task_name: str | None) -> TrainedModel:
    path, job_state = checkpoint.path, checkpoint.job_state()
    task = tasks.of(config, task_name)
    check_task_files(path, job_state)
    data = task.data_of(path, config)
    module = model_source(config, task, data).build()
    check_base(base_of(config, task, module), job_state, path)
    fill(module, checkpoint)
    if config.lora.rank is not None:
        adapter_of(config).widen(module)
    return TrainedModel(
        module=module,
        config=config,
        checkpoint=path,
        is_average=weights_of(checkpoint) == "ema",
        pretrained=task.weights_folder(config),
        provenance=provenance(type(module).__name__, job_state, config, path.absolute().parent.parent),
        save_task_files=partial(task.save, config=config, data=data),
    )


def fill(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy the checkpoint's weights, or their average, and buffers into ``module``.

    Raises CheckpointError if they do not fit.
    """
    tensors, evaluated = dict(module.named_parameters()) | dict(module.named_buffers()), Evaluated(checkpoint)
    with torch.no_grad():
        for name in checkpoint:
            kind, _, rest = name.partition("/")
            if kind != "model":
                continue
            if rest not in tensors or list(tensors[rest].shape) != checkpoint.entry(name).shape:
                raise CheckpointError(f"{checkpoint.path}: {rest!r} does not fit the model that its config describes")
            tensors[rest].copy_(evaluated[name])
