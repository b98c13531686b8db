"""Weights that a listener writes after a step: they stay, unless an engine steps its own copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from distcore.errors import TaskError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks

EVENT = "on_step_end()"
"""The event after which the next step begins."""


@contextmanager
def notice_written_weights(run: Run, hooks: Hooks) -> Iterator[None]:
    """Notice what listeners do in the block to weights of this rank, for the proof of first steps.

    Raises TaskError for an engine that hides its gradients and steps weights of its own: it would
    write its copies over what the listener wrote, in silence.
    """
    before = _marks(run)
    yield
    after = _marks(run)
    written = [name for name, mark in after.items() if mark != before.get(name)]
    if not written:
        return
    does = f"a listener writes the weight {written[0]!r} in {EVENT}"
    if hooks.capabilities.hides_gradients and "optimizer" in hooks.capabilities.owns:
        raise TaskError(
            f"{does}, and strategy {hooks.name!r} with these options steps copies of the weights,"
            " which it writes over the listener's: compute bounded weights in the model's forward,"
            " or take another strategy, such as --strategy single"
        )
    hooks.changers.append(does)


def _marks(run: Run) -> dict[str, tuple[int, bytes]]:
    """Return, by name, what changes with a trained weight: torch's count of writes, and a sum.

    ``.data`` evades the count.
    """
    marks = {}
    for name, parameter in run.module.named_parameters():
        if parameter.requires_grad:
            marks[name] = (parameter._version, _sum_of(parameter.detach()))
    return marks


def _sum_of(tensor: Tensor) -> bytes:
    """Return the bits of the sum of this rank's part, as a NaN is not equal to itself."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    wide = torch.view_as_real(local) if local.is_complex() else local
    return wide.double().sum().cpu().numpy().tobytes()
