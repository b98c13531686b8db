"""Export a checkpoint to a Hugging Face folder that ``from_pretrained`` loads."""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from distcore.checkpoint.job_state import check_base, saved_config
from distcore.checkpoint.reader import Checkpoint
from distcore.checkpoint.surroundings import check_task_files
from distcore.checkpoint.weights import Evaluated, weights_of
from distcore.config import RunConfig
from distcore.errors import CheckpointError
from distcore.jobs.adapter import take_out, write_adapter
from distcore.jobs.card import FILE, write_card
from distcore.model.lora_base import base_of
from distcore.model.model_source import model_source
from distcore.plugin.task.bound import BoundTask
from distcore.resolve import tasks

SHARD = "5GB"
"""Most bytes of a file of weights."""


def export(path: Path, to: Path, task_name: str | None = None, merged: bool = False) -> None:
    """Write model, config, card and the task's files, such as a tokenizer, to the new folder ``to``.

    Tied weights stay tied. The training data is not needed: the task has saved its facts in the run folder.
    ``task_name`` replaces the task of the checkpoint. A run with LoRA exports a folder for peft, or, if ``merged``, the
    whole model. Raises DistcoreError.
    """
    if to.exists() and not to.is_dir():
        raise CheckpointError(f"--to {to}: is a file, expected a folder to make")
    if to.exists() and any(to.iterdir()):
        raise CheckpointError(f"--to {to}: already exists and is not empty")
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    job_state = checkpoint.job_state()
    config = saved_config(job_state, path)
    has_adapter = config.lora.rank is not None
    if merged and not has_adapter:
        raise CheckpointError(f"{path}: --merged is for a run with --lora; this one has all its weights already")
    task = tasks.of(config, task_name)
    check_task_files(path, job_state)
    data = task.data_of(path, config)
    module: Any = model_source(config, task, data).build()
    if not hasattr(module, "save_pretrained"):
        raise CheckpointError(f"{path}: its model is a {type(module).__name__}, not one of transformers")
    check_base(base_of(config, task, module), job_state, path)
    fill(module, checkpoint)
    base = _base(config, task) if has_adapter and not merged else None
    try:
        # transformers imports libraries that print to stdout, and shows a bar on stderr.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            if has_adapter and not merged:
                write_adapter(to, module, base)
            else:
                whole = take_out(module, merge=True) if has_adapter else module
                whole.save_pretrained(to, max_shard_size=SHARD)
        task.save(to, config, data)
        job_state |= {"weights": weights_of(checkpoint)}
        write_card(to, module, config, job_state, path.absolute().parent.parent)
        for file in filter(Path.is_file, to.iterdir()):  # libraries make some that nobody else may read
            file.chmod((to / FILE).stat().st_mode)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(to, ignore_errors=True)  # it had nothing in it before
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"--to {to}: cannot be written: {reason}") from error


def _base(config: RunConfig, task: BoundTask) -> str | None:
    """Return the base for peft: a name of the hub, or a folder; ``None`` if it has neither."""
    folder = task.weights_folder(config)
    if folder is None:
        return None
    model = str(config.task_options.get("model", folder))
    return str(folder.absolute()) if Path(model).expanduser().exists() else model


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
