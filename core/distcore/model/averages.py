"""An exponential moving average (EMA) of the trained weights, sharded as the weights are.

A rank averages the weights that its strategy returns for a checkpoint: all of them if replicated,
its own shards if sharded. For an evaluation the strategy's ``load_checkpoint`` swaps the average
in, so strategies need no extra hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from distcore.distributed.local_state import LocalState, parts_of, values_of
from distcore.plugin.strategy.contract import Progress, Run
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.strategy.state import Box, Piece, SavedState, State

WEIGHTS, AVERAGE = "model/", "ema/"
"""Prefixes of the names of weights and of averages."""


def average_name(name: str) -> str:
    """Return the name of the average of the weight ``model/NAME``."""
    return AVERAGE + name.removeprefix(WEIGHTS)


@torch.no_grad()
def begin(run: Run, hooks: Hooks) -> State:
    """Return the average before the first step: an fp32 copy of this rank's trained weights."""
    trained = _trained_state(run, hooks)
    return {average_name(name): _copied(value) for name, value in trained.items()}


@torch.no_grad()
def update(run: Run, hooks: Hooks, step: int) -> None:
    """Update ``run.ema`` with the weights after optimizer step ``step``, counted from 1.

    Needs no communication.
    """
    weights = _trained_state(run, hooks)
    averages: list[Tensor] = []
    new: list[Tensor] = []
    for name, value in (run.ema or {}).items():
        averages += values_of(value)
        for tensor in values_of(weights[WEIGHTS + name.removeprefix(AVERAGE)]):
            new.append(tensor.to(_averaged_in(tensor)))
    if averages:  # a rank may hold no part of any weight
        update_averages = get_ema_multi_avg_fn(decay_at(run, step))  # type: ignore[no-untyped-call]
        update_averages(averages, new, None)


def decay_at(run: Run, step: int) -> float:
    """Return the decay at ``step``; smaller in the first steps with ``ema.warmup``."""
    ema = run.config.ema
    assert ema.decay is not None
    if not ema.warmup:
        return ema.decay
    return min(ema.decay, (1 + step) / (10 + step))


@torch.no_grad()
def load(run: Run, hooks: Hooks, saved: SavedState) -> None:
    """Load this rank's part of ``run.ema`` from a checkpoint, else from the weights."""
    if run.ema is None:
        return
    weights = saved
    if not any(name.startswith(AVERAGE) for name in saved):
        weights = _WeightsByAverageName(run, hooks)
    for name, value in run.ema.items():
        for part in parts_of(value):
            if isinstance(part, Tensor):
                part.copy_(weights[name])
            elif isinstance(part, Piece):
                part.values.copy_(weights.piece(name, part.start, len(part.values)))
            else:
                size = tuple(part.values.shape)
                part.values.copy_(weights.box(name, part.offset, size))


@contextmanager
def use_average(run: Run, hooks: Hooks) -> Iterator[None]:
    """Swap the averaged weights in for the ``with`` block, if the run keeps an average.

    Every rank calls.

    The swap needs memory for one more fp32 copy of this rank's trained weights. After an exception
    the weights are not swapped back: other ranks may not take part, and the run is over.
    """
    if run.ema is None:
        yield
        return
    only_weights = replace(run, optimizer=None)
    state = hooks.save_checkpoint(only_weights)
    trained = {name for name in state if average_name(name) in run.ema}
    with torch.no_grad():
        before = state | {name: _copied(state[name]) for name in trained}
    average = state | {name: run.ema[average_name(name)] for name in trained}
    hooks.load_checkpoint(only_weights, LocalState(run, hooks, average), Progress())
    yield
    hooks.load_checkpoint(only_weights, LocalState(run, hooks, before), Progress())


class _WeightsByAverageName(LocalState):
    """A run's weights under the names of their averages."""

    def __init__(self, run: Run, hooks: Hooks) -> None:
        trained = _trained_state(run, hooks)
        by_average_name = {average_name(name): value for name, value in trained.items()}
        super().__init__(run, hooks, by_average_name)


def _trained_state(run: Run, hooks: Hooks) -> State:
    """Return this rank's part of the weights that are trained, by name."""
    names = set()
    for name, parameter in run.module.named_parameters():
        if parameter.requires_grad:
            names.add(WEIGHTS + name)
    state = hooks.save_checkpoint(replace(run, optimizer=None))
    return {name: value for name, value in state.items() if name in names}


def _averaged_in(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a weight's average: fp32, or the weight's if that is wider or complex."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _copied(value: Tensor | Piece | Box | Sequence[Box]) -> Tensor | Piece | Box | list[Box]:
    """Return a copy of an entry of a state, in the dtype of an average."""
    if isinstance(value, Tensor):
        return _copy_of(value)
    if isinstance(value, Piece | Box):
        return replace(value, values=_copy_of(value.values))
    return [replace(box, values=_copy_of(box.values)) for box in value]


def _copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().to(_averaged_in(tensor), copy=True)
