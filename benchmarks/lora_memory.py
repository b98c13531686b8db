"""Compare the memory of a rank, and the size of a checkpoint, with and without LoRA,
for a local model.

    python benchmarks/lora_memory.py [ROW …] [--nproc 2] [--model bert-base] [--lora 8]

A row is a strategy as ``--strategy`` takes it. Each is trained for three steps of AdamW in fp32 on
the CPU over gloo, with 4 rows of up to 32 tokens per rank and step; the figures are the largest of
its ranks, in MiB. Parameters, gradients and optimizer state are measured just before the
optimizer's third step. `other` is other memory of the strategy then, such as gradient buffers.
`peak` is the highest resident memory of the rank up to the end of the third step, beyond that
before the model was built. `checkpoint` is the size of all files of the checkpoint after that step.

Bounds: with LoRA the optimizer's state is 8 bytes per trained parameter, divided by the ranks if a
strategy shards it, within 10 %; the checkpoint is 12 bytes per trained parameter, within 1 MiB; and
no figure of a row is larger than without LoRA by 0.1 MiB, except for the parameters, because the
adapter adds some.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fsdp_memory import save
from memory_and_traffic import Watcher, living, storages

from distcore import Progress, RankInfo, RunConfig, launch, load_config
from distcore.checkpoint import save as save_checkpoint
from distcore.engine.build import build_run
from distcore.engine.loop import steps
from distcore.plugin.strategy.hooks import Hooks
from distcore.rank_environment import join
from distcore.resolve import strategies, tasks
from distcore.resolve.resolve import resolve

ROWS = ("single", "ddp", "fsdp", "deepspeed:2", "deepspeed:3")
SHARDED = ("fsdp", "deepspeed")
FIGURES = ("parameters", "gradients", "optimizer", "other", "peak", "checkpoint")
MIB = 2**20
SMALL = MIB / 10
"""What figures without LoRA may be smaller by: the adapter's own scalars."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--lora", type=int, default=8, metavar="RANK")
    given = parser.parse_args()
    held = True
    with tempfile.TemporaryDirectory() as folder:
        size = save(folder, given.model)
        print(
            f"{given.model}, {size / MIB:.0f} MiB, {given.nproc} ranks, LoRA of rank {given.lora};"
            " MiB\n"
        )
        print(f"| strategy | {' | '.join(('LoRA', *FIGURES))} |\n|---|---|{'---|' * len(FIGURES)}")
        for row in given.rows or ROWS:
            whole, adapter = (
                measure(row, folder, given.nproc, rank) for rank in (None, given.lora)
            )
            for name, most in (("no", whole), ("yes", adapter)):
                print(
                    f"| `{row}` | {name} |"
                    f" {' | '.join(f'{most[key] / MIB:.1f}' for key in FIGURES)} |",
                    flush=True,
                )
            held &= is_bounded(row, whole, adapter, given.nproc)
    print(f"\nbounds: {'held' if held else 'BROKEN'}")
    return 0 if held else 1


def is_bounded(row: str, whole: dict[str, int], adapter: dict[str, int], nproc: int) -> bool:
    """Return True if LoRA takes the memory of its parameters, and less than the whole model;
    print what does not.
    """
    expected = 8 * adapter["trained"] / (nproc if row.startswith(SHARDED) else 1)
    larger = [
        name for name in FIGURES if name != "parameters" and adapter[name] > whole[name] + SMALL
    ]
    broken = [
        f"{name} is larger by {(adapter[name] - whole[name]) / MIB:.2f} MiB" for name in larger
    ]
    if abs(adapter["optimizer"] - expected) > 0.1 * expected:
        broken.append(f"optimizer: {adapter['optimizer'] / MIB:.1f} MiB for {expected / MIB:.1f}")
    if abs(adapter["checkpoint"] - 12 * adapter["trained"]) > MIB:
        broken.append(
            f"checkpoint: {adapter['checkpoint'] / MIB:.1f} MiB for"
            f" {12 * adapter['trained'] / MIB:.1f}"
        )
    if broken:
        print(f"{row}: {'; '.join(broken)}")
    return not broken


def measure(row: str, folder: str, nproc: int, lora: int | None) -> dict[str, int]:
    """Train three steps in new ranks; return the largest figures of any rank."""
    ranks = 1 if row == "single" else nproc
    with tempfile.TemporaryDirectory() as out:
        resolved = resolve(
            load_config(
                None,
                {
                    "strategy": row,
                    "nproc": ranks,
                    "model": folder,
                    "device": "cpu",
                    "max_steps": 3,
                    "max_seq_len": 32,
                    "micro_batch_size": 4,
                    "global_batch_size": 4 * ranks,
                    "lora.rank": lora,
                    "log_level": "error",
                    "extensions": {"progress": False},
                    "out": f"{out}/run",
                },
            )
        )
        by_rank = launch(rank, resolved.config, nproc=ranks)
    return {name: max(one[name] for one in by_rank) for name in by_rank[0]}


def rank(config: RunConfig) -> dict[str, Any]:
    """Train as one rank, and save; return memory and sizes."""
    # of what the garbage collector lists, some warns when its type is asked for
    warnings.simplefilter("ignore")
    watcher, task = Watcher(), tasks.load_task(config)
    hooks = Hooks(config.strategy, strategies.load_strategy(config).plugin, {"watcher": watcher})
    world, data = hooks.setup(config, join() or RankInfo()), task.prepare(config)
    watcher.before.update(storages(living()))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    run = build_run(config, hooks, world, task, data)
    *_, last = steps(run, hooks, task, data.train, Progress())
    peak = resident("VmHWM") - before
    trained = sum(
        getattr(p, "ds_numel", p.numel()) for p in run.module.parameters() if p.requires_grad
    )
    path = save_checkpoint(run, hooks, last.progress, Path(str(config.out)), {})
    size = sum(file.stat().st_size for file in path.iterdir())
    hooks.teardown(world)
    return watcher.memory | {"peak": peak, "trained": trained, "checkpoint": size}


def resident(key: str) -> int:
    """``VmRSS``, the resident memory of this process, or ``VmHWM``, its peak; in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    sys.exit(main())
