"""A traced step calls what a step of the loop calls, and gives nothing a value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from distcore import Batch, ConfigError, hookimpl, load_config
from distcore.engine.fake_tensors import FakeTensors
from distcore.engine.tracing import (
    StepToTrace,
    TracedStep,
    fake_ranks,
    frozen_meta_models,
    trace_step,
)
from distcore.model.model_source import model_source
from distcore.plugin.strategy.hooks import Hooks
from distcore.resolve.resolve import resolve
from distcore.strategies.single import SingleStrategy
from distcore.testing.problem import Problem
from distcore.testing.variants import Referenced

ROWS = 4


class Heard:
    """An extension that notes the hooks of a step."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @hookimpl
    def on_step_end(self) -> None:
        """Must not be called: a traced step tells nobody that it is done."""
        self.calls.append("on_step_end")

    @hookimpl(wrapper=True)
    def accumulate(self, last: bool) -> Any:
        self.calls.append("last forward" if last else "forward")
        return (yield)

    @hookimpl(wrapper=True)
    def backward(self) -> Any:
        self.calls.append("backward")
        return (yield)

    @hookimpl(wrapper=True)
    def step(self) -> Any:
        self.calls.append("step")
        return (yield)


def job_of(folder: Path, task: Problem, **changes: Any) -> StepToTrace:
    """The job of a task, with the batch of its first rows."""
    settings = {
        "out": str(folder / "run"),
        "device": "cpu",
        "lr": 0.01,
        "max_steps": 1,
        "global_batch_size": 8,
    }
    config = resolve(load_config(None, settings), 1, task=task).config
    data = task.prepare(config)
    return StepToTrace(
        config=config,
        task=task,
        meta_model=model_source(config, task, data).meta_model(),
        frozen=frozen_meta_models(config, task, data),
        batch=data.train.batch(np.arange(ROWS)),
        rows=ROWS,
        **changes,
    )


def traced(job: StepToTrace, heard: Heard, measure: Callable[[TracedStep], Any]) -> Any:
    hooks = Hooks("single", SingleStrategy(), {"heard": heard})
    return trace_step(job, hooks, FakeTensors(), measure)


@pytest.mark.parametrize(("micro_batches", "passes"), [(1, 1), (2, 2), (3, 3), (50, 3)])
def test_a_traced_step_calls_the_hooks_of_a_step(
    tmp_path: Path, micro_batches: int, passes: int
) -> None:
    def one_step(step: TracedStep) -> None:
        step.passes()
        step.apply()

    heard = Heard()
    traced(job_of(tmp_path, Problem(), micro_batches=micro_batches), heard, one_step)
    before_last = ["forward", "backward"] * (passes - 1)
    assert heard.calls == [*before_last, "last forward", "backward", "step"]


def test_a_traced_step_has_gradients_and_states_without_values(tmp_path: Path) -> None:
    def one_step(step: TracedStep) -> list[torch.Tensor]:
        step.fill_optimizer()
        step.passes()
        assert step.run.optimizer is not None
        states = [value for kept in step.run.optimizer.state.values() for value in kept.values()]
        gradients = [p.grad for p in step.run.module.parameters() if p.requires_grad]
        return [*states, *(gradient for gradient in gradients if gradient is not None)]

    job, before = job_of(tmp_path, Problem()), torch.get_rng_state()
    made = traced(job, Heard(), one_step)
    trained = sum(p.requires_grad for p in job.meta_model.parameters())
    assert len(made) == 4 * trained  # three states of AdamW, and the gradient
    assert all(isinstance(tensor, FakeTensor) for tensor in made if tensor.dim())
    assert all(tensor.is_meta for tensor in job.meta_model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_job_that_is_not_trained_has_passes_and_no_optimizer(tmp_path: Path) -> None:
    def passes(step: TracedStep) -> bool:
        step.passes()
        return step.run.optimizer is None

    assert traced(job_of(tmp_path, Problem(), training=False), Heard(), passes)


def test_frozen_models_are_asked_in_a_traced_step(tmp_path: Path) -> None:
    modes: list[tuple[bool, bool]] = []

    class Asks(Referenced):
        """Notes the modes of the frozen model and of its parameters."""

        def consult(self, models: Any, batch: Batch) -> Batch:
            (model,) = models.values()
            modes.append((model.training, any(p.requires_grad for p in model.parameters())))
            return super().consult(models, batch)

    def passes(step: TracedStep) -> list[nn.Module]:
        step.passes()
        return step.frozen

    frozen = traced(job_of(tmp_path, Asks()), Heard(), passes)
    assert len(frozen) == 1
    assert modes == [(False, False)]


def test_fake_ranks_leave_no_group_and_refuse_a_second_one() -> None:
    with fake_ranks(4):
        assert dist.get_world_size() == 4
        with pytest.raises(ConfigError, match="the program has made a process group"):
            fake_ranks(2).__enter__()
    assert not dist.is_initialized()
