"""Compare memory and time of starting a large Llama: whole in one process, and split over ranks.

    python benchmarks/from_scratch.py [--files] [--nproc 4] [--layers 24]
    [--hidden 2048] [--layouts fsdp,shard,...]

The largest resident set of a process, in MiB, and the processor seconds of the slowest until the
model has its weights, imports left out of the time only. ``fsdp`` is that strategy, ``deepspeed``
that at stage 3 without an optimizer, the others are layouts of ``mesh``; ``tp-shard`` is ``tp=2``
with ``shard``. With the defaults the model has 1.35 B parameters in fp32. Its weights are random
or, with ``--files``, read from a folder in bf16.

Bounds: a rank takes at most 0.4 of the memory that the whole model takes, on four ranks or more,
and no more time. With ``--files`` it is 0.35, and time is not bounded, because it depends on the
disk.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

MOST, MOST_OF_FILES, MOST_TIME = 0.4, 0.35, 1.0


def main() -> int:
    """Print a line for each layout; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layouts", default="fsdp,shard,tp,tp-shard,pp,deepspeed")
    parser.add_argument("--files", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = [str(arguments.layers), str(arguments.hidden)]
        if arguments.files:
            in_a_process("1", "save", *size, folder)
            size.append(folder)
        held, most = True, MOST_OF_FILES if arguments.files else MOST
        whole, seconds = in_a_process("1", "whole", *size)
        print(f"{'whole':>10}{whole / 2**20:>10.0f} MiB{seconds:>8.1f} s", flush=True)
        for layout in arguments.layouts.split(","):
            peak, took = in_a_process(str(arguments.nproc), layout, *size)
            memory, longer = peak / whole, took / seconds
            held = (
                held
                and (memory <= most or arguments.nproc < 4)
                and (arguments.files or longer <= MOST_TIME)
            )
            print(
                f"{layout:>10}{peak / 2**20:>10.0f} MiB{took:>8.1f} s: {memory:.2f} of memory,"
                f" {longer:.2f} of time"
            )
    print(f"bounds {most} and {MOST_TIME}: {'held' if held else 'BROKEN'}")
    return 0 if held else 1


def in_a_process(*arguments: str) -> tuple[int, float]:
    """Return bytes and seconds of the largest rank, in processes whose peak memory
    nothing else has raised.
    """
    done = subprocess.run(
        [sys.executable, __file__, "start", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    peak, seconds = done.stdout.split()[-2:]
    return int(peak), float(seconds)


def start(nproc: str, layout: str, layers: str, hidden: str, folder: str = "") -> tuple[int, float]:
    """Start the model on ``nproc`` ranks; return the most bytes and the most
    processor seconds of one.
    """
    from distcore import launch

    ranks = launch(rank, int(nproc), layout, int(layers), int(hidden), folder, nproc=int(nproc))
    return max(peak for peak, _ in ranks), max(seconds for _, seconds in ranks)


def rank(nproc: int, layout: str, layers: int, hidden: int, folder: str) -> tuple[int, float]:
    """Start the model as one rank; return its peak memory in bytes, and its processor seconds.

    The weights are in ``folder``, if given; the layout ``save`` saves them there.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM  # before the clock starts

    from distcore import Datasets, RankInfo, Run, RunConfig, defaults
    from distcore.model.model_source import base_source
    from distcore.rank_environment import join
    from distcore.testing.problem import Problem
    from distcore_tasks.shared.pretrained import load_model

    @dataclass(frozen=True, kw_only=True)
    class Large(Problem):
        def build_model(self, config: RunConfig, data: Datasets) -> torch.nn.Module:
            if folder and layout != "save":
                return load_model("AutoModelForCausalLM", "large", Path(folder), None)
            return LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=hidden,
                    num_hidden_layers=layers,
                    num_attention_heads=hidden // 64,
                    vocab_size=32000,
                    intermediate_size=-(-8 * hidden // (3 * 64)) * 64,
                    bos_token_id=1,
                    eos_token_id=2,
                )
            )

        def weights_folder(self, config: RunConfig) -> Path | None:
            return Path(folder) if folder else None

    config, task = (
        RunConfig(device="cpu", nproc=nproc, global_batch_size=nproc, micro_batch_size=1),
        Large(),
    )
    source = base_source(config, task, task.prepare(config))
    if layout in ("whole", "save"):
        began = time.process_time()
        model: Any = source.build()
        if layout == "save":
            model.bfloat16().save_pretrained(folder, max_shard_size="1GB")
    else:
        strategy = strategy_of(layout, nproc)
        world = strategy.setup(config, join(os.environ) or RankInfo())
        began = time.process_time()
        built = strategy.build_model(config, world, source)
        run = Run(
            config=config,
            world=world,
            capabilities=strategy.capabilities,
            module=built.model,
            model=built.model,
            strategy_state=built.state,
        )
        model = strategy.wrap_model(run, built.model, None).model
        del built, run
    took = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    del model
    if layout not in ("whole", "save"):
        getattr(strategy, "teardown", defaults.teardown)(world)
    return peak, took


def strategy_of(layout: str, nproc: int) -> Any:
    """Return the strategy that a layout is measured with; only that is imported."""
    if layout == "fsdp":
        from distcore_fsdp.strategy import FSDPStrategy

        return FSDPStrategy()
    if layout == "deepspeed":
        from distcore_deepspeed.strategy import DeepSpeedStrategy

        return DeepSpeedStrategy(stage=3)
    from distcore_mesh.strategy import MeshStrategy

    sizes: dict[str, Any] = (
        {"tp": 2, "shard": nproc // 2} if layout == "tp-shard" else {layout: nproc}
    )
    return MeshStrategy(**sizes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        print(*start(*sys.argv[2:]))
    else:
        sys.exit(main())
