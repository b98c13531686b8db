"""One optimizer step of a job on tensors without values: how much memory lives, and when in the
step it is most.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from distcore import (
    INITIAL,
    Batch,
    ConfigError,
    Datasets,
    MicroBatch,
    Run,
    RunConfig,
    Task,
    World,
    hookimpl,
)
from distcore.jobs import (
    POOL_VALUES,
    BoundTask,
    HoldsExtraTensors,
    Hooks,
    Tally,
    at_level,
    autocast_for,
    frozen_source,
    most_micro_batches,
    one_line,
    optimizer_factory,
    set_form,
    threads_per_rank,
    train_step,
    unscaled_loss,
)
from distcore_workbench.planning.kernels import kernels_of
from distcore_workbench.planning.storages import Storages
from distcore_workbench.planning.timeline import KINDS, Phase, Step, timeline


class _Phases:
    """An extension that notes where the phases of a step begin, in the number
    of changes of storages.
    """

    def __init__(self, storages: Storages) -> None:
        """Begin in the first phase of a trace, in which the strategy wraps the model."""
        self._storages = storages
        self.where = "wrap_model()"
        self.marks: list[tuple[int, Phase]] = []

    def begin(self, phase: Phase, where: str) -> None:
        """Note a phase, and the name of its code for an error message."""
        self.marks.append((len(self._storages.changes), phase))
        self.where = where

    @hookimpl(wrapper=True)
    def accumulate(self) -> Generator[None, object, object]:
        """Note a forward pass: the loop enters this context right before it."""
        self.begin("forward", "loss()")
        return (yield)

    @hookimpl(wrapper=True)
    def backward(self) -> Generator[None, object, object]:
        """Note a backward pass."""
        self.begin("backward", "backward")
        return (yield)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedJob:
    """The traced job: a task's model and its longest micro-batch."""

    config: RunConfig
    """Resolved."""
    task: Task
    """Its ``loss`` is traced."""
    meta_model: nn.Module
    """On the meta device, frozen parameters without ``requires_grad``."""
    batch: Batch
    """Collated, on the CPU."""
    rows: int
    """How many rows it has."""
    micro_batches: int
    """How many of these a step has."""
    frozen: Mapping[str, nn.Module | None]
    """The task's frozen models on the meta device; ``None``: the trained
    model, without its adapter.
    """

    @property
    def passes(self) -> tuple[bool, ...]:
        """Return the passes to trace, for each whether it is the step's last: all between first
        and last are alike.
        """
        return (False, False, True)[-min(3, self.micro_batches) :]


def frozen_models(config: RunConfig, task: Task, data: Datasets) -> dict[str, nn.Module | None]:
    """Return the frozen models of a task as ``TracedJob`` has them. Raises MetaModelError."""
    bound = BoundTask.of(task)
    return {
        name: (
            None
            if given == INITIAL and config.lora.rank is not None
            else frozen_source(config, bound, data, given).meta_model()
        )
        for name, given in bound.frozen(config, data).items()
    }


def trace(job: TracedJob, stand_in: object) -> Step:
    """Return the memory of a step, the second or a later one; raises ConfigError, one line, if
    it cannot be traced.

    ``stand_in`` comes from ``traced()`` of the strategy.
    """
    threads = threads_per_rank(int(job.config.nproc)) if job.config.device == "cpu" else None
    storages = Storages(copies=threads is not None, threads=threads)
    phases = _Phases(storages)
    hooks = Hooks(job.config.strategy, stand_in, {"phases": phases})
    apart = stand_in if isinstance(stand_in, HoldsExtraTensors) else None
    try:
        module = without_values(job.meta_model, storages)
        # A trace is not a run: what the strategy tells of one is not said.
        silence = at_level(logging.WARNING)
        with (
            silence,
            _ranks(int(job.config.nproc)),
            kernels_of(job.config.device),
            storages.tracing(),
        ):
            return _trace(job, hooks, storages, module, phases, apart)
    except Exception as error:
        # of any kind: the task's own code computes with tensors that have no values
        reason = one_line(f"{type(error).__name__}: {error}", limit=200)
        name = type(job.meta_model).__name__
        raise ConfigError(
            f"{name} cannot be traced: {phases.where} fails without values: {reason}"
        ) from error
    finally:
        if apart is not None:
            apart.close()


def _trace(
    job: TracedJob,
    hooks: Hooks,
    storages: Storages,
    module: nn.Module,
    phases: _Phases,
    apart: HoldsExtraTensors | None,
) -> Step:
    run, frozen = _with_frozen(job, hooks, storages, _build_run(job, hooks, module))
    assert run.optimizer is not None
    pools = _mask_pools(job, module)  # kept for the whole step
    storages.count(pools)
    storages.count(tensor for tensor in tree_flatten(job.batch)[0] if isinstance(tensor, Tensor))
    if apart is None:
        phases.where = "the optimizer's step"
        _fill_state(run.optimizer)
    else:
        _passes(job, hooks, phases, run)
        hooks.step(run, job.config.clip)
    state = [
        value
        for kept in run.optimizer.state.values()
        for value in kept.values()
        if isinstance(value, Tensor)
    ]
    parameters = chain(run.module.parameters(), *(model.parameters() for model in frozen))
    kinds = {"parameters": storages.numbers(parameters), "optimizer": storages.numbers(state)}
    marks = _passes(job, hooks, phases, run)
    kinds["gradients"] = storages.numbers(
        p.grad for p in run.module.parameters() if p.grad is not None
    )
    for kind, tensors in apart.extra_tensors(run).items() if apart else ():
        kinds[kind] |= storages.numbers(tensors)
    hooks.step(run, job.config.clip)
    return timeline(storages.changes, marks, [kinds[kind] for kind in KINDS[:-1]])


def _mask_pools(job: TracedJob, module: nn.Module) -> list[Tensor]:
    """Return the pools of dropout masks by row, one for each probability."""
    rates = {part.p for part in module.modules() if isinstance(part, nn.Dropout) and part.p > 0}
    return [torch.empty(POOL_VALUES) for _ in rates] if job.config.dropout_masks == "row" else []


def _passes(job: TracedJob, hooks: Hooks, phases: _Phases, run: Run) -> list[tuple[int, Phase]]:
    """Run the loop's own passes; return where each begins in the list of changed storages, and
    where the step does.
    """
    phases.marks = []
    micros = [
        (MicroBatch(indices=np.zeros(job.rows, np.int64), last=last), job.batch)
        for last in job.passes
    ]
    train_step(hooks, run, micros, unscaled_loss(run, BoundTask.of(job.task)))
    phases.begin("step", "step")
    return phases.marks


def _build_run(job: TracedJob, hooks: Hooks, module: nn.Module) -> Run:
    """Return the run with its model as the strategy has it, ready to step."""
    config, ranks = job.config, int(job.config.nproc)
    shards = max(1, ranks // hooks.capabilities.ranks_per_shard)
    if config.gradient_checkpointing:
        getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()  # type: ignore[operator]
    run = Run(
        config=config,
        world=World(
            rank=0, size=ranks, local_rank=0, device=torch.device("cpu"), shard=0, shards=shards
        ),
        capabilities=hooks.capabilities,
        module=module,
        model=module,
        accumulation=most_micro_batches(config, shards),
        tally=Tally(BoundTask.of(job.task).logs),
    )
    prepared = hooks.wrap_model(run, module, optimizer_factory(config))
    set_form(config, job.task, module)
    prepared.model.train()
    return replace(
        run, model=prepared.model, optimizer=prepared.optimizer, strategy_state=prepared.state
    )


def _with_frozen(
    job: TracedJob, hooks: Hooks, storages: Storages, run: Run
) -> tuple[Run, list[nn.Module]]:
    """Return ``run`` with the frozen models of its task as the strategy holds
    them, and these models.
    """
    models: dict[str, nn.Module] = dict.fromkeys(job.frozen, run.model)
    held = []
    for name, meta_model in job.frozen.items():
        if meta_model is not None:
            module = without_values(meta_model, storages).requires_grad_(False)
            beside = replace(run, module=module, model=module, optimizer=None, strategy_state=None)
            models[name] = hooks.wrap_model(beside, module, None).model
            models[name].eval()
            held.append(module)
    autocast = autocast_for(job.config, hooks.capabilities, run.world)

    @torch.no_grad()
    def consult(batch: Batch, training: bool = True) -> Batch:
        with autocast:
            return BoundTask.of(job.task).consult(models, batch)

    return (replace(run, consult=consult) if models else run), held


def without_values(meta_model: nn.Module, storages: Storages) -> nn.Module:
    """Return a copy of ``meta_model`` on a CPU without memory; tied parameters stay tied."""
    module = copy.deepcopy(meta_model)
    made: dict[int, Tensor] = {}

    def on_cpu(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with storages.fakes:
                copy_ = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
            storages.count([copy_])
            made[id(tensor)] = (
                nn.Parameter(copy_, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else copy_
            )
        return made[id(tensor)]

    for part in module.modules():
        for kept in (part._parameters, part._buffers):
            for name, tensor in kept.items():
                if tensor is not None:
                    kept[name] = on_cpu(tensor)  # type: ignore[assignment]
    # torch cannot move such a tensor, not even to where it is.
    vars(module)["to"] = lambda *_args, **_kwargs: module
    return module


def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state, as its first step would."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def _ranks(size: int) -> Iterator[None]:
    """Be the first of so many ranks, whose collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError(
            "the program has made a process group; call destroy_process_group() before"
        )
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
