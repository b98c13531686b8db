"""Export a checkpoint to a Hugging Face folder that ``from_pretrained`` loads."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from distcore.checkpoint.job_state import saved_config
from distcore.checkpoint.reader import Checkpoint
from distcore.checkpoint.weights import Evaluated, weights_of
from distcore.engine import task_calls
from distcore.engine.model_source import model_source
from distcore.engine.resolve import load_task
from distcore.errors import CheckpointError
from distcore.jobs.card import write_card

SHARD = "5GB"
"""Most bytes of a file of weights."""


def export(path: Path, to: Path, task_name: str | None = None) -> None:
    """Write model, config, card and the task's files, such as a tokenizer, to the new folder ``to``.

    Tied weights stay tied. The training data is not needed: the run folder holds what the task has saved about it.
    ``task_name`` replaces the task that the checkpoint names. Raises DistcoreError.
    """
    if to.exists() and not to.is_dir():
        raise CheckpointError(f"--to {to}: is a file, expected a folder to make")
    if to.exists() and any(to.iterdir()):
        raise CheckpointError(f"--to {to}: already exists and is not empty")
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    config = saved_config(checkpoint.job_state(), path)
    task = load_task(config.model_copy(update={"task": task_name or config.task}))
    data = task_calls.data_of(task, path, config)
    module = model_source(config, task, data).build()
    if not hasattr(module, "save_pretrained"):
        raise CheckpointError(f"{path}: its model is a {type(module).__name__}, not one of transformers")
    fill(module, checkpoint)
    save: Callable[..., object] = module.save_pretrained  # type: ignore[assignment]  # of transformers
    try:
        # transformers imports libraries that print to stdout, and shows a bar on stderr.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            save(to, max_shard_size=SHARD)
        task_calls.save(task, to, config, data)
        job_state = checkpoint.job_state() | {"weights": weights_of(checkpoint)}
        write_card(to, type(module).__name__, config, job_state, path.absolute().parent.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(to, ignore_errors=True)  # it had nothing in it before
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"--to {to}: cannot be written: {reason}") from error


def fill(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy the checkpoint's weights, or their average, and buffers into ``module``.

    Raises CheckpointError for one that does not fit.
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
