"""Compare the peak memory of a rank under fsdp and ddp, for a model of some 100 M parameters
from a local folder.

    python benchmarks/fsdp_memory.py [--nproc 2] [--model bert-base]

The largest resident set of any rank, in MB, in processes started afresh for each figure: when the
ranks have met; when the model is built and wrapped; and after three AdamW steps.

Bounds: building and wrapping adds less than the model's own size, since no rank ever holds the
whole model; after three steps a rank has taken less than under ddp.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

STAGES = ("joined", "wrapped", "trained")


def main() -> int:
    """Print both strategies; return 0 if the bound holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--model", default="bert-base")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = in_a_process("save", folder, arguments.model)
        print(f"{arguments.model}: {size / 1e6:.0f} MB of weights, {arguments.nproc} ranks")
        print("".join(f"{title:>12}" for title in ("strategy", *STAGES)) + "   MB, largest rank")
        memory = {}
        for strategy in ("ddp", "fsdp"):
            peaks = [
                in_a_process("peak", folder, strategy, stage, str(arguments.nproc))
                for stage in STAGES
            ]
            memory[strategy] = dict(zip(STAGES, peaks, strict=True))
            print(f"{strategy:>12}" + "".join(f"{peak / 1e6:>12.0f}" for peak in peaks), flush=True)
    added = memory["fsdp"]["wrapped"] - memory["fsdp"]["joined"]
    held = added < size and memory["fsdp"]["trained"] < memory["ddp"]["trained"]
    print(
        f"fsdp adds {added / 1e6:.0f} MB to build and wrap; bound {size / 1e6:.0f}:"
        f" {'held' if held else 'BROKEN'}"
    )
    return 0 if held else 1


def in_a_process(*arguments: str) -> int:
    """Run one of the functions below in a new process, whose peak memory
    nothing else has raised.
    """
    done = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return int(done.stdout.split()[-1])


def save(folder: str, model: str) -> int:
    """Save the built-in model with random weights as a Hugging Face folder; return the
    bytes of its parameters.
    """
    from distcore import load_config
    from distcore.jobs.train import check
    from distcore.resolve.resolve import resolve

    resolved = resolve(load_config(None, {"model": model}))
    config, task, data = resolved.config, resolved.task, check(resolved)
    built: Any = task.build_model(config, data)
    built.save_pretrained(folder)
    task.save(Path(folder), config, data)
    return sum(parameter.numel() * parameter.element_size() for parameter in built.parameters())


def peak(folder: str, strategy: str, stage: str, nproc: str) -> int:
    """Return the peak memory, in bytes, of the largest of ``nproc`` ranks up to
    the end of ``stage``.
    """
    from distcore import launch, load_config
    from distcore.resolve.resolve import resolve

    resolved = resolve(
        load_config(
            None,
            {
                "strategy": strategy,
                "nproc": int(nproc),
                "model": folder,
                "max_steps": 3,
                "max_seq_len": 32,
                "device": "cpu",
                "global_batch_size": 2 * int(nproc),
                "extensions": {"progress": False},
                "log_level": "error",
                "out": f"{folder}/{strategy}",
            },
        )
    )
    return max(launch(rank, resolved.config, stage, nproc=int(nproc)))


def rank(config: object, stage: str) -> int:
    """Run one rank up to the end of ``stage``; return its peak memory in bytes."""
    from distcore import Progress, RunConfig
    from distcore.engine.build import build_run
    from distcore.engine.loop import steps
    from distcore.plugin.strategy.hooks import Hooks
    from distcore.rank_environment import join
    from distcore.resolve import strategies, tasks

    assert isinstance(config, RunConfig)
    rank_info = join(os.environ)
    assert rank_info is not None
    hooks = Hooks(config.strategy, strategies.load_strategy(config).plugin)
    task = tasks.load_task(config)
    world, data = hooks.setup(config, rank_info), task.prepare(config)
    if stage != "joined":
        run = build_run(config, hooks, world, task, data)
    if stage == "trained":
        for _ in steps(run, hooks, task, data.train, Progress()):
            pass
    hooks.teardown(world)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    if sys.argv[1:2] in (["save"], ["peak"]):
        print(save(*sys.argv[2:]) if sys.argv[1] == "save" else peak(*sys.argv[2:]))
    else:
        sys.exit(main())
