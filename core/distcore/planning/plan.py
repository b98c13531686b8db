"""The plan of a job: what each rank holds and sends under each of several strategies, from the model's skeleton."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from distcore.compare.rows import parse_rows, refuse_ranks
from distcore.config import RunConfig, load_config
from distcore.distributed import footprint
from distcore.engine.model_source import model_source
from distcore.engine.optim import check_optimizer, freeze, optimizer_factory
from distcore.engine.resolve import build_strategy, load_task, resolve
from distcore.engine.task_calls import prepare
from distcore.errors import ConfigError, DistcoreError, SkeletonError
from distcore.planning.longest import Batch, longest
from distcore.planning.step import Job, trace
from distcore.planning.timeline import Step
from distcore.plugin.capabilities import ChecksModel
from distcore.plugin.hooks import capabilities_of
from distcore.plugin.memory import Memory, PlansMemory, TracesStep
from distcore.plugin.shorthand import expand_shorthand
from distcore.plugin.task import Datasets, Task

MOST_RANKS = 1024
"""Most ranks that a plan is for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to plan: the flags of ``distcore plan``."""

    config: str | None
    """Path of a config file, or none."""
    changes: Mapping[str, Any]
    """Values by dotted key that override the file."""
    strategies: str
    """Strategies, separated by commas; empty: the config's."""
    ranks: Sequence[int]
    """Numbers of ranks to plan for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One strategy on one number of ranks."""

    strategy: str
    """As the user wrote it."""
    ranks: int
    """How many ranks share the work."""
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
    sends: bool = True
    """Whether ``memory`` says what is sent; the trace of a step alone does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """What all rows are about."""

    task: Task
    data: Datasets
    skeleton: nn.Module


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What was planned."""

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
    packed: bool
    """Whether rows are computed without padding."""
    rows: tuple[Row, ...]
    """In the order of the strategies, then of the numbers of ranks."""


def make_plan(request: Request) -> Plan:
    """Return the plan; starts nothing and builds no weights. Raises DistcoreError, one line.

    A strategy that cannot run the job, or does not say what it holds, is a row with the reason.
    """
    refuse_ranks("plan")
    _check_ranks(request.ranks)
    base = load_config(request.config, dict(request.changes))
    names = list(parse_rows(request.strategies, ())) if request.strategies else [base.strategy]
    alone = _resolved(request, "single", 1)
    model = _model(alone)
    skeleton = model.skeleton
    rows = [
        _row(request, name, ranks, model)
        for name in names
        for ranks in ([1] if _is_one_process(request, name) else dict.fromkeys(request.ranks))
    ]
    return Plan(
        model=type(skeleton).__name__,
        parameters=sum(p.numel() for p in skeleton.parameters()),
        trained=sum(p.numel() for p in footprint.trained(skeleton)),
        checkpoint=_checkpoint(alone, skeleton),
        device=alone.device,
        packed=alone.packing == "on",
        rows=tuple(rows),
    )


def _check_ranks(ranks: Sequence[int]) -> None:
    if wrong := next((number for number in ranks if not 1 <= number <= MOST_RANKS), None):
        raise ConfigError(f"--nproc {wrong}: a plan is for 1 to {MOST_RANKS} ranks")


def _loaded(request: Request, strategy: str) -> RunConfig:
    """Return the config with another strategy; the file's options of a strategy are for that one only."""
    given = load_config(request.config, dict(request.changes)).strategy
    own = given.partition(":")[0] == strategy.partition(":")[0]
    reset: dict[str, Any] = {} if own else {"strategy_options": {}}
    options = {k: v for k, v in request.changes.items() if own or not k.startswith("strategy_options")}
    return load_config(request.config, reset | options | {"strategy": strategy})


def _is_one_process(request: Request, strategy: str) -> bool:
    try:
        config = expand_shorthand(_loaded(request, strategy))
        return capabilities_of(config.strategy, build_strategy(config)).processes == "one"
    except DistcoreError:
        return False  # each of its rows says why


def _resolved(request: Request, strategy: str, ranks: int) -> RunConfig:
    """Resolve the config for so many ranks, which this machine need not have room for."""
    config = _loaded(request, strategy)
    # Neither the devices of this machine nor the size of the batch must keep a plan from being made.
    each = 1 if config.micro_batch_size == "auto" else int(config.micro_batch_size)
    unit = each * _shards(config, ranks)
    batch = -(-config.global_batch_size // unit) * unit
    device = "cpu" if config.device == "auto" else config.device
    return resolve(config.model_copy(update={"nproc": ranks, "device": device, "global_batch_size": batch}))


def _shards(config: RunConfig, ranks: int) -> int:
    expanded = expand_shorthand(config)
    return max(1, ranks // capabilities_of(expanded.strategy, build_strategy(expanded)).ranks_per_shard)


def _model(config: RunConfig) -> _Model:
    task = load_task(config)
    data = prepare(task, config)
    try:
        skeleton = model_source(config, task, data).skeleton()
    except SkeletonError as error:
        raise ConfigError(f"plan: the model cannot be built without its weights: {error}") from None
    freeze(config, skeleton)
    check_optimizer(config, skeleton)
    return _Model(task=task, data=data, skeleton=skeleton)


def _row(request: Request, name: str, ranks: int, model: _Model) -> Row:
    try:
        config = _resolved(request, name, ranks)
        strategy = build_strategy(config)
        if not isinstance(strategy, PlansMemory | TracesStep):
            return Row(strategy=name, ranks=ranks, reason="the strategy does not say what it holds")
        if isinstance(strategy, ChecksModel):
            strategy.check_model(config, model.skeleton)
        memory = None
        if isinstance(strategy, PlansMemory):
            # A copy: a strategy may change the module that it is asked about.
            memory = strategy.plan_memory(config, copy.deepcopy(model.skeleton), ranks, optimizer_factory(config))
    except DistcoreError as error:
        return Row(strategy=name, ranks=ranks, reason=_line(error))
    row = Row(strategy=name, ranks=ranks, memory=memory)
    if not isinstance(strategy, TracesStep):
        return replace(row, untraced="the strategy does not say how its step can be traced")
    try:
        batch, values = longest(config, model.data.train, _shards(config, ranks))
        job = Job(
            config=config, task=model.task, skeleton=model.skeleton, batch=values, after_others=not batch.is_whole
        )
        step = trace(job, strategy.traced())
    except DistcoreError as error:
        return replace(row, untraced=_line(error)) if memory else replace(row, reason=_line(error))
    return replace(row, step=step, batch=batch, memory=memory or _held(step), sends=memory is not None)


def _held(step: Step) -> Memory:
    """Return what a traced step shows of what is held; of what is sent it shows nothing."""
    return Memory(
        parameters=step.moments[0].parameters,
        gradients=max(moment.gradients for moment in step.moments),
        optimizer=step.moments[0].optimizer,
    )


def _line(error: DistcoreError) -> str:
    return " ".join(str(error).split())


def _checkpoint(config: RunConfig, skeleton: nn.Module) -> int:
    """Return the bytes of a checkpoint's tensors: trained weights, the rest of the model's state, optimizer state.

    Of an adapter's base a checkpoint has nothing.
    """
    names = {id(parameter) for parameter in skeleton.parameters()}
    kept = footprint.trained(skeleton) if config.lora.rank is not None else list(skeleton.parameters())
    buffers = [value for value in skeleton.state_dict(keep_vars=True).values() if id(value) not in names]
    average = 0 if config.ema.decay is None else 4 * sum(p.numel() for p in footprint.trained(skeleton))
    state = footprint.optimizer_bytes(optimizer_factory(config)(copy.deepcopy(skeleton)))
    return footprint.nbytes([*kept, *buffers]) + state + average
