"""Compare what saves memory on one process: bytes for a parameter, seconds for a step,
distance of the loss.

    python benchmarks/memory_choices.py [ROW …] [--scale small] [--layers N] [--steps 8]
                                        [--shape 4x64] [--lora 8] [--data-limit 1.6]

A Llama is trained on random tokens, with weights from files in bf16; --shape is rows x tokens of a
step. Bytes are those of the highest resident memory of the process up to the last step, beyond that
before the model was built, over the number of parameters; activations are in them. Seconds are the
median step's. The distance is the largest of all steps, relative to the loss of AdamW in fp32, or
with an adapter to that of a base in fp32.

With --data-limit the process may have so many GiB of data (``RLIMIT_DATA``), libraries and all, and
gives back freed blocks of 1 MiB. TinyLlama's 1.1 B:

    python benchmarks/memory_choices.py nf4-recomputed --scale 1b --shape 1x64 --lora 2
    --steps 3 --data-limit 1.6

Bounds: a base in the dtype of its files and recomputation have a distance of 0, adamw8bit 2e-5; NF4
takes less memory than a base of its files, and that less than one in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import planned_memory
import torch
from lora_memory import resident
from safetensors.torch import save_file

from distcore import Progress, RankInfo, launch, load_config
from distcore.engine.build import build_run
from distcore.engine.loop import steps
from distcore.model import return_large_blocks
from distcore.plugin.strategy.hooks import Hooks
from distcore.rank_environment import join
from distcore.resolve import strategies, tasks
from distcore.resolve.resolve import resolve

ROWS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "recomputation": {"gradient_checkpointing": True},
    "adamw8bit": {"optimizer.name": "adamw8bit"},
    "bf16": {"precision": "bf16"},
    "adapter": {"lora.base": "fp32"},
    "file": {"lora.base": "file"},
    "nf4": {"lora.base": "nf4"},
    "nf4-recomputed": {"lora.base": "nf4", "gradient_checkpointing": True},
}
"""Changes of the config by row; each is compared with the last of ``REFERENCES`` before it."""
REFERENCES = ("adamw", "adapter")
BOUNDS = {"recomputation": 0.0, "adamw8bit": 2e-5, "file": 0.0}
GIB = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--scale", default="small", choices=planned_memory.SIZES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shape", default="4x64")
    parser.add_argument("--lora", type=int, default=8, metavar="RANK")
    parser.add_argument("--data-limit", type=float, metavar="GIB")
    given = parser.parse_args()
    limit = given.data_limit and int(given.data_limit * GIB)
    print(
        "| choice | bytes for a parameter | seconds for a step | distance of the loss"
        " |\n|---|---|---|---|"
    )
    reference, sizes, held = list[float](), dict[str, float](), True
    with tempfile.TemporaryDirectory() as folder:
        # this process stays small
        count, *_ = launch(save, Path(folder), given.scale, given.layers, nproc=1)
        for name in given.rows or ROWS:
            changes = planned_memory.settings(
                "llama", "single", given.shape, scale=given.scale, folder=folder
            )
            changes |= ROWS[name] | {"max_steps": given.steps}
            changes |= {"lora.rank": given.lora} if "lora.base" in ROWS[name] else {}
            (peak, seconds, losses), *_ = launch(rank, changes, limit, nproc=1)
            reference = losses if name in REFERENCES else reference
            apart = max(
                abs(one / other - 1) for one, other in zip(losses, reference or losses, strict=True)
            )
            sizes[name] = peak / count
            said = "" if name in REFERENCES or not reference else f"{apart:.1e}"
            print(f"| {name} | {sizes[name]:.2f} | {seconds:.2f} | {said} |", flush=True)
            held &= apart <= BOUNDS.get(name, float("inf"))
    held &= sorted(sizes[name] for name in ("adapter", "file", "nf4") if name in sizes) == [
        sizes[name] for name in ("nf4", "file", "adapter") if name in sizes
    ]
    print(f"\n{count / 1e6:,.0f} M parameters; bounds: {'held' if held else 'BROKEN'}")
    return 0 if held else 1


def rank(changes: dict[str, Any], limit: int | None) -> tuple[int, float, list[float]]:
    """Train in this process; return the memory in bytes, the seconds of a step, and the losses."""
    with tempfile.TemporaryDirectory() as out:
        config = resolve(load_config(None, changes | {"out": f"{out}/run"})).config
        hooks = Hooks(config.strategy, strategies.load_strategy(config).plugin)
        task = tasks.load_task(config)
        world, data = hooks.setup(config, join() or RankInfo()), task.prepare(config)
        if limit:
            return_large_blocks(2**20)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        loop = steps(
            build_run(config, hooks, world, task, data), hooks, task, data.train, Progress()
        )
        times, losses = list[float](), list[float]()
        for _ in range(config.max_steps or 0):
            began = time.perf_counter()
            step = next(loop)
            times.append(time.perf_counter() - began)
            losses.append(float(step.loss))
        peak = resident("VmHWM") - before
        hooks.teardown(world)
    return peak, median(times), losses


def save(folder: Path, scale: str, layers: int | None) -> int:
    """Write random weights in bf16, a tensor at a time; return their number."""
    import transformers

    made: Any = planned_memory.Made(kind="llama", scale=scale, layers=layers)
    with torch.device("meta"):
        model = made.build_model(None, None)
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    torch.manual_seed(0)
    files = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        values = (
            torch.ones(parameter.shape) if "norm" in name else torch.randn(parameter.shape) * 0.02
        )
        files[name] = f"part-{number}.safetensors"
        save_file({name: values.bfloat16()}, folder / files[name], metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / transformers.utils.SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    sys.exit(main())
