"""The measurement of a task that declares itself causal: no output may follow from a later token.

A model that sees the token which it is to predict copies it: its loss goes to zero and it has
learned nothing. No list of model types tells, since a key of a config decides, so it is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distcore.distributed.agreement import broadcast_from_main
from distcore.engine.evaluation import first_micro_batch
from distcore.engine.mode import set_mode
from distcore.engine.replay import untouched_generators
from distcore.errors import DistcoreError, TaskError
from distcore.launchers.processes.failures import one_line
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.causal import Causal
from distcore.plugin.task.per_epoch import in_epoch
from distcore.plugin.task.task import Dataset

log = logging.getLogger("distcore")

MOST_TOKENS = 256
"""Longest row that is tried: its logits stay small next to those of a micro-batch."""
BOUNDS = {"fp32": 1e-5}
"""Largest change of an earlier output relative to the largest output, by precision.

Models without experts change nothing at all; with experts, their tokens are multiplied in other
groups.
"""
HALF = 2e-2
"""The same in half precision."""
NOISE = 4
"""A change counts if it is this many times the difference between two equal calls."""


@torch.no_grad()
def check_causal(run: Run, hooks: Hooks, task: BoundTask, dataset: Dataset) -> None:
    """Raise TaskError if a causal task's model sees later tokens; every rank calls."""
    declared = task.causal
    if declared is None or not len(dataset):
        return
    tokens = _tokens(run, hooks, task, declared, dataset)
    with untouched_generators(), _not_compiled(run):
        set_mode(run, training=False)
        try:
            change, noise = change_before(partial(_outputs, run.model, task, declared), tokens)
        except (DistcoreError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any class: code of a model, which may want more than tokens
            reason = one_line(f"{type(error).__name__}: {error}")
            log.warning("causal: not measured: model(tokens) fails: %s", reason)
            # Other ranks, with other rows, may have measured: all must agree below.
            change, noise = 0.0, 0.0
        finally:
            set_mode(run, training=True)
    bound = max(BOUNDS.get(run.config.precision, HALF), NOISE * noise)
    problem = "" if change <= bound else _problem(task, declared, change)
    if problem := broadcast_from_main(run, hooks, problem):
        raise TaskError(problem)


@torch.no_grad()
def check_causal_kind(task: BoundTask) -> None:
    """Raise TaskError if a small model of the kind that a causal task trains sees later tokens.

    One process calls, before any rank starts. A kind without a small model is measured in the run
    alone.
    """
    declared = task.causal
    if declared is None or declared.small is None:
        return
    with untouched_generators():
        try:
            small = declared.small()
            if small is None:
                return
            model, tokens = small
            model.eval()
            change, noise = change_before(partial(_outputs, model, task, declared), tokens)
        except (DistcoreError, MemoryError):
            raise
        except Exception as error:  # any class: code of a model that may not be made smaller
            log.debug("causal: measured in the run alone: %s: %s", type(error).__name__, error)
            return
    # Not "unless it is within": random weights may give no numbers, which say nothing.
    if change > max(BOUNDS["fp32"], NOISE * noise):
        raise TaskError(_problem(task, declared, change))


def _problem(task: BoundTask, declared: Causal, change: float) -> str:
    """Return the line about a model whose earlier outputs change by ``change``, with a remedy."""
    return (
        f"task {task.name}: the model sees the tokens that it is to predict: other tokens at the"
        f" end of a row change its output before them by {change:.0e} of the largest;"
        f" {declared.advice}"
    )


def change_before(outputs_of: Callable[[Tensor], Tensor], tokens: Tensor) -> tuple[float, float]:
    """Return how far other tokens in a row's second half change the outputs of its first half.

    And the noise of that. Both are relative to the largest output. ``tokens``: int ``(1, length)``,
    at least two.
    """
    half = tokens.shape[1] // 2
    outputs = outputs_of(tokens)[:, :half]
    noise = _relative_difference(outputs_of(tokens)[:, :half], outputs)
    # Twice, with other tokens: a router at a near-tie may take another expert by rounding, once.
    changes = []
    for shift in (1, 2):
        changed = _changed(tokens, shift)
        other = torch.cat([tokens[:, :half], changed[:, half:]], 1)
        changes.append(_relative_difference(outputs_of(other)[:, :half], outputs))
    return min(changes), noise


def _tokens(run: Run, hooks: Hooks, task: BoundTask, declared: Causal, dataset: Dataset) -> Tensor:
    """Return the longest row of this rank's first micro-batch: int ``(1, length)``, length ≥ 2."""
    rows = first_micro_batch(run, hooks, dataset).indices
    batch: Any = in_epoch(dataset, 0).batch(rows)
    try:
        tokens = batch[declared.tokens]
    except (KeyError, IndexError, TypeError):
        tokens = None
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        raise TaskError(
            f"task {task.name}: causal: its batches have no integers of shape (n, length) as"
            f" {declared.tokens!r}; name the tokens by Causal(tokens=...)"
        )
    row = tokens[-1:, :MOST_TOKENS].to(run.world.device)  # rows are sorted by length
    return row if row.shape[1] > 1 else row.repeat(1, 2)


def _changed(tokens: Tensor, shift: int) -> Tensor:
    """Return ``tokens`` with another one of them at each position."""
    distinct, positions = torch.unique(tokens, return_inverse=True)
    if len(distinct) == 1:  # one token again and again: its neighbor in the vocabulary
        return tokens + 1 if int(distinct[0]) == 0 else tokens - 1
    step = 1 + (shift - 1) % (len(distinct) - 1)
    others: Tensor = distinct[(positions + step) % len(distinct)]
    return others


def _outputs(model: nn.Module, task: BoundTask, declared: Causal, tokens: Tensor) -> Tensor:
    """Return the outputs of ``model`` at each of ``tokens``, fp32 ``(1, length, ...)``."""
    answer: Any = model(tokens, **declared.arguments)
    outputs = getattr(answer, "logits", answer)
    if not isinstance(outputs, Tensor) or outputs.shape[:2] != tokens.shape:
        kind = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise TaskError(
            f"task {task.name}: causal: model(tokens) gave {kind} for tokens of shape"
            f" {tuple(tokens.shape)}; expected a tensor of shape (n, length, ...), or an object"
            " with such logits"
        )
    return outputs.float()


def _relative_difference(mine: Tensor, other: Tensor) -> float:
    """Return the largest difference over the largest output of ``other``.

    Infinities, as of masked classes, may be equal.
    """
    # A difference of two equal infinities would be NaN.
    differences = (mine - other).abs().masked_fill(mine == other, 0.0)
    finite = other.abs().masked_fill(~other.isfinite(), 0.0)
    return float(differences.max() / finite.max().clamp(min=1e-30))


def _not_compiled(run: Run) -> Any:
    """Return a context without compilation, which one odd length is not worth."""
    is_compiled = run.compiled is not None and run.config.compile != "off"
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
