"""Export a checkpoint by an exporter, a plugin that writes it as a folder for another library."""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from distcore import registry
from distcore.checkpoint.job_state import check_base, saved_config
from distcore.checkpoint.provenance import provenance
from distcore.checkpoint.reader import Checkpoint, Evaluated, weights_of
from distcore.checkpoint.surroundings import check_task_files, warn_of_changed_sources
from distcore.config import RunConfig
from distcore.engine.precision import DTYPES
from distcore.errors import CheckpointError, DistcoreError
from distcore.jobs.export_proof import Proof, Prover, proof_rows
from distcore.model.adapters import adapter_of
from distcore.model.lora_base import base_of
from distcore.model.model_source import model_source
from distcore.plugin.strategy.extra_state import extra_state_names, load_extra_state
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Datasets, Task
from distcore.resolve import tasks


class Proves(Protocol):
    """Reads an export back, and compares it with the model of the run."""

    def __call__(
        self,
        reader: str,
        read_back: Callable[[], nn.Module],
        computes: torch.dtype = torch.float32,
        drawn: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> Proof:
        """Return what was measured; raises CheckpointError if the export is another model, or
        cannot be read back.

        ``reader`` names the program or library that reads it, for messages and cards.
        ``read_back`` returns a module that answers as the trained one does; an ImportError or
        NotImplementedError of it says why there is none here.
        ``computes``: the dtype in which it computes, whatever its weights are in. ``drawn`` returns
        inputs of the model to compare answers to, for a run whose data are not here.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """The model of a checkpoint, and the known facts about it: all that an exporter is given.

    An exporter is an entry point of ``distcore.exports``, a function ``export(trained, to,
    merged)``. It makes the folder ``to``, which is not there yet or empty. With ``merged`` the LoRA
    adapter of the model is merged; an exporter whose module says ``merges = True`` is always given
    a merged model. It calls ``prove`` on what it wrote. For an OSError or a DistcoreError that it
    raises, the core prints one line, and removes the folder.
    """

    module: nn.Module
    """The model on the CPU, with the weights that are evaluated and, in a run with LoRA,
    the adapter of peft.
    """
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
    inputs: Mapping[str, Tensor]
    """What the run calls the model with, by argument, for a few rows; empty if its
    data are not here.
    """
    prove: Proves
    """Read the export back, and compare it with the model of the run."""


def export_checkpoint(
    path: Path, to: Path, task_name: str | None, merged: bool, form: str, dtype: str
) -> None:
    """Have the exporter ``form`` write the checkpoint at ``path``, with weights in ``dtype``, to
    the new folder ``to``.

    The training data is not needed: the task has saved its facts in the run folder. ``task_name``
    replaces the task of the checkpoint. ``merged`` is for a run with LoRA. Raises DistcoreError.
    """
    if to.exists() and not to.is_dir():
        raise CheckpointError(f"--to {to}: is a file, expected a folder to make")
    if to.exists() and any(to.iterdir()):
        raise CheckpointError(
            f"--to {to}: already exists and is not empty; name another folder, or remove it"
        )
    exporter = registry.load("exports", form)
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    config = saved_config(checkpoint.job_state(), path)
    if merged and config.lora.rank is None:
        raise CheckpointError(
            f"{path}: --merged is for a run with --lora; this one has all its weights already"
        )
    trained, prover = _trained_model(checkpoint, config, task_name)
    if merged or (config.lora.rank is not None and _always_merges(exporter)):
        adapter_of(config).take_out(trained.module, merge=True)  # in fp32, before it is rounded
        prover.check_merged(trained.module)
    if dtype in DTYPES:
        round_to(trained.module, dtype)
        prover.expect(trained.module)
        cast(trained.module, DTYPES[dtype])
    try:
        exporter(trained, to, merged)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(to, ignore_errors=True)  # it had nothing in it before
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"--to {to}: cannot be written: {reason}") from error
    except DistcoreError:
        shutil.rmtree(to, ignore_errors=True)
        raise
    _say(prover.proofs, form)


def _always_merges(exporter: Callable[..., object]) -> bool:
    """Return True if the exporter declares that it has no place for an adapter."""
    return bool(getattr(inspect.getmodule(exporter), "merges", False))


def _say(proofs: list[Proof], form: str) -> None:
    """Tell the user, on stderr, what was proved, or that nothing was."""
    if not proofs:
        print(
            f"--format {form}: its exporter does not read back what it writes, so nothing"
            " proves it",
            file=sys.stderr,
        )
    for proof in proofs:
        print(proof.sentence(), file=sys.stderr)


def _trained_model(
    checkpoint: Checkpoint, config: RunConfig, task_name: str | None
) -> tuple[TrainedModel, Prover]:
    """Return the model of a checkpoint with what is known of it, and what compares
    its exports with it.
    """
    path = checkpoint.path
    job_state = checkpoint.job_state()
    task = task_of(config, task_name)
    warn_of_changed_sources(path, job_state, config, task_name)
    module, data = model_of(checkpoint, config, task)
    if config.lora.rank is not None:
        adapter_of(config).widen(module)
    prover = Prover(proof_rows(task, config, job_state, module), module)
    trained = TrainedModel(
        module=module,
        config=config,
        checkpoint=path,
        is_average=weights_of(checkpoint) == "ema",
        pretrained=task.weights_folder(config),
        provenance=provenance(
            type(module).__name__, job_state, config, path.absolute().parent.parent
        ),
        save_task_files=partial(task.save, config=config, data=data),
        inputs=prover.inputs,
        prove=partial(prover.prove, module),
    )
    return trained, prover


def task_of(config: RunConfig, name: str | None, given: Task | None = None) -> BoundTask:
    """Return the task of a run, whose name may be replaced, or the object that was ``given``."""
    return BoundTask.wrap(given) if given else tasks.load_task(config, name)


def model_of(
    checkpoint: Checkpoint, config: RunConfig, task: BoundTask
) -> tuple[nn.Module, Datasets]:
    """Return the model of a checkpoint on the CPU, with the weights that are evaluated, and the
    data that it was built for, without rows.

    Raises DistcoreError for files of the run that have changed.
    """
    path = checkpoint.path
    job_state = checkpoint.job_state()
    check_task_files(path, job_state)
    data = task.data_of(path, config)
    module = model_source(config, task, data).build()
    check_base(base_of(config, task, module), job_state, path)
    fill(module, checkpoint)
    return module, data


@torch.no_grad()
def round_to(module: nn.Module, dtype: str) -> None:
    """Round the weights of ``module`` in place to what ``dtype`` can hold; they stay in fp32.

    Raises CheckpointError, with the tensor's name, for a value that would become infinite.
    """
    for name, tensor in _saved_floats(module):
        rounded = tensor.to(DTYPES[dtype])
        if rounded.isinf().any() and not tensor.isinf().any():
            largest = tensor.abs().max().item()
            most = torch.finfo(DTYPES[dtype]).max
            wider = "take --dtype bf16, or " if dtype == "fp16" else ""
            raise CheckpointError(
                f"--dtype {dtype}: {name} has a value of {largest:.4g}, and {dtype} ends at"
                f" {most:.4g}: it would become infinite; {wider}leave out --dtype for fp32"
            )
        tensor.copy_(rounded)


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast what is saved of ``module`` to ``dtype``.

    Buffers that no file has, such as the frequencies of rotary positions, keep their precision: who
    loads the model computes them anew.
    """
    computed = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name in part._non_persistent_buffers_set
    ]
    module.to(dtype=dtype)
    for part, name, buffer in computed:
        part._buffers[name] = buffer


def _saved_floats(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each parameter and each saved buffer of numbers
    that a cast changes.
    """
    saved = module.state_dict(keep_vars=True).keys()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and (name in saved or isinstance(tensor, nn.Parameter)):
            yield name, tensor


def fill(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy the checkpoint's weights, or their average, buffers and extra state into ``module``.

    Raises CheckpointError if they do not fit.
    """
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    evaluated = Evaluated(checkpoint)
    extra = {
        name: checkpoint[f"model/{name}"]
        for name in extra_state_names(module)
        if f"model/{name}" in checkpoint
    }
    load_extra_state(module, extra)
    with torch.no_grad():
        for name in checkpoint:
            kind, _, rest = name.partition("/")
            if kind != "model" or rest in extra:
                continue
            saved_shape = checkpoint.entry(name).shape
            if rest not in tensors or list(tensors[rest].shape) != saved_shape:
                raise CheckpointError(
                    f"{checkpoint.path}: {rest!r} does not fit the model that its config describes"
                )
            tensors[rest].copy_(evaluated[name])
