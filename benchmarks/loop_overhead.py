"""Measure the CPU time per step that distcore's loop adds to a raw PyTorch loop, and
compare with other trainers.

    python benchmarks/loop_overhead.py [--steps 300] [--rounds 25]

Linear(64, 64), batch 32, AdamW, one thread, one process: a step so small that the loop is what is
measured. All contenders read the same batches, in the same order, from the same dataset object;
they alternate within a round. The figure is CPU time per step in a contender's best round, less
raw's: what else the machine does only adds. The weights after each run are compared with the raw
loop's. Lightning and Accelerate are measured where they are installed (pip install lightning
accelerate).

Bounds: what distcore adds to the raw loop is at most 0.75 of what Fabric adds, 0.25 of what
Accelerate adds, 0.06 of what the HF Trainer adds; its weights equal the raw loop's bit for bit.
Extensions that are on by default are off; "figures" adds one of them, `observe`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore import Datasets, RunConfig
from distcore.engine.build import build_run
from distcore.engine.loop import steps as loop_steps
from distcore.engine.trainer import load_extensions
from distcore.plugin.batching.sampling import BatchPlan
from distcore.plugin.strategy.contract import Progress, RankInfo
from distcore.plugin.strategy.hooks import Hooks
from distcore.resolve import strategies
from distcore.resolve.resolve import resolve

BATCH, WIDTH = 32, 64
BOUNDS = {"fabric": 0.75, "accelerate": 0.25, "hf_trainer": 0.06}
"""Most that distcore may add to the raw loop, as a part of what another adds:
microseconds differ between machines.
"""
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


class Data:
    """Random inputs and targets, as a distcore dataset."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(rows, WIDTH, generator=generator)
        self.targets = torch.randn(rows, WIDTH, generator=generator)
        self.lengths = np.ones(rows, dtype=np.int64)
        self.items = np.ones(rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``."""
        rows = torch.from_numpy(indices)
        return {"inputs": self.inputs[rows], "targets": self.targets[rows]}


def order_of(steps: int) -> BatchPlan:
    """Return distcore's plan of the rows of each step, which all contenders follow."""
    lengths = np.ones(steps * BATCH, dtype=np.int64)
    return BatchPlan(lengths=lengths, global_batch=BATCH, micro_batch=BATCH, seed=0)


class Batches:
    """Batches that are the same for every contender, as an iterable with a length."""

    def __init__(self, data: Data, plan: BatchPlan) -> None:
        self.data, self.plan = data, plan

    def __len__(self) -> int:
        return self.plan.steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(self.plan.steps):
            yield self.data.batch(self.plan.rows(0, step))


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model and optimizer, always the same."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    groups = [
        {"params": [model.weight], "weight_decay": 0.01},
        {"params": [model.bias], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-3, fused=True)


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a batch divided by its rows."""
    return F.mse_loss(model(batch["inputs"]), batch["targets"], reduction="sum") * (1.0 / BATCH)


def raw(
    data: Data, plan: BatchPlan, timed: Callable[[], AbstractContextManager[None]]
) -> nn.Module:
    """Train with a plain PyTorch loop."""
    model, optimizer = fresh()
    with timed():
        for batch in Batches(data, plan):
            loss = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


class Job:
    """The same job as a distcore task."""

    def prepare(self, config: RunConfig) -> Datasets:
        """Not used."""
        raise NotImplementedError("the benchmark hands its data to the loop")

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Build the model."""
        return nn.Linear(WIDTH, WIDTH)

    def weights_folder(self, config: RunConfig) -> None:
        """Return ``None``: the model has random weights."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of a batch."""
        return F.mse_loss(model(batch["inputs"]), batch["targets"], reduction="sum")


def ours(
    data: Data,
    plan: BatchPlan,
    timed: Callable[[], AbstractContextManager[None]],
    figures: bool = False,
) -> nn.Module:
    """Train with distcore's loop, and with the extension that measures a
    run's figures if ``figures``.
    """
    config = RunConfig(
        lr=1e-3,
        out=tempfile.mkdtemp(),
        schedule={"name": "constant"},
        clip={"norm": None},
        extensions={
            "progress": False,
            "metrics": False,
            "batch_norm": False,
            "watchdog": False,
            "observe": figures,
        },
        data_guard_steps=0,
        device="cpu",
    )
    config = resolve(config, 1).config
    hooks = Hooks("single", strategies.load_strategy(config).plugin, load_extensions(config))
    job: Any = Job()  # a task, as far as the loop asks
    world = hooks.setup(config, RankInfo())
    run = build_run(config, hooks, world, job, Datasets(train=data, evaluation=data, test=data))
    hooks.on_run_start(run, Progress(), job, Datasets(train=data, evaluation=data, test=data))
    with timed():
        for _ in loop_steps(run, hooks, job, data, Progress()):
            pass
    return run.module


def fabric(
    data: Data, plan: BatchPlan, timed: Callable[[], AbstractContextManager[None]]
) -> nn.Module:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(*fresh())
    batches = Batches(data, plan)
    with timed():
        for batch in batches:
            loss = mean_loss(model, fabric.to_device(batch))
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    trained: nn.Module = model.module
    return trained


def accelerate(
    data: Data, plan: BatchPlan, timed: Callable[[], AbstractContextManager[None]]
) -> nn.Module:
    """Train with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*fresh())
    with timed():
        for batch in Batches(data, plan):
            with accelerator.accumulate(model):
                loss = mean_loss(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    trained: nn.Module = accelerator.unwrap_model(model)
    return trained


class WithLoss(nn.Module):
    """A model that returns its loss, as the Hugging Face Trainer expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the loss under the name that the Trainer expects."""
        return {"loss": mean_loss(self.model, {"inputs": inputs, "targets": targets})}


def hf_trainer(
    data: Data, plan: BatchPlan, timed: Callable[[], AbstractContextManager[None]]
) -> nn.Module:
    """Train with the Hugging Face Trainer."""
    from transformers import Trainer, TrainingArguments

    model, optimizer = fresh()
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=plan.steps,
        per_device_train_batch_size=BATCH,
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )

    class Ordered(Trainer):
        def get_train_dataloader(self) -> Any:
            return Batches(data, plan)

    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Ordered(
        WithLoss(model), arguments, optimizers=(optimizer, constant), train_dataset=[0]
    )
    with timed(), contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return model


Contender = Callable[[Data, BatchPlan, Callable[[], AbstractContextManager[None]]], nn.Module]
CONTENDERS: dict[str, Contender] = {
    "raw": raw, "distcore": ours, "figures": functools.partial(ours, figures=True),
    "fabric": fabric, "accelerate": accelerate, "hf_trainer": hf_trainer,
}  # fmt: skip
NEEDS = {"fabric": "lightning", "accelerate": "accelerate", "hf_trainer": "accelerate"}


def measure(name: str, data: Data, plan: BatchPlan) -> tuple[float, nn.Module]:
    """Return the CPU µs per step of one run, and the trained model."""
    spent: list[float] = []

    @contextlib.contextmanager
    def timed() -> Iterator[None]:
        start = time.process_time()
        yield
        spent.append(time.process_time() - start)

    model = CONTENDERS[name](data, plan, timed)
    return spent[0] / plan.steps * 1e6, model


def main() -> int:
    """Run all contenders; return 0 if the bound holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data, plan = Data(arguments.steps * BATCH), order_of(arguments.steps)
    names = [
        name for name in CONTENDERS if name not in NEEDS or importlib.util.find_spec(NEEDS[name])
    ]
    for name in names:  # a short run first, for imports and caches
        measure(name, Data(20 * BATCH), order_of(20))
    costs: dict[str, list[float]] = {name: [] for name in names}
    equal = dict.fromkeys(names, True)
    for number in range(arguments.rounds):
        results = {
            name: measure(name, data, plan) for name in (names if number % 2 == 0 else names[::-1])
        }
        for name, (cost, model) in results.items():
            costs[name].append(cost)
            equal[name] &= weights_equal(model, results["raw"][1])
    best = {name: min(spent) for name, spent in costs.items()}
    print(
        f"raw loop: {best['raw']:.0f} µs of CPU per step (best of {arguments.rounds} rounds of"
        f" {plan.steps} steps)\n"
    )
    print(f"{'loop':<12} {'µs/step above raw':>20} {'medians':>10}   weights equal raw's")
    middle = statistics.median(costs["raw"])
    for name in names[1:]:
        difference = statistics.median(costs[name]) - middle
        print(f"{name:<12} {best[name] - best['raw']:>20.1f} {difference:>10.1f}   {equal[name]}")
    held = equal["distcore"] and equal["figures"]
    print()
    for name in (name for name in names if name in BOUNDS):
        ratio = (best["distcore"] - best["raw"]) / (best[name] - best["raw"])
        held &= ratio <= BOUNDS[name]
        print(f"{ratio:.3f} of what {name} adds; bound: {BOUNDS[name]}")
    print(f"bounds, and weights bit-equal: {'held' if held else 'BROKEN'}")
    return 0 if held else 1


def weights_equal(model: nn.Module, reference: nn.Module) -> bool:
    """Return True if all parameters are equal bit for bit."""
    ours, theirs = list(model.parameters()), list(reference.parameters())
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    sys.exit(main())
