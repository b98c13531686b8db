"""Measure the memory and the traffic of a rank under each strategy, per parameter of the model.

    python benchmarks/memory_and_traffic.py [ROW …] [--nproc 2]
    [--micro-batches 1] [--model bert-mini]

A row is a strategy as ``--strategy`` takes it; ``deepspeed:3-at-once`` is stage 3 that keeps no
gathered weight until the backward pass, as it does by itself only for models above 1e9 parameters.
Each is trained for three steps of AdamW in fp32 on the CPU over gloo. The third step is measured,
on rank 0.

Memory, in bytes per parameter: all tensors alive just before the optimizer's step, by storage,
without those from before the model was built. `other` is memory of the strategy itself, such as
gradient buffers or a second copy of the weights. `between` is the memory at the start of the last
micro-batch; with two micro-batches or more, it is the memory that outlives the one before.
Activations and gathered weights are gone at both moments.

Traffic, in units of the model: every collective of the step, by the size of the whole tensor.
`sent` is the traffic of
each rank in a ring: 2 (N - 1) / N of an all-reduce, (N - 1) / N of an
all-gather or a reduce-scatter. Horovod's collectives bypass torch, and are not measured.

Bounds: `held` and `sent` equal the figures of docs/which-strategy.md within 7 %, because a shard
that ends inside a parameter may keep the whole gradient alive.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distcore import Progress, RankInfo, Run, RunConfig, StepResult, hookimpl, launch, load_config
from distcore.engine.build import build_run
from distcore.engine.loop import steps
from distcore.plugin.strategy.hooks import Hooks
from distcore.rank_environment import join
from distcore.resolve import strategies, tasks
from distcore.resolve.resolve import resolve


@dataclass(frozen=True)
class Row:
    """A strategy, and what docs/which-strategy.md says of it for N ranks
    and A micro-batches per step.
    """

    strategy: str
    held: Callable[[int], float]
    """Bytes per parameter."""
    sent: Callable[[int, int], float] | None
    """Parameters sent per step by each rank, times N / (N - 1), in units of the
    model; ``None``: not seen.
    """
    options: dict[str, object] = field(default_factory=dict)


# DeepSpeed's bucket has 5e8 elements by default, however small the model is: here it is as small as
# it can be.
SMALL_BUCKET: dict[str, object] = {"reduce_bucket_size": "auto"}
AT_ONCE: dict[str, object] = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
ROWS = {
    "single": Row("single", lambda n: 16, lambda n, a: 0),
    "dp": Row("dp", lambda n: 16, lambda n, a: 0),
    "ddp": Row("ddp", lambda n: 16, lambda n, a: 2),
    "horovod": Row("horovod", lambda n: 16, None),
    "accelerate": Row("accelerate", lambda n: 16, lambda n, a: 2),
    "fsdp:full": Row("fsdp:full", lambda n: 16 / n, lambda n, a: 2 * a + 1),
    "fsdp:grad": Row("fsdp:grad", lambda n: 16 / n, lambda n, a: 2),
    "deepspeed:0": Row("deepspeed:0", lambda n: 16, lambda n, a: 2),
    "deepspeed:1": Row("deepspeed:1", lambda n: 4 + 16 / n, lambda n, a: 3, SMALL_BUCKET),
    "deepspeed:2": Row("deepspeed:2", lambda n: 4 + 16 / n, lambda n, a: 2 * a + 1, SMALL_BUCKET),
    "deepspeed:3": Row("deepspeed:3", lambda n: 20 / n, lambda n, a: 2 * a, SMALL_BUCKET),
    "deepspeed:3-at-once": Row(
        "deepspeed:3", lambda n: 20 / n, lambda n, a: 3 * a, SMALL_BUCKET | AT_ONCE
    ),
}
TOLERANCE = 0.07
SHARES = {"allreduce": 2, "allgather": 1, "reduce_scatter": 1}
"""Traffic of each rank in a ring, in units of (N - 1) / N of the tensor."""
PARTS = ("parameters", "gradients", "optimizer", "other")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--model", default="bert-mini")
    given = parser.parse_args()
    if unknown := set(given.rows) - set(ROWS):
        parser.error(f"{', '.join(sorted(unknown))}: no such row ({', '.join(ROWS)})")
    print(f"{given.model}, {given.nproc} ranks, micro-batches per step: {given.micro_batches}\n")
    print(f"| strategy | {' | '.join(PARTS)} | held | between | collectives | sent |")
    print("|---|---|---|---|---|---|---|---|---|")
    held = True
    for name in given.rows or ROWS:
        figures = measure(ROWS[name], given.nproc, given.micro_batches, given.model)
        print(line(name, figures), flush=True)
        held &= as_expected(ROWS[name], figures, given.micro_batches)
    print(f"\nbound, {TOLERANCE:.0%} from docs/which-strategy.md: {'held' if held else 'BROKEN'}")
    return 0 if held else 1


def measure(row: Row, nproc: int, micro_batches: int, model: str) -> dict[str, Any]:
    """Train ``row`` for three steps in new ranks; return the figures of rank 0 in the third."""
    ranks = 1 if row.strategy in ("single", "dp") else nproc
    with tempfile.TemporaryDirectory() as out:
        resolved = resolve(
            load_config(
                None,
                {
                    "strategy": row.strategy,
                    "strategy_options": row.options,
                    "nproc": ranks,
                    "model": model,
                    "device": "cpu",
                    "max_steps": 3,
                    "max_seq_len": 32,
                    "micro_batch_size": 4,
                    "global_batch_size": 4 * ranks * micro_batches,
                    "data_guard_steps": 0,
                    "log_level": "error",
                    "out": f"{out}/run",
                },
            )
        )
        return launch(rank, resolved.config, nproc=ranks)[0]


def rank(config: RunConfig) -> dict[str, Any]:
    """Train as one rank; return memory and traffic of the third step."""
    # of what the garbage collector lists, some warns when its type is asked for
    warnings.simplefilter("ignore")
    watcher, task = Watcher(), tasks.load_task(config)
    hooks = Hooks(config.strategy, strategies.load_strategy(config).plugin, {"watcher": watcher})
    world, data = hooks.setup(config, join() or RankInfo()), task.prepare(config)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in task.build_model(config, data).parameters())
    watcher.before.update(storages(living()))
    run = build_run(config, hooks, world, task, data)
    loop = steps(run, hooks, task, data.train, Progress())
    next(loop)
    next(loop)
    with Collectives() as counted:
        next(loop)
    hooks.teardown(world)
    return watcher.memory | {"count": count, "ranks": world.size, "bytes": counted.size}


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Adds up, by kind of torch's collectives, the bytes of the whole tensors
    that they are about.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d.") and (
            kind := next((kind for kind in SHARES if kind in name), None)
        ):
            # Of the input and the output of an all-gather or a reduce-scatter the
            # larger is the whole.
            whole = max(
                sum(leaf.nbytes for leaf in tree_leaves(a) if isinstance(leaf, Tensor))
                for a in args
            )
            self.size[kind] += whole
        return func(*args, **(kwargs or {}))


class Watcher:
    """An extension that measures the memory of its rank; each step replaces the figures
    of the one before.
    """

    only_looks = True

    def __init__(self) -> None:
        self.before: set[int] = set()
        self.memory: dict[str, Any] = {}

    @hookimpl(wrapper=True)
    def accumulate(self) -> Generator[None, object, object]:
        """Measure the memory that has outlived the micro-batch before."""
        self.memory["between"] = self._bytes(storages(living()), self.before)
        return (yield)

    @hookimpl(wrapper=True)
    def step(self, run: Run) -> Generator[None, StepResult, StepResult]:
        """Measure memory by its holder; each storage counts once."""
        seen = set(self.before)
        for name, tensors in {
            "parameters": parameters(run.module),
            "gradients": [p.grad for p in run.module.parameters() if p.grad is not None],
            "optimizer": optimizer_state(run),
            "other": living(),
        }.items():
            mine = storages(tensors)
            self.memory[name] = self._bytes(mine, seen)
            seen |= set(mine)
        return (yield)

    @staticmethod
    def _bytes(sizes: dict[int, int], but: set[int]) -> int:
        return sum(size for address, size in sizes.items() if address not in but)


def parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters, and the shards that DeepSpeed attaches to them at stage 3."""
    whole = list(module.parameters())
    return [*whole, *(p.ds_tensor for p in whole if hasattr(p, "ds_tensor"))]


def optimizer_state(run: Run) -> list[Tensor]:
    assert run.optimizer is not None
    return [
        value
        for state in run.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def living() -> list[Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return bytes by address; for a DTensor those of this rank's shard."""
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    kept = (
        part.untyped_storage()
        for part in parts
        if part.device.type == "cpu" and part.layout == torch.strided
    )
    return {storage.data_ptr(): storage.nbytes() for storage in kept if storage.nbytes()}


def sent(figures: dict[str, Any]) -> float:
    """Return the traffic of each rank of a ring in a step, in units of the model."""
    n, whole = int(figures["ranks"]), 4 * int(figures["count"])
    total: float = sum(SHARES[kind] * size for kind, size in figures["bytes"].items())
    return total * (n - 1) / n / whole


def line(name: str, figures: dict[str, Any]) -> str:
    """Return a row of the table: bytes per parameter, then collectives in units of the model."""
    count = figures["count"]
    parts = [figures[part] for part in PARTS]
    memory = [f"{size / count:.2f}" for size in (*parts, sum(parts), figures["between"])]
    kinds = (
        ", ".join(
            f"{kind} {size / 4 / count:.2f}" for kind, size in sorted(figures["bytes"].items())
        )
        or "–"
    )
    traffic = "–" if ROWS[name].sent is None else f"{sent(figures):.2f}"
    return f"| `{name}` | {' | '.join(memory)} | {kinds} | {traffic} |"


def as_expected(row: Row, figures: dict[str, Any], micro_batches: int) -> bool:
    """Return True if memory and traffic equal the figures of the page."""
    n = figures["ranks"]
    pairs = [(sum(figures[part] for part in PARTS) / figures["count"], row.held(n))]
    if row.sent is not None:
        pairs.append((sent(figures), row.sent(n, micro_batches) * (n - 1) / n))
    return all(abs(got - wanted) <= TOLERANCE * wanted for got, wanted in pairs)


if __name__ == "__main__":
    sys.exit(main())
