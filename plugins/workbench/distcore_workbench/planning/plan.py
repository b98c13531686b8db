"""The plan of a job: memory and traffic of each rank under several strategies, from the model
on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distcore import (
    ConfigError,
    Datasets,
    DistcoreError,
    Memory,
    MetaModelError,
    RunConfig,
    Task,
    footprint,
    with_changes,
)
from distcore.engine.tracing import StepToTrace, frozen_meta_models
from distcore.lab import Resolved, model_source
from distcore.model import check_optimizer, freeze, optimizer_factory
from distcore.plugin.strategy import ChecksModel, HoldsExtraTensors, PlansMemory, TracesStep
from distcore_workbench.compare.comparison_rows import parse_rows, refuse_ranks
from distcore_workbench.planning.longest import Batch, longest
from distcore_workbench.planning.request import (
    PlanRequest,
    Ranks,
    is_one_process,
    resolve_for,
    shards_of,
)
from distcore_workbench.planning.step import trace
from distcore_workbench.planning.timeline import KINDS, Moment, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One strategy on one number of ranks."""

    strategy: str
    """As the user wrote it."""
    ranks: int
    """How many ranks share the work."""
    nodes: int = 1
    """On how many machines."""
    memory: Memory | None = None
    """``None``: not known."""
    reason: str = ""
    """Why it is not known."""
    step: Step | None = None
    """A traced step with the longest micro-batch; ``None``: not known."""
    untraced: str = ""
    """Why it is not known, where ``memory`` is."""
    batch: Batch | None = None
    """The micro-batch that was traced."""
    global_batch_size: int = 0
    """Rows of a step: as requested, or a few more that the ranks can share; 0: not known."""

    @property
    def world(self) -> str:
        """How many ranks, and on how many machines if on several."""
        return str(Ranks(self.ranks, self.nodes))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """The subject of all rows."""

    task: Task
    data: Datasets
    meta_model: nn.Module
    frozen: Mapping[str, nn.Module | None]
    """The task's frozen models; ``None``: the trained model, without its adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The result of ``distcore plan``."""

    model: str
    """Class of the model."""
    parameters: int
    """How many the model has."""
    trained: int
    """How many of them are trained."""
    checkpoint: int
    """Bytes of the tensors of one checkpoint, the same under every strategy."""
    device: str
    """The type of device that the job is for."""
    global_batch_size: int
    """Rows of a step that were asked for."""
    padded: bool
    """Whether rows are computed in their padded form."""
    rows: tuple[Row, ...]
    """In the order of the strategies, then of the numbers of ranks."""


def make_plan(request: PlanRequest) -> MemoryPlan:
    """Return the plan; starts nothing and builds no weights. Raises DistcoreError, one line.

    A strategy that cannot run the job, or does not declare its memory, is a row with the reason.
    """
    refuse_ranks("plan")
    all_ranks = request.all_ranks()
    base = request.load()
    names = list(parse_rows(request.strategies, ())) if request.strategies else [base.strategy]
    alone = resolve_for(request, "single", 1)
    model = _model(alone)
    meta_model = model.meta_model
    rows = []
    for name in names:
        numbers_of_ranks = [Ranks(1, 1)] if is_one_process(request, name) else all_ranks
        rows += [_row(request, name, ranks, model) for ranks in numbers_of_ranks]
    return MemoryPlan(
        model=type(meta_model).__name__,
        parameters=sum(p.numel() for p in meta_model.parameters()),
        trained=sum(p.numel() for p in footprint.trained(meta_model)),
        checkpoint=_checkpoint(alone.config, meta_model),
        device=alone.config.device,
        global_batch_size=base.global_batch_size,
        padded=alone.config.pads_rows,
        rows=tuple(rows),
    )


def _model(alone: Resolved) -> _Model:
    """Return what all rows of the plan share.

    Raises ConfigError for a model that cannot be built without its weights.
    """
    config = alone.config
    task = alone.task
    data = task.prepare(config)
    try:
        meta_model = model_source(config, task, data).meta_model()
        frozen = frozen_meta_models(config, task, data)
    except MetaModelError as error:
        raise ConfigError(f"plan: the model cannot be built without its weights: {error}") from None
    freeze(config, meta_model)
    check_optimizer(config, meta_model)
    return _Model(task=task, data=data, meta_model=meta_model, frozen=frozen)


def _row(request: PlanRequest, name: str, ranks: Ranks, model: _Model) -> Row:
    """Return the row of a strategy and a number of ranks; without figures it has a ``reason``."""
    row = Row(strategy=name, ranks=ranks.ranks, nodes=ranks.nodes)
    with ranks.set_local_world_size():
        try:
            resolved = resolve_for(request, name, ranks.ranks)
            config = resolved.config
            strategy = resolved.strategy
            if not isinstance(strategy, PlansMemory | TracesStep):
                return replace(row, reason="the strategy does not declare its memory")
            if isinstance(strategy, ChecksModel):
                strategy.check_model(config, model.meta_model)
        except DistcoreError as error:
            return replace(row, reason=_line(error))
        row = replace(row, global_batch_size=config.global_batch_size)
        return _with_step(_states(resolved, row, model), resolved, model)


def _states(resolved: Resolved, row: Row, model: _Model) -> Row:
    """Return the row with the memory that the strategy states, or with the reason
    why it states none.
    """
    config, strategy = resolved.config, resolved.strategy
    if not isinstance(strategy, PlansMemory):
        return row
    try:
        # A copy: a strategy may change the module that it is asked about.
        meta_model = copy.deepcopy(model.meta_model)
        memory = strategy.plan_memory(config, meta_model, row.ranks, optimizer_factory(config))
        for frozen in filter(None, model.frozen.values()):
            held = strategy.plan_memory(config, copy.deepcopy(frozen), row.ranks, _plain)
            memory = replace(memory, parameters=memory.parameters + held.parameters)
        return replace(row, memory=memory)
    except DistcoreError as error:
        return replace(row, reason=_line(error))


def _plain(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without state, for the plan of a model that is not trained."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def _with_step(row: Row, resolved: Resolved, model: _Model) -> Row:
    """Return the row with a traced step, or with the reason for having none."""
    shards = shards_of(resolved.capabilities, row.ranks)
    strategy = resolved.strategy
    memory = row.memory
    config = _at_once(resolved.config, shards, model)
    if not isinstance(strategy, TracesStep):
        return replace(row, untraced="the strategy does not say how its step can be traced")
    try:
        batch, values = longest(config, model.data.train, shards)
        stand_in = strategy.traced()
        most = (
            stand_in.most_ranks if memory and isinstance(stand_in, HoldsExtraTensors) else row.ranks
        )
        traced = _of_fewer(config, most)
        job = StepToTrace(
            config=traced,
            task=model.task,
            meta_model=model.meta_model,
            frozen=model.frozen,
            batch=values,
            rows=batch.rows,
            micro_batches=batch.of_step,
            ranks=int(traced.nproc),
        )
        step = trace(job, stand_in)
    except DistcoreError as error:
        if memory is not None:
            return replace(row, untraced=_line(error))
        reasons = filter(None, (row.reason, _line(error)))
        return replace(row, reason="; ".join(reasons))
    if memory is not None:
        # A trace knows one memory, that of the device and the main one.
        has_second_memory = memory.host and config.device != "cpu"
        if has_second_memory or most < row.ranks:
            limits = {name: getattr(memory, name) for name in KINDS[:2]}
            limits[KINDS[2]] = memory.stepped
            step = step.within(limits)
    memory = memory or _memory_of(step)
    start = Moment(
        phase="start",
        parameters=memory.parameters,
        gradients=0,
        optimizer=0,
        activations=memory.starting,
    )
    return replace(row, step=step.after(start), batch=batch, memory=memory, reason="")


def _at_once(config: RunConfig, shards: int, model: _Model) -> RunConfig:
    """Return the config with one micro-batch per rank and step where the extension
    ``batch_norm`` makes it so.
    """
    layers = [layer for layer in model.meta_model.modules() if isinstance(layer, _BatchNorm)]
    mixes_rows = any(not hasattr(layer, "keeps_statistics") for layer in layers)
    if not (config.extensions.get("batch_norm") and mixes_rows):
        return config
    return with_changes(
        config, {"micro_batch_size": config.global_batch_size // shards, "micro_batch_tokens": None}
    )


def _of_fewer(config: RunConfig, ranks: int) -> RunConfig:
    """Return the config for at most ``ranks`` ranks, each with as many rows as before."""
    if int(config.nproc) <= ranks:
        return config
    batch = config.global_batch_size // int(config.nproc) * ranks
    return with_changes(config, {"nproc": ranks, "global_batch_size": batch})


def _memory_of(step: Step) -> Memory:
    """Return the memory between steps, as a traced step shows it; a trace shows no traffic."""
    return Memory(
        parameters=step.moments[0].parameters,
        gradients=max(moment.gradients for moment in step.moments),
        optimizer=step.moments[0].optimizer,
        sent=None,
    )


def _line(error: DistcoreError) -> str:
    """Return an error's message as one line of a table."""
    return " ".join(str(error).split())


def _checkpoint(config: RunConfig, meta_model: nn.Module) -> int:
    """Return the bytes of a checkpoint's tensors: weights, buffers, average, optimizer state.

    Of an adapter's base a checkpoint has nothing.
    """
    trained = footprint.trained(meta_model)
    parameters = list(meta_model.parameters())
    weights = parameters if config.lora.rank is None else trained
    ids_of_parameters = set(map(id, parameters))
    state = meta_model.state_dict(keep_vars=True)
    buffers = [value for value in state.values() if id(value) not in ids_of_parameters]
    average = 0
    if config.ema.decay is not None:
        # In fp32, whatever the dtype of the weights.
        average = 4 * sum(parameter.numel() for parameter in trained)
    optimizer = optimizer_factory(config)(copy.deepcopy(meta_model))
    return footprint.nbytes([*weights, *buffers]) + footprint.saved_bytes(optimizer) + average
