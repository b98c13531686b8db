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
    return {average_name(name): _copied(held) for name, held in _trained_state(run, hooks).items()}


@torch.no_grad()
def update(run: Run, hooks: Hooks, step: int) -> None:
    """Update ``run.ema`` with the weights after optimizer step ``step``, counted
    from 1; without communication.
    """
    average, now = run.ema or {}, _trained_state(run, hooks)
    kept = [tensor for held in average.values() for tensor in values_of(held)]
    parts = [
        tensor
        for name in average
        for tensor in values_of(now[WEIGHTS + name.removeprefix(AVERAGE)])
    ]
    new = [tensor.to(_averaged_in(tensor)) for tensor in parts]
    if kept:  # a rank may hold no part of any weight
        get_ema_multi_avg_fn(decay_at(run, step))(kept, new, None)  # type: ignore[no-untyped-call]


def decay_at(run: Run, step: int) -> float:
    """Return the decay at ``step``; smaller in the first steps with ``ema.warmup``."""
    ema = run.config.ema
    assert ema.decay is not None
    return min(ema.decay, (1 + step) / (10 + step)) if ema.warmup else ema.decay


@torch.no_grad()
def load(run: Run, hooks: Hooks, saved: SavedState) -> None:
    """Load this rank's part of ``run.ema`` from a checkpoint, or from the weights
    if it has no average.
    """
    if run.ema is None:
        return
    weights: SavedState = (
        saved
        if any(name.startswith(AVERAGE) for name in saved)
        else _WeightsByAverageName(run, hooks)
    )
    for name, held in run.ema.items():
        for part in parts_of(held):
            if isinstance(part, Tensor):
                part.copy_(weights[name])
            elif isinstance(part, Piece):
                part.values.copy_(weights.piece(name, part.start, len(part.values)))
            else:
                part.values.copy_(weights.box(name, part.offset, tuple(part.values.shape)))


@contextmanager
def use_average(run: Run, hooks: Hooks) -> Iterator[None]:
    """Swap the averaged weights in for the ``with`` block, if the run keeps an
    average; every rank calls.

    The swap needs memory for one more fp32 copy of this rank's trained weights. After an exception
    the weights are not
    swapped back: other ranks may not take part, and the run is over.
    """
    if run.ema is None:
        yield
        return
    only_weights = replace(run, optimizer=None)
    held = hooks.save_checkpoint(only_weights)
    trained = {name for name in held if average_name(name) in run.ema}
    with torch.no_grad():
        own = held | {name: _copied(held[name]) for name in trained}
    average = held | {name: run.ema[average_name(name)] for name in trained}
    hooks.load_checkpoint(only_weights, LocalState(run, hooks, average), Progress())
    yield
    hooks.load_checkpoint(only_weights, LocalState(run, hooks, own), Progress())


class _WeightsByAverageName(LocalState):
    """A run's weights under the names of their averages."""

    def __init__(self, run: Run, hooks: Hooks) -> None:
        super().__init__(
            run,
            hooks,
            {average_name(name): held for name, held in _trained_state(run, hooks).items()},
        )


def _trained_state(run: Run, hooks: Hooks) -> State:
    names = {
        WEIGHTS + name
        for name, parameter in run.module.named_parameters()
        if parameter.requires_grad
    }
    held = hooks.save_checkpoint(replace(run, optimizer=None))
    return {name: value for name, value in held.items() if name in names}


def _averaged_in(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a weight's average: fp32 at least, and wide or complex ones
    stay what they are.
    """
    return torch.promote_types(tensor.dtype, torch.float32)


def _copied(held: Tensor | Piece | Box | Sequence[Box]) -> Tensor | Piece | Box | list[Box]:
    if isinstance(held, Tensor):
        return _copy_of(held)
    if isinstance(held, Piece | Box):
        return replace(held, values=_copy_of(held.values))
    return [replace(box, values=_copy_of(box.values)) for box in held]


def _copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().to(_averaged_in(tensor), copy=True)
