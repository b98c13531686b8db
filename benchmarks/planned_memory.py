"""Compare the peak memory of ``distcore plan`` with the allocator's real peak on the CPU.

    python benchmarks/planned_memory.py [--kinds bert,gpt2,llama,vit,resnet]
                                        [--strategies single] [--shapes 4x64] [--scale small]
                                        [--checkpointing off,on] [--nproc 2] [--precision fp32]
                                        [--micro-batches 1] [--padding-free off] [--layers N]
                                        [--lora RANK] [--base fp32,file,nf4]

Every row of the data has the same length, so each step has the longest micro-batch. A job trains
for five steps of AdamW on real ranks over gloo. The preloaded allocator.c sees every block; the
peak of a step is the highest sum of blocks allocated since before the strategy's setup. Under
deepspeed the bucket size is "auto".

"start" is the highest sum until the model is built and wrapped, which the planned peak must cover,
too. The third, fourth and fifth step are measured. A thread of gloo may hold a sent tensor for some
milliseconds after the rank has waited for it, so the peak of the same step varies between runs.
"real" is the least of the three peaks, with which the plan is compared; "at most" is the excess of
the others.

With --lora the weights are files in bf16, of which --base is the frozen base.

Bounds: 1 % of the peak for single, ddp, fsdp, accelerate, horovod and deepspeed at stages 0 to 2, 5
% for mesh, 10 % for deepspeed at stage 3, where gloo gathers, probably with a copy, while the rank
computes.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor, nn

from distcore import ConstantColumn, Datasets, Progress, RankInfo, RunConfig, launch, load_config
from distcore.engine import padding_free_check
from distcore.engine.build import build_run
from distcore.engine.loop import steps
from distcore.plugin.strategy.hooks import Hooks
from distcore.rank_environment import join
from distcore.resolve import strategies, tasks
from distcore.resolve.complete import complete
from distcore.resolve.resolve import resolve
from distcore_tasks.padding_free.layer_hooks import enable_padding_free
from distcore_tasks.shared.pretrained import load_model
from distcore_workbench.planning.plan import Row, make_plan
from distcore_workbench.planning.request import PlanRequest

SIZES: dict[str, dict[str, tuple[int, int, int]]] = {
    "tiny": dict.fromkeys(("bert", "gpt2", "llama", "vit"), (2, 64, 2)),
    "small": dict.fromkeys(("bert", "gpt2", "llama", "vit"), (4, 256, 4)),
    "base": dict.fromkeys(("bert", "gpt2", "vit"), (12, 768, 12)) | {"llama": (2, 2048, 32)},
    "1b": {"llama": (22, 2048, 32)},
    "7b": {"llama": (32, 4096, 32)},
}
"""Layers, hidden size and heads; ``base`` has the published sizes, of TinyLlama 2
of its 22 layers.
"""
RESNETS: dict[str, dict[str, Any]] = {
    "tiny": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]},
    "small": {"embedding_size": 32, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]},
    "base": {"depths": [3, 4, 6, 3]},
}
"""Widths and blocks of the convolutional networks; ``base`` is ResNet-50."""
IMAGES = ("vit", "resnet")
"""Kinds of models of images."""
FEED_FORWARD = {2048: 5_632, 4096: 11_008}
"""Width of a Llama's middle layers, by hidden size."""
BOUNDS = {
    "single": 0.01,
    "ddp": 0.01,
    "fsdp": 0.01,
    "mesh": 0.05,
    "horovod": 0.01,
    "accelerate": 0.01,
    "deepspeed": 0.01,
    "deepspeed:3": 0.10,
}
"""Bound of the difference between plan and allocator, as a fraction of the peak, by strategy."""
WORDS = {"bert": 30_522, "gpt2": 50_257, "llama": 32_000, "vit": 0, "resnet": 0}
PATCH = 16
ROWS = 256
WARM, MEASURED = 2, 3
"""Numbers of unmeasured and of measured steps."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A model of transformers with random weights, and rows of one length;
    a task for ``--task``.
    """

    kind: Literal["bert", "gpt2", "llama", "vit", "resnet"] = "llama"
    """Type of the model."""
    scale: str = "small"
    """A key of ``SIZES``."""
    length: int = 128
    """Tokens of each row; an image has as many patches, and a square of them."""
    layers: int | None = None
    """Number of layers; ``None``: that of ``scale``."""
    folder: str | None = None
    """Folder with the weights; ``None``: random ones."""

    def weights_folder(self, config: RunConfig) -> Path | None:
        return Path(self.folder) if self.folder else None

    def prepare(self, config: RunConfig) -> Datasets:
        rows = RandomTexts(self.kind, self.length)
        return Datasets(train=rows, evaluation=rows, test=rows)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        import transformers

        if self.folder:
            return load_model("AutoModelForCausalLM", "made", Path(self.folder), dropout=None)
        if self.kind == "resnet":
            return transformers.ResNetForImageClassification(
                transformers.ResNetConfig(**RESNETS[self.scale])
            )
        layers, hidden, heads = SIZES[self.scale][self.kind]
        layers = self.layers or layers
        shape: dict[str, Any] = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
        }
        wide: dict[str, Any] = {"intermediate_size": 4 * hidden}
        if self.kind == "gpt2":
            names: dict[str, Any] = {
                "n_layer": layers,
                "n_embd": hidden,
                "n_head": heads,
                "n_positions": max(1024, self.length),
            }
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**names))
        if self.kind == "llama":
            wide = {"intermediate_size": FEED_FORWARD.get(hidden, 2 * hidden)}
            wide |= {"num_key_value_heads": 4} if self.scale == "1b" else {}
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **wide))
        if self.kind == "vit":
            side = PATCH * int(self.length**0.5)
            return transformers.ViTForImageClassification(
                transformers.ViTConfig(**shape, **wide, image_size=side)
            )
        return transformers.BertForSequenceClassification(transformers.BertConfig(**shape, **wide))

    def why_not_padding_free(self) -> str | None:
        return "images have no padding" if self.kind in IMAGES else None

    def enable_padding_free(self, module: nn.Module) -> Callable[[], None]:
        return enable_padding_free(module, read="first" if self.kind == "bert" else "any")

    def row_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        more = {} if self.kind in IMAGES else {"use_cache": False} if self.kind != "bert" else {}
        logits = model(**inputs, **more).logits
        losses = nn.functional.cross_entropy(
            logits.flatten(0, -2), batch["labels"].flatten(), reduction="none"
        )
        return losses.view(len(logits), -1).sum(1)


class RandomTexts:
    """``ROWS`` rows, all alike in length."""

    def __init__(self, kind: str, length: int) -> None:
        self.kind, self.length = kind, length
        self.lengths = ConstantColumn(ROWS, 1 if kind in IMAGES else length)
        self.items = ConstantColumn(ROWS, 1 if kind in (*IMAGES, "bert") else length)

    def __len__(self) -> int:
        return ROWS

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        random, count = np.random.default_rng(int(indices[0])), len(indices)
        if self.kind in IMAGES:
            side = PATCH * int(self.length**0.5)
            pixels = random.standard_normal((count, 3, side, side), dtype=np.float32)
            return {
                "pixel_values": torch.from_numpy(pixels).clone(),
                "labels": torch.zeros(count, dtype=torch.int64),
            }
        tokens = torch.from_numpy(
            random.integers(0, WORDS[self.kind], (count, self.length))
        ).clone()
        labels = (
            torch.zeros(count, dtype=torch.int64) if self.kind == "bert" else tokens.roll(-1, 1)
        )
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def settings(
    kind: str,
    strategy: str,
    shape: str,
    *,
    scale: str = "small",
    checkpointing: bool = False,
    nproc: int = 2,
    precision: str = "fp32",
    micro_batches: int = 1,
    padding_free: str = "off",
    layers: int | None = None,
    lora: int | None = None,
    base: str = "fp32",
    folder: str | None = None,
) -> dict[str, Any]:
    """The config of a job, as changes; ``shape`` is rows x tokens of a micro-batch."""
    rows, length = map(int, shape.split("x"))
    ranks = 1 if strategy == "single" else nproc
    # DeepSpeed's own default, two gigabytes, would hide the rest.
    options = {"reduce_bucket_size": "auto"} if strategy.startswith("deepspeed:") else {}
    adapter = {"lora.rank": lora, "lora.base": base} if lora else {}
    return adapter | {
        "strategy_options": options,
        "task": f"{Path(__file__)}:Made",
        "task_options": {
            "kind": kind,
            "scale": scale,
            "length": length,
            "layers": layers,
            "folder": folder,
        },
        "strategy": strategy,
        "nproc": ranks,
        "device": "cpu",
        "max_steps": WARM + MEASURED,
        "data_guard_steps": 0,
        "micro_batch_size": rows,
        "global_batch_size": rows * ranks * micro_batches,
        "log_level": "error",
        "gradient_checkpointing": checkpointing,
        "lr": 1e-4,
        "precision": precision,
        "padding_free": padding_free,
    }


def plan_row(changes: dict[str, Any]) -> Row:
    """Return the row of the plan."""
    (row,) = make_plan(
        PlanRequest(config=None, changes=changes, strategies="", ranks=[changes["nproc"]])
    ).rows
    return row


def measure_peaks(changes: dict[str, Any]) -> list[int]:
    """Return the allocator's peaks at the start and in the measured steps, on the
    first rank, in bytes.
    """
    with tempfile.TemporaryDirectory() as out:
        config = resolve(load_config(None, changes | {"out": f"{out}/run"})).config
        return launch(rank, config, nproc=int(config.nproc))[0]


def rank(config: RunConfig) -> list[int]:
    """Train as one rank; return the peaks of the start and of the measured steps."""
    task = tasks.load_task(config)
    hooks = Hooks(config.strategy, strategies.load_strategy(config).plugin)
    before = allocator("held")  # Horovod may have its fusion buffer from its set-up on
    allocator("reset")
    world, data = hooks.setup(config, join() or RankInfo()), task.prepare(config)
    completed = complete(resolve(config, (join() or RankInfo()).size), data)
    run = build_run(completed.config, hooks, world, task, data)
    start = allocator("most") - before
    run, data = padding_free_check.verify(run, hooks, completed, data)
    loop = steps(run, hooks, task, data.train, Progress())
    most = []
    for _ in range(WARM + MEASURED):
        allocator("reset")
        next(loop)
        most.append(allocator("most") - before)
    hooks.teardown(world)
    return [start, *most[WARM:]]


def allocator(what: str) -> int:
    """Call the preloaded library: bytes ``held`` now, or the ``most`` since ``reset``."""
    function = getattr(ctypes.CDLL(None), f"allocator_{what}")
    function.restype = ctypes.c_size_t
    return int(function())


@cache
def save(kind: Literal["bert", "gpt2", "llama"], scale: str, layers: int | None) -> str:
    """Save random weights of the model in bf16; return the folder."""
    folder = tempfile.mkdtemp()
    made: Any = Made(kind=kind, scale=scale, layers=layers)
    made.build_model(None, None).bfloat16().save_pretrained(folder)
    return folder


def restart_with_allocator() -> None:
    """Compile the counting library, and restart this program with it."""
    folder = tempfile.mkdtemp()
    source, library = Path(__file__).parent / "allocator.c", Path(folder, "allocator.so")
    subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True
    )
    os.execve(
        sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(library)}
    )


def main() -> int:
    if "allocator.so" not in os.environ.get("LD_PRELOAD", ""):
        restart_with_allocator()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "kinds": "bert,gpt2,llama,vit", "strategies": "single,ddp,fsdp", "shapes": "4x64,2x256",
        "checkpointing": "off,on",
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--scale", default="small", choices=SIZES)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--padding-free", "--packing", default="off", choices=("off", "on"))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--lora", type=int, metavar="RANK")
    parser.add_argument(
        "--base", default="fp32", help="with --lora: fp32, file or nf4, several by commas"
    )
    given = parser.parse_args()
    print(
        "| model | base | strategy | batch | checkpointing | planned | in | start | real | at most"
        " | apart |\n" + "|---" * 11 + "|"
    )
    held = True
    choices = (given.kinds, given.base, given.strategies, given.shapes, given.checkpointing)
    for kind, base, strategy, shape, checkpointing in itertools.product(
        *(text.split(",") for text in choices)
    ):
        folder = save(kind, given.scale, given.layers) if given.lora else None
        changes = settings(
            kind,
            strategy,
            shape,
            scale=given.scale,
            checkpointing=checkpointing == "on",
            nproc=given.nproc,
            precision=given.precision,
            micro_batches=given.micro_batches,
            padding_free=given.padding_free,
            layers=given.layers,
            lora=given.lora,
            base=base,
            folder=folder,
        )
        row, (start, *peaks) = plan_row(changes), measure_peaks(changes)
        peak, more = min(peaks), f"+{(max(peaks) - min(peaks)) / 2**20:.2f}"
        head = f"| {kind} | {base} | {strategy} | {shape} | {checkpointing} |"
        if row.step is None:
            print(
                f"{head} {row.untraced or row.reason} | | {start / 2**20:.2f} | {peak / 2**20:.2f}"
                f" | {more} | |",
                flush=True,
            )
            continue
        said = row.step.peak
        apart = said.total / max(start, peak) - 1
        held &= abs(apart) <= BOUNDS.get(strategy, BOUNDS[strategy.partition(":")[0]])
        sizes = (
            f"{said.total / 2**20:.2f} | {said.phase} | {start / 2**20:.2f} | {peak / 2**20:.2f}"
        )
        print(f"{head} {sizes} | {more} | {apart:+.2%} |", flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
