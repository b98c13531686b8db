"""The runs of test_simulated_device.py, in one program on the
simulated device: writes results.json.

With the word ``hang``: a run that fails while its data hang.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from evaluated import evaluate_checkpoint

from distcore import (
    OptimizerFactory,
    PreparedModel,
    Progress,
    RankInfo,
    Run,
    RunConfig,
    hookimpl,
    train,
)
from distcore.engine import prefetch as ahead
from distcore.engine.build import build_run
from distcore.engine.loop import steps
from distcore.errors import DistcoreError, TaskError
from distcore.jobs.evaluate import config_for
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.task import Datasets
from distcore.resolve import strategies
from distcore.resolve.resolve import resolve
from distcore.strategies.single import SingleStrategy
from distcore.testing.problem import Problem, RandomRows

SHARED: dict[str, Any] = {
    "global_batch_size": 8,
    "micro_batch_size": 4,
    "lr": 0.01,
    "max_steps": 4,
    "save_every": 2,
    "log_level": "error",
    "schedule": {"name": "constant"},
    "extensions": {"progress": False, "stopwatch": True, "observe": True},
}
sim: Any = torch.get_device_module("sim")


def run(name: str, task: Any = None, **changes: Any) -> dict[str, Any]:
    """Train, and return figures from the report and the device."""
    report: Any = train(RunConfig(out=name, **SHARED | changes), task or Problem())
    told = {key: report[key] for key in ("device", "precision", "peak_memory_bytes", "steps")}
    seconds = json.loads(Path(name, "steps.json").read_text())["seconds"]
    lines = map(json.loads, Path(name, "metrics.jsonl").read_text().splitlines())
    logged = next(line for line in lines if "train/loss" in line)
    phases = [logged[f"train/{phase}_seconds"] for phase in ("forward", "backward", "step")]
    return told | {"loss": report["evaluation"]["loss"], "seconds": seconds, "phases": phases}


def build(task: Any, **changes: Any) -> tuple[Run, Hooks, Datasets]:
    """Return a run that is ready to train step by step."""
    given = SHARED | {"out": "unused", "data_guard_steps": 0, "max_steps": 20} | changes
    config = resolve(RunConfig(**given), 1, task=task).config
    hooks = Hooks("single", strategies.load_strategy(config).plugin)
    data = task.prepare(config)
    return build_run(config, hooks, hooks.setup(config, RankInfo()), task, data), hooks, data


def count_device_calls(precision: str, workers: int) -> list[dict[str, int]]:
    """Return the device's call counts in each of a few steps, none of them the first or
    last of an epoch.
    """
    task = Problem()
    ready, hooks, data = build(task, precision=precision, loader={"workers": workers})
    training: Any = steps(ready, hooks, task, data.train, Progress())
    counts = []
    for _ in range(2):
        next(training)
    for _ in range(3):
        before = sim.counts()
        next(training)
        counts.append({name: value - before.get(name, 0) for name, value in sim.counts().items()})
    training.close()
    return counts


def scaled() -> dict[str, Any]:
    """Take a step whose gradients overflow under the loss scale."""
    task = Problem()
    ready, hooks, data = build(task, precision="fp16")
    assert ready.scaler is not None
    ready.scaler.load_state_dict(ready.scaler.state_dict() | {"scale": 2.0**127})
    before = [parameter.detach().cpu().clone() for parameter in ready.module.parameters()]
    next(steps(ready, hooks, task, data.train, Progress()))
    after = [parameter.detach().cpu() for parameter in ready.module.parameters()]
    stepped = any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    return {"before": 2.0**127, "after": ready.scaler.get_scale(), "stepped": stepped}


def count_parameters(device: str) -> int:
    """Count a wrapped model's parameters, tied ones once."""
    ready, _, _ = build(Problem(tied=True), device=device)
    return len(list(ready.module.parameters()))


class Watched(RandomRows):
    """Rows that record their reads: the order, and simultaneous ones."""

    read: list[list[int]] = []
    busy: list[str] = []
    overlaps: list[str] = []
    unreadable = -1
    pause = 0.0

    def batch(self, indices: Any) -> Any:
        """Collate, after a pause."""
        self.overlaps.extend(self.busy)
        self.busy.append(threading.current_thread().name)
        time.sleep(self.pause)
        self.busy.pop()
        self.read.append(indices.tolist())
        if self.unreadable in indices:
            raise TaskError(f"row {self.unreadable} cannot be read")
        return super().batch(indices)


class Watches(Problem):
    """The problem with such rows."""

    def prepare(self, config: RunConfig) -> Datasets:
        """Return them for training and for evaluation."""
        rows = Watched(11, seed=1)
        return Datasets(train=Watched(50), evaluation=rows, test=rows)


def order(device: str) -> list[list[int]]:
    """Return the rows of each micro-batch that a run reads, in order."""
    Watched.read.clear()
    run(f"order-{device}", Watches(), device=device, max_steps=9)
    return list(Watched.read)


def steps_until_error(device: str) -> tuple[int, str]:
    """Train with an unreadable row 17; return the number of steps and the error."""
    done = 0
    ready, hooks, data = build(Watches(), device=device)
    try:
        for _ in steps(ready, hooks, Watches(), data.train, Progress()):
            done += 1
    except TaskError as error:
        return done, f"{type(error).__name__}: {error}"
    return done, ""


class MixedLoss(Problem):
    """A loss with a tensor on the CPU."""

    def loss(self, model: Any, batch: Any) -> Any:
        """Weigh rows."""
        return super().loss(model, batch) * torch.ones(1)


class MixedOutputs(Problem):
    """Outputs with a tensor on the CPU."""

    def outputs(self, model: Any, batch: Any) -> Any:
        """Shift labels."""
        outputs = super().outputs(model, batch)
        return outputs | {
            "label": outputs["label"] + torch.zeros(len(outputs["label"]), dtype=torch.long)
        }


class LeavesOne(SingleStrategy):
    """Moves all but one parameter."""

    @hookimpl
    def wrap_model(
        self, run: Run, model: Any, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Leave the bias of the head."""
        model = model.to(run.world.device)
        model.head.bias = torch.nn.Parameter(model.head.bias.detach().cpu())
        return PreparedModel(
            model=model, optimizer=make_optimizer(model) if make_optimizer else None
        )


def line_of(name: str, task: Any, strategy: Any = None) -> str:
    """Return the last line of a run."""
    replaced = patch.object(strategies, "build", lambda *_: strategy) if strategy else nullcontext()
    try:
        with replaced:
            run(name, task)
    except DistcoreError as error:
        return str(error)
    return "no error"


def everything() -> dict[str, Any]:
    """Run it all."""
    results: dict[str, Any] = {
        "automatic": run("automatic"),
        "cpu": run("cpu", device="cpu"),
        **{name: run(name, precision=name) for name in ("bf16", "fp16")},
        **{
            f"{name}_cpu": run(f"{name}_cpu", precision=name, device="cpu")
            for name in ("bf16", "fp16")
        },
    }
    half = "checkpoints/step-00000002"
    results["there"] = run("there", resume=f"automatic/{half}")
    results["to_cpu"] = run("to_cpu", resume=f"automatic/{half}", device="cpu")
    results["from_cpu"] = run("from_cpu", resume=f"cpu/{half}")
    last, results["evaluated"] = Path("automatic/checkpoints/step-00000004"), {}
    for device in ("sim", "cpu"):
        report = evaluate_checkpoint(config_for(last, 1, {"device": device}), last, Problem())
        results["evaluated"][device] = report["evaluation"]["loss"]
    cases = [("fp32", 0), ("fp32", 2), ("bf16", 0), ("bf16", 2), ("fp16", 0)]
    results["counts"] = {
        f"{precision}-{count}": count_device_calls(precision, count) for precision, count in cases
    }
    results["scale"] = scaled()
    dropped = Problem(dropout=0.2)
    for masks in ("row", "rank"):
        runs = [
            run(f"{masks}-{kind}", dropped, device=kind, dropout_masks=masks)
            for kind in ("sim", "cpu")
        ]
        results[f"dropout by {masks}"] = [one["loss"] for one in runs]
    results["tied"] = [
        run(f"tied-{device}", Problem(tied=True), device=device)["loss"]
        for device in ("sim", "cpu")
    ]
    results["tied_parameters"] = [count_parameters(device) for device in ("sim", "cpu")]
    results["rows"] = {device: order(device) for device in ("sim", "cpu")}
    Watched.pause = 0.02
    run("overlaps", Watches(), eval_every=1)
    results["overlaps"], Watched.pause, Watched.unreadable = Watched.overlaps, 0.0, 17
    (done, error), (done_cpu, error_cpu) = steps_until_error("sim"), steps_until_error("cpu")
    left = [thread.name for thread in threading.enumerate() if thread.name == "distcore-prefetch"]
    results["failed"] = {
        "steps": done,
        "error": error,
        "steps_cpu": done_cpu,
        "error_cpu": error_cpu,
        "threads": left,
    }
    results["mixed"] = {
        "task": line_of("mixed-loss", MixedLoss()),
        "evaluation": line_of("mixed-outputs", MixedOutputs()),
        "strategy": line_of("mixed-strategy", Problem(), LeavesOne()),
    }
    return results


def hang() -> None:
    """Exit with 7 from a run in which the thread sleeps for ever."""
    ahead.PATIENCE = 0.5
    ready, hooks, data = build(Watches())
    for _ in steps(ready, hooks, Watches(), data.train, Progress()):
        Watched.pause = 3600.0
        ready.model.register_forward_pre_hook(lambda *_: sys.exit(7))


if __name__ == "__main__":
    if sys.argv[1:] == ["hang"]:
        hang()
    Path("results.json").write_text(json.dumps(everything()))
