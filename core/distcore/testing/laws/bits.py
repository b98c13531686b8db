"""Law 10: under ``exact``, training has the same bits at any number of ranks.

Each case trains the same blocks under the strategy, on all ranks, and under ``single`` in each of
them, and counts the elements that differ in any bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcore import checkpoint
from distcore.testing.findings import EXACT, Measured, needs
from distcore.testing.lab import HUGE, Job, Lab
from distcore.testing.laws.gradient import needs_calls, needs_own_steps, needs_phases
from distcore.testing.problem import Problem
from distcore.testing.reference import Series
from distcore.testing.strategy_suite import STRATEGIES
from distcore.testing.variants import Adding, Climbing, Odd, Phased, Referenced, Repeating, Wide

STEPS = 6
"""Optimizer steps of a run: AdamW makes of one last bit a fifth of the weights in ten."""
HALF = 3
"""Steps before an interruption."""
BLOCKS = 4
"""Blocks of a step, or as many as there are ranks."""


@STRATEGIES.law("bits")
def bits_of_ranks(lab: Lab) -> Measured:
    """Weights, moments, losses and norms have the bits of one process, also where neither rows nor
    blocks can be shared equally.
    """
    rows = lab.global_batch + 1
    problem = Problem(rows=4 * rows - 2, weighted=True)
    return _compare(lab, problem, global_batch_size=rows, exact=_uneven(lab))


@STRATEGIES.law("bits")
def bits_of_clipping(lab: Lab) -> Measured:
    """Clipping that is active in each step, by norm and by value, keeps the bits."""
    return _compare(lab, Problem(), clip={"norm": 0.05, "value": 5e-3})


@STRATEGIES.law("bits")
def bits_of_dropout(lab: Lab) -> Measured:
    """Dropout draws the same masks of a block on any rank, also where a layer draws its own."""
    return _compare(lab, Problem(dropout=0.3), dropout_masks="rank")


@STRATEGIES.law("bits")
def bits_in_bf16(lab: Lab) -> Measured:
    """The forward pass in bf16 keeps the bits, where that is declared."""
    return _compare(lab, Problem(), precision="bf16")


@STRATEGIES.law("bits")
def bits_of_wide_sums(lab: Lab) -> Measured:
    """Sums keep their bits over gradients that fp64 cannot add exactly, such as 16, 2^-60 and
    -16, and over those that are too large for the finest grid.
    """
    needs(lab.world.size <= BLOCKS, f"a step of this case has {BLOCKS} blocks, of a row each")
    measured = [
        _compare(lab, Wide(rows=BLOCKS, size=size, tiny=tiny), global_batch_size=BLOCKS)
        for size, tiny in ((16.0, 2.0**-60), (2.0**12, 2.0**-43))
    ]
    return max(measured, key=lambda each: each.error)


@STRATEGIES.law("bits")
def bits_of_shards(lab: Lab) -> Measured:
    """Tensors that end inside of a vector of the processor have the bits of one process, and so
    have shards of them.
    """
    return _compare(lab, Odd())


@STRATEGIES.law("bits")
def bits_of_repeated_layers(lab: Lab) -> Measured:
    """Layers that a forward pass calls twice, and a weight that two of them share, have the bits
    of one process.
    """
    return _compare(lab, Problem(repeated=True, tied=True))


@STRATEGIES.law("bits")
def bits_of_an_average(lab: Lab) -> Measured:
    """A moving average of the weights has the bits of one process."""
    _needs_exact(lab, lab.base.precision)
    needs(lab.hooks.capabilities.ema, "the strategy keeps no average of weights")
    return _compare(lab, Problem(), ema={"decay": 0.9})


@STRATEGIES.law("bits")
def bits_beside_a_frozen_model(lab: Lab) -> Measured:
    """A model that is trained beside a frozen one has the bits of one process."""
    return _compare(lab, Referenced())


@STRATEGIES.law("bits")
def bits_of_a_global_loss(lab: Lab) -> Measured:
    """A loss over the global batch, in which a row may be twice, has the bits of one process."""
    needs_calls(lab)
    return _compare(lab, Repeating(dropout=0.3), dropout_masks="rank", exact=_uneven(lab))


@STRATEGIES.law("bits")
def bits_of_phases(lab: Lab) -> Measured:
    """Training in phases has the bits of one process, with random numbers in each phase."""
    needs_phases(lab)
    return _compare(lab, Phased(dropout=0.3), dropout_masks="rank")


@STRATEGIES.law("bits")
def bits_of_own_steps(lab: Lab) -> Measured:
    """Steps of two passes that a task makes itself have the bits of one process."""
    needs_own_steps(lab)
    return _compare(lab, Climbing(dropout=0.3), dropout_masks="rank")


@STRATEGIES.law("bits")
def bits_of_evaluation(lab: Lab) -> Measured:
    """Outputs, sums and metrics of an evaluation have the bits of one process."""
    problem = Adding(evaluation_rows=4 * lab.global_batch + 3)
    job, alone = _pair(lab, problem, exact=_uneven(lab))
    for each in (job, alone):
        each.take_steps(2)
    here, there = job.evaluate(), alone.evaluate()
    wrong = {
        name: _differing(here.outputs[name], value)
        for name, value in there.outputs.items()
        if isinstance(value, Tensor)
    }
    wrong |= {name: int(here.metrics[name] != value) for name, value in there.metrics.items()}
    return _count(wrong)


@STRATEGIES.law("bits")
def bits_after_resume(lab: Lab) -> Measured:
    """A run that was begun by one process and continued by all ranks, or the other way round, has
    the bits of one that was not interrupted.
    """
    problem = Problem(dropout=0.2)
    changes = {"schedule": {"name": "linear", "warmup_steps": 2}, "clip": {"norm": 0.5}}
    _, whole = _pair(lab, problem, **changes)
    uninterrupted = whole.train(STEPS)
    measured = []
    for begins_alone in (True, False):
        together, alone = _pair(lab, problem, **changes)
        first, second = (alone, together) if begins_alone else (together, alone)
        path = first.save(first.take_steps(HALF).progress)
        if begins_alone:  # all ranks read the main rank's
            path = Path(lab.share(str(path))[0])
        progress, _ = checkpoint.load(second.run, second.hooks, path)
        resumed = second.train(STEPS - HALF, progress)
        measured.append(_count(_wrong_tensors(resumed.state, uninterrupted.state)))
    return max(measured, key=lambda each: each.error)


def _uneven(lab: Lab) -> int:
    """Return a number of blocks that ranks cannot share equally.

    Some rank has one pass less than the others, and so may not wait for them in a pass; and the
    order of the ranks is not that of their blocks.
    """
    return 2 * lab.world.size + 1


def _compare(lab: Lab, problem: Problem, **changes: Any) -> Measured:
    """Train under the strategy and under ``single``, and count what differs in any bit."""
    job, alone = _pair(lab, problem, **changes)
    return _count(_wrong(job.train(STEPS), alone.train(STEPS)))


def _pair(lab: Lab, problem: Problem, **changes: Any) -> tuple[Job, Job]:
    """Build a run under the strategy, and the same one for this rank alone.

    Raises Skip for a strategy that does not declare the precision.
    """
    _needs_exact(lab, str(changes.get("precision", lab.base.precision)))
    blocks = max(BLOCKS, lab.world.size)
    common: dict[str, Any] = {
        "exact": blocks,
        "micro_batch_size": 2 * lab.global_batch,
        "clip": {"norm": HUGE},
    }
    changes = common | changes
    return lab.job(problem, **changes), lab.build_alone(problem, **changes)


def _needs_exact(lab: Lab, precision: str) -> None:
    """Raise Skip for a strategy that does not declare the same bits in ``precision``."""
    keeps_bits = lab.hooks.capabilities.keeps_bits(precision)
    needs(keeps_bits, f"the strategy does not declare the same bits in {precision}")


def _wrong(actual: Series, expected: Series) -> dict[str, int]:
    """Return by name how many elements of two runs differ in any bit."""
    wrong = _wrong_tensors(actual.state, expected.state)
    for name in ("losses", "norms"):
        values = [torch.tensor(getattr(run, name)).double() for run in (actual, expected)]
        wrong[name] = _differing(*values)
    return wrong


def _wrong_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, int]:
    """Return by name how many elements of tensors differ in any bit; all of one that is missing."""
    wrong = {}
    for name in actual.keys() | expected.keys():
        if name in actual and name in expected:
            wrong[name] = _differing(actual[name], expected[name])
        else:
            wrong[name] = max(1, actual.get(name, expected.get(name, torch.empty(0))).numel())
    return wrong


def _differing(actual: Tensor, expected: Tensor) -> int:
    """Return how many elements differ in any bit; two NaN do not."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return max(1, expected.numel())
    differ = actual != expected
    if actual.is_floating_point():
        differ &= ~(actual.isnan() & expected.isnan())
        differ |= actual.signbit() != expected.signbit()
    return int(differ.sum())


def _count(wrong: Mapping[str, int]) -> Measured:
    """Return the measurement of elements that differ, by the name of their tensor."""
    worst = max(sorted(wrong), key=lambda name: wrong[name])
    total = sum(wrong.values())
    where = f", most in {worst}" if total else ""
    return Measured(error=total, bound=EXACT, note=f"{total} elements with other bits{where}")
