"""Decoders on an accelerator: what saves memory changes no loss; tokens per second,
MFU and peak memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import work_folder as work

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KIND = (
    getattr(torch.accelerator.current_accelerator(), "type", "cpu")
    if torch.accelerator.is_available()
    else "cpu"
)
JOB = (
    "train --task causal-lm --model model --data train.jsonl --eval-data eval.jsonl --max-seq-len"
    " 128 --max-steps 8 --global-batch-size 4 --lr 1e-3 --set schedule.name=constant --save-every 0"
    " --nproc 1 --strategy single"
)
Row = Callable[[str, str, str], None]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(KIND == "cpu", reason="torch sees no accelerator here"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("decoders")
    with pytest.MonkeyPatch.context() as patch:
        work.enter(path, patch)
        make = (
            "from native.decoder_folder import write_folder; import pathlib;"
            " write_folder(pathlib.Path(), 'tiny', 32)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", make], env=_environment(), capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        yield path


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]),
    }


def losses(name: str, *flags: str) -> list[float]:
    """Train, and return the loss of each step and of the evaluation."""
    words = [*JOB.split(), "--out", name, "--set", "log_every=1", *flags]
    ran = subprocess.run(
        [sys.executable, "-m", "distcore", *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = map(json.loads, Path(name, "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines for key in ("train/loss", "eval/loss") if key in line]


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) >= 8
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-6), ("bf16", 1e-3)])
def test_cross_entropy_in_chunks(precision: str, bound: float, folder: Path, row: Row) -> None:
    whole, chunks = (
        losses(f"{name}-{precision}", "--precision", precision, "--chunked-cross-entropy", name)
        for name in ("off", "on")
    )
    row(
        f"cross entropy in chunks, {precision}: losses against whole logits",
        f"{largest_difference(chunks, whole):.1e}",
        f"{bound:.0e}",
    )
    assert largest_difference(chunks, whole) <= bound


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_frozen_base_in_16_bits(precision: str, folder: Path, row: Row) -> None:
    flags = ("--precision", precision, "--lora", "4", "--deterministic")
    file, fp32 = (
        losses(f"base-{base}-{precision}", *flags, "--set", f"lora.base={base}")
        for base in ("file", "fp32")
    )
    row(
        f"LoRA, base in bf16, {precision}: losses against a base in fp32",
        f"{largest_difference(file, fp32):.1e}",
        "0",
    )
    assert file == fp32


def test_a_frozen_base_in_4_bits(folder: Path, row: Row) -> None:
    flags = ("--lora", "4", "--set", "lora.base=nf4")
    here, there = losses("nf4", *flags), losses("nf4-cpu", *flags, "--device", "cpu")
    row(
        "LoRA, base in NF4, fp32: losses against the CPU",
        f"{largest_difference(here, there):.1e}",
        "1e-4",
    )
    assert largest_difference(here, there) <= 1e-4


def test_8_bit_moments(folder: Path, row: Row) -> None:
    flags = ("--optimizer", "adamw8bit", "--lr", "1e-4")
    here, there = losses("8bit", *flags), losses("8bit-cpu", *flags, "--device", "cpu")
    row("adamw8bit, fp32: losses against the CPU", f"{largest_difference(here, there):.1e}", "1e-4")
    assert largest_difference(here, there) <= 1e-4


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_compiled_blocks(precision: str, bound: float, folder: Path, row: Row) -> None:
    plain = losses(f"plain-{precision}", "--precision", precision)
    fused = losses(f"compiled-{precision}", "--precision", precision, "--compile", "regions")
    row(
        f"--compile regions, {precision}: losses against eager",
        f"{largest_difference(fused, plain):.1e}",
        f"{bound:.0e}",
    )
    assert largest_difference(fused, plain) <= bound


def test_tf32(folder: Path, row: Row) -> None:
    plain, rounded = losses("no-tf32"), losses("tf32", "--set", "tf32=true")
    row("tf32: losses against fp32", f"{largest_difference(rounded, plain):.1e}", "1e-2")
    assert largest_difference(rounded, plain) <= 1e-2


def measured(*words: str) -> dict[str, Any]:
    """Run benchmarks/decoder.py, and return its figures."""
    command = [sys.executable, str(BENCHMARKS / "decoder.py"), *words, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ran.stdout.startswith("{"), ran.stderr[-2000:]
    figures: dict[str, Any] = json.loads(ran.stdout)
    return figures


def told(row: Row, what: str, figures: dict[str, Any]) -> None:
    for kind, one in figures["figures"].items():
        mfu = "" if one["mfu"] is None else f", MFU {one['mfu']:.3f}"
        speed = f"{one['tokens_per_second']:,.0f} tokens/s{mfu}, {one['peak_gib']:.1f} GiB"
        row(
            f"{what}: {kind}",
            f"{speed}; distcore is {figures['ratios'][kind]:.2f} times as fast",
            "",
        )


@pytest.mark.alone
def test_a_decoder_of_a_billion_parameters(folder: Path, row: Row) -> None:
    figures = measured("by-hand", "trainer", "distcore")
    told(row, "Llama of 1.1 B, bf16 autocast, 8 rows of 2,048 tokens", figures)
    assert figures["ratios"]["by-hand"] >= 0.99
    assert figures["ratios"]["trainer"] >= 1.1


@pytest.mark.alone
def test_a_compiled_decoder(folder: Path, row: Row) -> None:
    figures = measured("by-hand-compiled", "trainer-compiled", "distcore-compiled", "distcore")
    told(row, "Llama of 1.1 B, compiled", figures)
    speeds = {kind: one["tokens_per_second"] for kind, one in figures["figures"].items()}
    own = max(speed for kind, speed in speeds.items() if kind.startswith("distcore"))
    assert own >= max(speeds.values())


@pytest.mark.alone
def test_an_adapter_of_8_billion_parameters(folder: Path, row: Row) -> None:
    figures = measured("--job", "lora", "--size", "8b", "--rows", "2", "--steps", "15")
    told(row, "LoRA of a Llama of 8 B, base in bf16 or NF4, 2 rows of 2,048 tokens", figures)
    assert (
        figures["figures"]["distcore-nf4"]["peak_gib"]
        <= 0.6 * figures["figures"]["distcore"]["peak_gib"]
    )
    assert (
        figures["figures"]["distcore"]["peak_gib"]
        <= 1.05 * figures["figures"]["trainer"]["peak_gib"]
    )
