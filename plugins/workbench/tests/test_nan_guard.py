"""``nan_guard`` ends a run at the first loss or gradient norm that is not finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from text_task import TEXTS

from distcore import Progress, RunConfig, StepResult, TrainingError, hookimpl, train
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.strategy.tally import Tally
from distcore.strategies.single import SingleStrategy
from distcore_workbench.nan_guard import NanGuard


@pytest.mark.programs  # it trains
def test_nan_guard_ends_the_run_at_the_first_loss_that_is_not_finite(work_folder: Path) -> None:
    Path("poison.py").write_text(
        "from distcore import hookimpl\n"
        "class Poison:\n"
        "    @hookimpl(wrapper=True)\n"
        "    def backward(self, run, loss):\n"
        "        return (yield)\n"
        "    @hookimpl\n"
        "    def on_step_end(self, run, progress):\n"
        "        next(run.module.parameters()).data.fill_(float('nan'))\n"
    )
    extensions = {"poison.py:Poison": True, "nan_guard": True, "progress": False}
    guarded = RunConfig(
        task=TEXTS,
        max_steps=2,
        log_every=1,
        out="run",
        device="cpu",
        checkpoints={"best": None},
        extensions=extensions,
    )
    with pytest.raises(
        TrainingError, match=r"nan_guard: the loss is nan in step 2 on rank 0; try a lower --lr"
    ):
        train(guarded)


def test_nan_guard_checks_the_gradient_norm() -> None:
    class Exploding:
        capabilities = SingleStrategy.capabilities

        @hookimpl
        def step(self) -> StepResult:
            return StepResult(grad_norm=torch.tensor(math.inf))

    class AnyRun:
        config = RunConfig()
        tally = Tally()

        class world:
            rank = 3

    hooks = Hooks("exploding", Exploding(), {"nan_guard": NanGuard()})
    hooks.on_step_end(AnyRun(), Progress(step=6), StepResult())  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=r"the gradient norm is inf in step 7 on rank 3"):
        hooks.step(AnyRun(), None)  # type: ignore[arg-type]
    lenient = Hooks("exploding", Exploding(), {"nan_guard": NanGuard(gradients=False)})
    assert lenient.step(AnyRun(), None).grad_norm == math.inf  # type: ignore[arg-type]
