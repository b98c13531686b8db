"""Count the bits in which runs under ``exact`` differ, and measure what they cost.

    python benchmarks/exact.py [--only PATTERN] [--steps 100] [--folder build/exact] [--page]

Bits: each strategy that declares it trains each of ``JOBS`` on 2, 3 and 4 ranks in fp32 and bf16,
and is compared with ``single`` on one process: elements of weights and moments after the last step
that differ in any bit, and losses, gradient norms and metrics that differ. Dropout is on, clipping
is active in each step, and 35 rows are no multiple of any number of ranks.

Cost: bert-mini with 32 rows and with 8,000 tokens a step, without ``exact`` and in 2 and 4 blocks,
each in processes of its own. CPU time is that of a step on the busiest rank, the median over steps;
bytes are those that a rank of a ring sends in a step; memory is the highest resident set of a rank
beyond that before the model was built. Horovod sends past torch, so its bytes are not measured.

Each part is a launch of ranks, such as ``ddp×3 bf16`` or ``cost ddp×2 32 rows 4``, of at most six
minutes on two cores; ``--only`` takes those that match a regular expression. Results stay in
``--folder``, and later calls add theirs. ``--page`` writes docs/exact.json and the tables in
docs/same-bits.md.

Bounds: no bit differs; CPU time in as many blocks as the most ranks, two, is at most 1.2 times that
without on one process, 1.4 times under ddp and 1.6 times under fsdp at 32 rows, and 1.1 times at
8,000 tokens. More blocks than ranks are more passes, which cost by themselves.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from distcore import launch, load_config, registry
from distcore.distributed.arithmetic import arithmetic_of
from distcore.engine.training import Training
from distcore.plugin.strategy.contract import RankInfo, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.task import Task
from distcore.rank_environment import export, join
from distcore.resolve.resolve import resolve
from distcore.resolve.strategies import load_strategy
from distcore.testing.problem import Problem
from distcore_workbench.compare.distance import other_bits

HERE = Path(__file__).parent
NUMBERS, PAGE = HERE.parent / "docs/exact.json", HERE.parent / "docs/same-bits.md"
MARKS = re.compile(r"(<!-- exact -->\n).*?(<!-- /exact -->)", re.S)
JOBS: dict[str, dict[str, Any]] = {
    "bert-tiny": {"task": "text-classification", "model": "bert-tiny"},
    "llama-tiny": {"task": "causal-lm", "model": "llama-tiny", "max_seq_len": 32},
    "convolutional": {"task": "image-classification"},
    "residual": {"lr": 0.01},
}
"""What is trained; ``residual`` is the problem of the laws, a small residual network."""
PRECISIONS = ("fp32", "bf16")
RANKS = (2, 3, 4)
BLOCKS = 4
"""Blocks of the runs whose bits are compared."""
COUNTS = (2, 4)
"""Blocks of the runs whose cost is measured."""
COMPARED = ("weights", "moments", "losses", "norms", "metrics")
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "horovod": ("horovod", {}),
    "fsdp": ("fsdp", {}),
    "fsdp:grad": ("fsdp", {"sharding": "grad"}),
    "deepspeed:1": ("deepspeed", {"stage": 1}),
    "deepspeed:2": ("deepspeed", {"stage": 2}),
}
"""Strategies and options by their names in the table; those count that keep the bits."""
COSTS: dict[str, dict[str, Any]] = {
    "32 rows": {"global_batch_size": 32},
    "8,000 tokens": {"global_batch_size": 128, "max_seq_len": 64},
}
"""Sizes of a step of which the cost is measured; rows of 64 tokens are filled by the longest."""
BOUNDS = {"single": 1.2, "ddp": 1.4, "fsdp": 1.6}
"""Largest CPU time at 32 rows, in that of the same step without ``exact``."""
BOUND_OF_MANY = 1.1
"""The same for 8,000 tokens."""
WARM = 5
"""First steps, which are not timed."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some runs in one launch of ranks."""

    setting: str
    """Name of the strategy with its options, or ``single``."""
    ranks: int
    precision: str = "fp32"
    cost: str = ""
    """Size of a step of which the cost is measured."""
    exact: int | None = BLOCKS

    @property
    def name(self) -> str:
        """The name for ``--only``, which is that of its file."""
        name = f"{self.setting}×{self.ranks}"
        if self.cost:
            return f"cost {name} {self.cost} {self.exact or 'plain'}"
        return f"{name} {self.precision}"


@dataclass(frozen=True, kw_only=True)
class Order:
    """One run of a part."""

    name: str
    values: dict[str, Any]
    steps: int
    is_timed: bool = False
    task: Task | None = None


@dataclass(kw_only=True)
class Seen:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    milliseconds: float = 0.0
    """Median CPU time of a step."""
    sent: float = 0.0
    """Bytes that a rank of a ring sends in the last step."""
    peak: int = 0
    """Bytes of the resident set beyond that before the model was built."""


def all_parts() -> Iterator[Part]:
    """Yield every part; the reference comes first."""
    able: dict[str, tuple[str, ...]] = {"single": PRECISIONS}
    for setting, (strategy, options) in SETTINGS.items():
        if strategy in registry.offers("strategies"):
            config = load_config(None, {"strategy": strategy, "strategy_options": options})
            keeps_bits = load_strategy(config).capabilities.keeps_bits
            able[setting] = tuple(each for each in PRECISIONS if keeps_bits(each))
    for setting, precisions in able.items():
        for precision in precisions:
            for ranks in (1,) if setting == "single" else RANKS:
                yield Part(setting=setting, ranks=ranks, precision=precision)
    for cost in COSTS:
        for setting in (each for each, precisions in able.items() if precisions):
            for exact in (None, *COUNTS):
                ranks = 1 if setting == "single" else 2
                yield Part(setting=setting, ranks=ranks, cost=cost, exact=exact)


def orders(part: Part, steps: int, out: Path) -> Iterator[Order]:
    """Yield the runs of a part."""
    strategy, options = SETTINGS.get(part.setting, (part.setting, {}))
    common: dict[str, Any] = {
        "strategy": strategy,
        "strategy_options": options,
        "nproc": part.ranks,
        "device": "cpu",
        "exact": part.exact,
        "checkpoints": {"best": None},
        "data_guard_steps": 0,
        "prove": "off",
        "log_level": "error",
        "extensions": {"progress": False, "metrics": False},
    }
    if part.cost:
        size = {"model": "bert-mini", "global_batch_size": 32} | COSTS[part.cost]
        values = common | size | {"max_steps": steps, "out": str(out / "cost")}
        yield Order(name=part.cost, values=values, steps=steps, is_timed=True)
        return
    for job, own in JOBS.items():
        values = (
            common
            | own
            | {
                "max_steps": steps,
                "precision": part.precision,
                "global_batch_size": 35,
                "clip": {"norm": 0.1},
                "out": str(out / job),
            }
        )
        task = None if "task" in own else Problem(rows=50, dropout=0.1)
        yield Order(name=job, values=values, steps=steps, task=task)


def train_part(todo: list[Order]) -> dict[str, Seen]:
    """Train all runs of a part as one rank; return what was seen, by the names of the runs."""
    rank_info = join(os.environ) or RankInfo()
    if rank_info.size > 1:
        export(rank_info)
    seen: dict[str, Seen] = {}
    hooks: Hooks | None = None
    for order in todo:
        config = load_config(None, order.values)
        resolved = resolve(config, rank_info.size, rank_info.launcher, task=order.task)
        if hooks is None:
            hooks = Hooks(resolved.config.strategy, resolved.strategy)
            world = hooks.setup(resolved.config, rank_info)
        with arithmetic_of(resolved.config):
            seen[order.name] = train_one(order, resolved, hooks, world, rank_info)
        gc.collect()  # some backends can hold only one model at a time
    assert hooks is not None
    hooks.teardown(world)
    return seen


def train_one(order: Order, resolved: Any, hooks: Hooks, world: World, rank_info: RankInfo) -> Seen:
    """Train one run to its end, save it, and evaluate; return what this rank saw."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    training = Training.begin(world, resolved, hooks, rank_info)
    seen = Seen()
    losses, norms, seconds = [], [], []
    loop = training.steps()
    for _ in range(order.steps - 1):
        began = time.process_time()
        step = next(loop)
        seconds.append(time.process_time() - began)
        losses.append(step.loss.double())
        norms.append(step.result.grad_norm)
    if order.is_timed:
        seen.milliseconds = statistics.median(seconds[WARM:]) * 1e3
        seen.peak = resident("VmHWM") - before
        # Beside this file: on the path of a script, and of its ranks, alone.
        from memory_and_traffic import SHARES, Collectives

        with Collectives() as counted:
            next(loop)
        whole: float = sum(SHARES[kind] * size for kind, size in counted.size.items())
        seen.sent = whole * (world.size - 1) / world.size
    else:
        next(loop)
        training.save()
        training.saver.wait()
        seen.metrics = dict(training.evaluate().metrics)
    seen.losses = torch.stack(losses).tolist()
    seen.norms = [float("nan") if norm is None else float(norm) for norm in norms]
    loop.close()  # type: ignore[attr-defined]
    training.saver.close()
    return seen


def resident(key: str) -> int:
    """Return ``VmRSS``, the resident memory of this process, or ``VmHWM``, its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measure(part: Part, steps: int, folder: Path) -> None:
    """Run a part, and write what was found into a file of its name."""
    out = folder / "runs" / part.name
    todo = list(orders(part, steps, out))
    of_ranks = launch(partial(train_part, todo), nproc=part.ranks, timeout=1200)
    results: dict[str, Any] = {"steps": steps}
    for order in todo:
        of_run = [seen[order.name] for seen in of_ranks]
        if part.cost:
            results["milliseconds"] = max(seen.milliseconds for seen in of_run)
            results["sent"] = None if part.setting == "horovod" else of_run[0].sent
            results["peak"] = max(seen.peak for seen in of_run)
            continue
        values: dict[str, list[Any]] = {"losses": of_run[0].losses, "norms": of_run[0].norms}
        values["metrics"] = [repr(item) for item in sorted(of_run[0].metrics.items())]
        results[order.name] = {"values": values, "checkpoint": str(newest(out / order.name))}
    (folder / f"{part.name}.json").write_text(json.dumps(results))


def newest(out: Path) -> Path:
    """Return the last checkpoint of a run."""
    return max((out / "checkpoints").glob("step-*"))


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return by kind how many numbers of two runs differ in any bit, and of how many."""
    counts = {kind: [0, 0] for kind in COMPARED}
    for kind, values in here["values"].items():
        pairs = zip(values, there["values"][kind], strict=True)
        counts[kind] = [sum(one != other for one, other in pairs), len(values)]
    checkpoints = Path(here["checkpoint"]), Path(there["checkpoint"])
    for kind, under in (("weights", "model/"), ("moments", "optimizer/")):
        bits = other_bits(*checkpoints, under=under)
        counts[kind] = [bits.differing, bits.elements]
    return counts


def read(folder: Path) -> dict[str, Any]:
    """Return all that was measured so far, as docs/exact.json has it."""
    bits: dict[str, Any] = {}
    costs: dict[str, Any] = {}
    for part in all_parts():
        file = folder / f"{part.name}.json"
        if not file.exists():
            continue
        results = json.loads(file.read_text())
        steps = results.pop("steps")
        if part.cost:
            row = costs.setdefault(part.cost, {}).setdefault(f"{part.setting}×{part.ranks}", {})
            row[str(part.exact or "plain")] = results
            continue
        reference = folder / f"single×1 {part.precision}.json"
        if part.setting == "single" or not reference.exists():
            continue
        alone = json.loads(reference.read_text())
        assert alone["steps"] == steps, f"{part.name}: not as many steps as single×1; run it again"
        runs = bits.setdefault(f"{part.setting}×{part.ranks}", {})
        for job, result in results.items():
            runs[f"{job} {part.precision}"] = differences(result, alone[job])
    return {"date": str(date.today()), "torch": version("torch"), "bits": bits, "costs": costs}


def tables(numbers: Mapping[str, Any]) -> str:
    """Return the tables of docs/same-bits.md."""
    lines = [
        f"| strategy × ranks | runs | {' | '.join(COMPARED)} |",
        "|---|---|" + "---|" * len(COMPARED),
    ]
    for name, runs in numbers["bits"].items():
        cells = []
        for kind in COMPARED:
            differing, count = (sum(run[kind][part] for run in runs.values()) for part in (0, 1))
            cells.append(f"{differing:,} of {count:,}")
        lines.append(f"| `{name}` | {len(runs)} | {' | '.join(cells)} |")
    heads = ("CPU ms", "MB sent", "MiB of memory")
    lines += [
        "",
        f"| a step of | strategy × ranks | {' | '.join(heads)} |",
        "|---|---|---|---|---|",
    ]
    for cost, rows in numbers["costs"].items():
        for name, row in rows.items():
            if row.keys() >= {"plain", *map(str, COUNTS)}:
                lines.append(f"| {cost} | `{name}` | {' | '.join(cost_cells(row))} |")
    return "\n".join([*lines, ""])


def cost_cells(row: Mapping[str, Any]) -> list[str]:
    """Return for CPU time, bytes and memory: without ``exact``, and with it by blocks."""
    cells = []
    for key, unit in (("milliseconds", 1.0), ("sent", 1e6), ("peak", 2.0**20)):
        plain = row["plain"][key]
        if plain is None:
            cells.append("not measured")
            continue
        numbers = [f"{plain / unit:,.0f}"]
        for blocks in map(str, COUNTS):
            exact = row[blocks][key]
            ratio = f" (× {exact / plain:.2f})" if plain else ""
            numbers.append(f"{exact / unit:,.0f}{ratio}")
        cells.append(" → ".join(numbers) if plain else "0")
    return cells


def broken(numbers: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each bound that does not hold."""
    for name, runs in numbers["bits"].items():
        for run, kinds in runs.items():
            for kind, (differing, count) in kinds.items():
                if differing:
                    yield f"{name}, {run}: {differing} of {count} {kind} have other bits"
    for cost, rows in numbers["costs"].items():
        for name, row in rows.items():
            few = BOUNDS.get(name.partition("×")[0])
            bound = BOUND_OF_MANY if cost == "8,000 tokens" else few
            if row.keys() >= {"plain", "2"} and bound is not None:
                ratio = row["2"]["milliseconds"] / row["plain"]["milliseconds"]
                if ratio > bound:
                    yield f"{name}, {cost}: {ratio:.2f} times the CPU time, more than {bound}"


def main() -> int:
    """Measure, and print the tables; return 1 if a bound is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a regular expression for names of parts")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build/exact")
    parser.add_argument("--page", action="store_true", help="write docs/exact.json and the tables")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for part in all_parts():
        if re.search(arguments.only, part.name):
            print(part.name, file=sys.stderr, flush=True)
            measure(part, arguments.steps, folder)
    numbers = read(folder)
    filled = tables(numbers)
    print(filled)
    lines = list(broken(numbers))
    print("\n".join(lines) or "all bounds hold")
    if arguments.page:
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
        page = PAGE.read_text()
        PAGE.write_text(MARKS.sub(lambda marks: f"{marks[1]}{filled}{marks[2]}", page))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
