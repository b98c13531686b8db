"""The loss of a step for tools that trace one: the loop's own, over a batch that
stands for any other.
"""

from __future__ import annotations

from torch import Tensor

from distcore.engine.loop import Step
from distcore.engine.precision import autocast_for
from distcore.engine.shares import Shares
from distcore.plugin.batching.columns import ConstantColumn
from distcore.plugin.strategy.contract import Run, StepLoss
from distcore.plugin.task.bound import BoundTask


def unscaled_loss(run: Run, task: BoundTask) -> StepLoss:
    """Return the loss of a micro-batch as a step computes it, with scale 1 for it and
    for each additional term.
    """
    one_item_per_row = ConstantColumn(1, 1)
    shares = Shares(items=1, scale=1.0, terms=dict.fromkeys(task.logs, (1.0, one_item_per_row)))
    autocast = autocast_for(run.config, run.capabilities, run.world)
    return Step(run, [], shares, _no_passes, autocast, masks=None).scaled(task.losses.unlogged)


def _no_passes(*_: object) -> Tensor:
    raise AssertionError("a step that is traced has no micro-batches")
