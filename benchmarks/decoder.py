"""Compare distcore with a loop by hand and the HF Trainer on a decoder in bf16: tokens per second,
MFU and peak memory.

    python benchmarks/decoder.py [KIND …] [--job train|lora] [--size tiny|1b|8b] [--rows 8]
    [--steps 25] [--rounds 1]

Needs transformers; ``--job lora`` needs peft. The model is a Llama with random weights, saved in
bf16; rows have 2,048 tokens (128 of ``tiny``). In each round every library trains once, in rotating
order, on the same number of rows in a
process of its own: fused AdamW, attention of torch, no clipping. ``train`` trains all weights,
in fp32 with bf16 autocast; ``lora`` an adapter of rank 16 on a frozen base in bf16, or in NF4.
Tokens per second are those of the median step; the first 5 do not count.

MFU is 6 floating-point operations per token and parameter that is trained (4 if it is frozen), and
attention's, over the peak of the device in dense bf16, which is known of the H100 and H200 (989
TFLOP/s, by the vendor's datasheet).

Bound: distcore is at least 0.99 times as fast as the loop by hand, and 1.1 times as fast as the HF
Trainer; where there is no accelerator the program prints `not measured here` unless --size is tiny.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from native.decoder_folder import SHAPES, write_folder

KINDS = {
    "train": (
        "by-hand",
        "by-hand-compiled",
        "trainer",
        "trainer-compiled",
        "distcore",
        "distcore-compiled",
    ),
    "lora": ("trainer", "distcore", "distcore-nf4"),
}
BOUNDS = {"by-hand": 0.99, "trainer": 1.1}
PEAKS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}
"""Dense bf16 operations per second;
https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-datasheet
"""


def main() -> int:
    """Run the rounds and print the table; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="KIND",
        help="; ".join(f"{j}: {', '.join(k)}" for j, k in KINDS.items()),
    )
    parser.add_argument("--job", choices=KINDS, default="train")
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the figures as one line")
    given = parser.parse_args()
    if not torch.accelerator.is_available() and given.size != "tiny":
        print("not measured here: torch sees no accelerator")
        return 0
    kinds = tuple(given.kinds) or KINDS[given.job]
    with tempfile.TemporaryDirectory(prefix="decoder-") as name:
        write_folder(Path(name), given.size, given.rows * given.steps)
        figures = {kind: best for kind, best in measure(Path(name), kinds, given).items() if best}
    own = figures.get("distcore", {}).get("tokens_per_second", math.nan)
    ratios = {kind: own / one["tokens_per_second"] for kind, one in figures.items()}
    if given.json:
        print(json.dumps({"figures": figures, "ratios": ratios}))
    else:
        show(figures, ratios)
    return int(any(ratios.get(kind, bound) < bound for kind, bound in BOUNDS.items()))


def measure(
    folder: Path, kinds: Sequence[str], given: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Return the figures of each kind: the median speed of its rounds, and its highest peak."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for number in range(given.rounds):
        turn = number % len(kinds)
        for kind in (*kinds[turn:], *kinds[:turn]):
            job = [
                sys.executable,
                str(Path(__file__).parent / "native/decoder_job.py"),
                kind,
                str(folder),
            ]
            done = subprocess.run(
                [*job, given.job, str(given.rows), str(given.steps)],
                capture_output=True,
                text=True,
                check=False,
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"tokens')]
            if done.returncode or not lines:
                print(
                    f"{kind} failed: {(done.stdout + done.stderr)[-3000:]}",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            runs[kind].append(json.loads(lines[-1]))
            print(f"  round {number}, {kind}: {lines[-1]}", file=sys.stderr, flush=True)
    return {kind: summary(of_kind) for kind, of_kind in runs.items()}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one run's figures for several."""
    if not runs:
        return {}
    speed = statistics.median(run["tokens_per_second"] for run in runs)
    figures = {
        "tokens_per_second": speed,
        "peak_gib": max(run["peak_bytes"] for run in runs) / 2**30,
        "loss": runs[0]["loss"],
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((value for name, value in PEAKS.items() if device.startswith(name)), None)
    return figures | {"mfu": None if peak is None else speed * runs[0]["flops_per_token"] / peak}


def show(figures: dict[str, dict[str, Any]], ratios: dict[str, float]) -> None:
    """Print the table."""
    print(
        torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        f"torch {torch.__version__}",
    )
    print(
        "| | tokens/s | MFU | peak, GiB | loss | distcore against it |\n|---|---|---|---|---|---|"
    )
    for kind, one in figures.items():
        mfu = "–" if one["mfu"] is None else f"{one['mfu']:.3f}"
        cells = (
            f"{one['tokens_per_second']:,.0f} | {mfu} | {one['peak_gib']:.1f} | {one['loss']:.3f} |"
            f" {ratios[kind]:.2f}"
        )
        print(f"| {kind} | {cells} |")


if __name__ == "__main__":
    sys.exit(main())
