"""Extensions that are broken on purpose; a class names the case that must notice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from distcore import PreparedModel, Progress, Report, Run, hookimpl


@dataclass
class Sound:
    """Counts steps and keeps every law."""

    case: ClassVar = ""

    every: int = 1
    """Steps from one to the next that counts."""

    def __post_init__(self) -> None:
        self.steps = 0

    @hookimpl
    def on_step_end(self, progress: Progress) -> None:
        self.steps += progress.step % self.every == 0

    def state(self) -> int:
        return self.steps

    def load_state(self, state: int) -> None:
        self.steps = state


class ScalesGradients(Sound):
    case = "changes-no-weight"

    @hookimpl(wrapper=True)
    def step(self, run: Run) -> Generator[None, Any, Any]:
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.001)
        return (yield)


class StopsTheRun(Sound):
    case = "changes-no-weight"

    @hookimpl
    def on_epoch_end(self) -> str:
        return "stop"


class DrawsFromTorch(Sound):
    case = "draws-nothing"

    @hookimpl
    def on_run_end(self) -> None:
        torch.rand(())


class DrawsFromPython(Sound):
    case = "draws-nothing"

    @hookimpl
    def on_log(self) -> None:
        random.random()


class RoundsAnswers(Sound):
    case = "changes-no-answer"

    @hookimpl(wrapper=True)
    def gather_outputs(self) -> Generator[None, dict[str, Tensor], dict[str, Tensor]]:
        return {
            name: value.round() if value.is_floating_point() else value
            for name, value in (yield).items()
        }


class KeepsAThread(Sound):
    case = "leaves-nothing"

    @hookimpl
    def on_run_start(self) -> None:
        threading.Thread(target=time.sleep, args=(60,), name="sleeper", daemon=True).start()


class WritesHere(Sound):
    case = "leaves-nothing"

    @hookimpl
    def on_run_end(self, report: Report) -> None:
        Path("summary.txt").write_text(str(report["steps"]))


class ForgetsItsState(Sound):
    case = "continues"

    def load_state(self, state: int) -> None:
        pass


class NoJson(Sound):
    case = "continues"

    def state(self) -> Any:
        return {self.steps: float("nan")}


class NoiseOfTheRank(Sound):
    case = "two-ranks"

    @hookimpl(wrapper=True)
    def wrap_model(self, run: Run) -> Generator[None, PreparedModel, PreparedModel]:
        prepared = yield
        if run.world.size > 1:
            for parameter in run.module.parameters():
                parameter.data += 1e-3
        return prepared


class ReducesItself(Sound):
    case = "no-collective"

    @hookimpl
    def on_log(self, run: Run) -> None:
        if run.world.size > 1:
            dist.all_reduce(torch.zeros(1))


class SwallowsErrors(Sound):
    case = "hides-no-error"

    @hookimpl(wrapper=True)
    def train_step(self) -> Generator[None, Tensor, Tensor]:
        try:
            return (yield)
        except ValueError:
            return torch.zeros(())


class ImportsLate(Sound):
    @hookimpl
    def on_run_start(self) -> None:
        import tensorboard  # noqa: F401


@dataclass
class TakesAnything(Sound):
    case = "options-are-checked"

    path: Any = None
    """Anything."""
