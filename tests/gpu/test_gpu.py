"""Tests that need an accelerator; `make gpu` runs them and prints a table. Skipped
where there is none.

Each run is a command in a process of its own, as a user would start it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import work_folder as work
from torch.nn import functional

from distcore.model import RowMasks
from distcore.model.row_dropout import use_row_masks

KIND = (
    getattr(torch.accelerator.current_accelerator(), "type", "cpu")
    if torch.accelerator.is_available()
    else "cpu"
)
COUNT = torch.accelerator.device_count() if KIND != "cpu" else 0
JOB = (
    "train --data rows.json --model bert-tiny --max-seq-len 16 --max-steps 8 --lr 1e-3 --dropout 0 "
    "--global-batch-size 8 --set schedule.name=constant --set micro_batch_size=4 --save-every 0"
)
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""Relative difference of the evaluation's loss after eight steps from that of the CPU in fp32."""
Row = Callable[[str, str, str], None]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not COUNT, reason="torch sees no accelerator here"),
]
two = pytest.mark.skipif(COUNT < 2, reason=f"needs two devices, torch sees {COUNT}")
deepspeed = pytest.mark.skipif(
    KIND != "cuda" or importlib.util.find_spec("deepspeed") is None,
    reason="needs DeepSpeed and a device of kind cuda",
)
nvme = pytest.mark.skipif(find_library("aio") is None, reason="DeepSpeed's async_io needs libaio")
STRATEGIES = [
    "single",
    "ddp",
    "fsdp",
    "accelerate",
    *(pytest.param(f"deepspeed:{stage}", marks=deepspeed) for stage in (1, 2, 3)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("gpu")
    work.write_rows(path)
    with pytest.MonkeyPatch.context() as patch:
        work.enter(path, patch)
        yield path


def command(*words: str) -> str:
    """Run ``distcore`` with these words and return what it prints; a failure shows what it said."""
    ran = subprocess.run(
        [sys.executable, "-m", "distcore", *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def trained(name: str, *flags: str, job: str = JOB) -> dict[str, Any]:
    """Train into the folder ``name``, on the accelerator unless told otherwise,
    and return the report.
    """
    if not Path(name).exists():
        device = () if "--device" in flags else ("--device", KIND)
        nproc = () if "--nproc" in flags else ("--nproc", "1")
        command(*job.split(), "--out", name, *device, *nproc, *flags)
    report: dict[str, Any] = json.loads(Path(name, "report.json").read_text())
    return report


def loss(report: dict[str, Any]) -> float:
    return float(report["evaluation"]["loss"])


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return abs(loss(one) - loss(other)) / abs(loss(other))


def on_cpu() -> dict[str, Any]:
    return trained("on-cpu", "--device", "cpu", "--strategy", "single")


@pytest.mark.parametrize("precision", list(BOUNDS))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parity(strategy: str, precision: str, folder: Path, row: Row) -> None:
    report = trained(
        f"{strategy}-{precision}".replace(":", "-"),
        "--strategy",
        strategy,
        "--precision",
        precision,
    )
    assert report["device"] == KIND
    error = difference(report, on_cpu())
    row(
        f"{strategy}, {precision}: loss against the CPU", f"{error:.1e}", f"{BOUNDS[precision]:.0e}"
    )
    assert error <= BOUNDS[precision]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_laws(strategy: str, folder: Path, row: Row) -> None:
    nproc = "2" if COUNT > 1 and strategy != "single" else "1"
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "distcore",
            "check",
            "--strategy",
            strategy,
            "--nproc",
            nproc,
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    findings = json.loads(ran.stdout)
    broken = [
        f"{one['case']}: {one['error']} > {one['bound']}: {one['note']}"[:200]
        for one in findings
        if one["verdict"] == "broken"
    ]
    held = sum(one["verdict"] == "held" for one in findings)
    row(
        f"{strategy}, {nproc} rank(s): laws",
        f"{held} cases held, {len(broken)} broken",
        "none broken",
    )
    assert not broken, "\n".join(broken)


def test_a_run_repeats_itself_bit_for_bit_with_batches_fetched_ahead(
    folder: Path, row: Row
) -> None:
    # A copy that the computing stream did not wait for would now and then train on the
    # last step's rows.
    flags = (
        "--strategy",
        "single",
        "--deterministic",
        "--max-steps",
        "60",
        "--set",
        "loader.workers=2",
    )
    losses = {loss(trained(f"again-{number}", *flags)) for number in range(3)}
    row("--deterministic: three runs of 60 steps", f"{len(losses)} different losses", "1")
    assert len(losses) == 1


def test_dropout_by_row_has_the_masks_of_the_cpu(folder: Path, row: Row) -> None:
    flags = (
        "--strategy",
        "single",
        "--precision",
        "fp32",
        "--dropout",
        "0.1",
        "--set",
        "dropout_masks=row",
    )
    error = difference(
        trained("by-row", *flags), trained("by-row-on-cpu", *flags, "--device", "cpu")
    )
    row("dropout by row: loss against the CPU", f"{error:.1e}", f"{BOUNDS['fp32']:.0e}")
    assert error <= BOUNDS["fp32"]


@pytest.mark.alone
def test_time_of_dropout_by_row(row: Row) -> None:
    given, seconds = torch.ones(16, 512, 768, device=KIND, requires_grad=True), {}
    for way in ("rank", "row", "rank", "row"):  # the first time of each warms up
        run: Any = SimpleNamespace(config=SimpleNamespace(dropout_masks=way))
        with use_row_masks(run) as masks:
            if masks:
                masks.begin_rows(np.arange(16), given.device)
            begun = time.perf_counter()
            for _ in range(50):
                functional.dropout(given, 0.1).sum().backward()
            torch.accelerator.synchronize()
            seconds[way] = time.perf_counter() - begun
    ratio = seconds["row"] / seconds["rank"]
    row(
        "dropout of 16 × 512 × 768 values by row, forward and backward",
        f"{ratio:.2f} of torch's time",
        "none",
    )


@pytest.mark.alone
def test_time_of_compiled_dropout_by_row(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that compiled code hashes for each value: whether they should replace
    the pool on accelerators.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark: Any = importlib.import_module("dropout")
    given, rows = torch.ones(16, 512, 768, device=KIND, requires_grad=True), np.arange(16)
    masks, seconds = RowMasks(), dict[str, float]()
    masks.begin_rows(rows, given.device)
    mask = masks.mask(given, given.shape, 0.1)
    compiled = torch.compile(benchmark.hashed)
    numbers, places = benchmark.seeds(0).to(KIND), torch.from_numpy(rows).to(KIND)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "torch": lambda: functional.dropout(given, 0.1),
        "compiled": lambda: compiled(given, places, numbers, round(0.1 * 2**16)),
    }
    assert mask is not None
    assert torch.equal(ways["compiled"](), given * mask)
    for way, act in (*ways.items(), *ways.items()):  # the first time of each warms up
        torch.accelerator.synchronize()
        begun = time.perf_counter()
        for _ in range(50):
            act().sum().backward()
        torch.accelerator.synchronize()
        seconds[way] = time.perf_counter() - begun
    ratio = seconds["compiled"] / seconds["torch"]
    row(
        "compiled dropout of 16 × 512 × 768 values by row, forward and backward",
        f"{ratio:.2f} of torch's time",
        "none",
    )


def test_resume_on_the_device_and_on_the_cpu(folder: Path, row: Row) -> None:
    flags = ("--strategy", "single")  # an epoch, and a checkpoint, ends with step 5
    whole = trained("whole", *flags)
    there = trained("resumed", *flags, "--resume", "whole/checkpoints/step-00000005")
    here = trained(
        "resumed-on-cpu", *flags, "--resume", "whole/checkpoints/step-00000005", "--device", "cpu"
    )
    row(
        "resume on the device, and on the CPU",
        f"{difference(there, whole):.1e}, {difference(here, whole):.1e}",
        "1e-4",
    )
    assert max(difference(there, whole), difference(here, whole)) <= 1e-4


@pytest.mark.alone
def test_a_job_like_the_published_one(folder: Path, row: Row) -> None:
    """bert-small, 32 rows a step, rows of some 20 words: samples per second and peak memory."""
    text = (
        "the film was good bad long short and I would see it again never with my friends on a"
        " rainy day"
    )
    words = text.split()
    rows = [
        [" ".join(words[(n * k) % len(words)] for k in range(1, 10 + n % 20)), n % 6]
        for n in range(9200)
    ]
    Path("many.json").write_text(json.dumps(rows))
    job = (
        "train --data many.json --model bert-small --global-batch-size 32 --max-steps 250 --lr 3e-5"
        " --save-every 0"
    )
    for precision in BOUNDS:
        report = trained(
            f"many-{precision}", "--strategy", "single", "--precision", precision, job=job
        )
        speed, peak = report["samples_per_second"], report["peak_memory_bytes"]
        row(
            f"bert-small, 32 rows a step, {precision}",
            f"{speed:.0f} samples/s, {peak / 2**20:.0f} MiB at the peak",
            "",
        )
        assert speed > 0


BASE = (
    "--data rows.json --model bert-base --global-batch-size 8 --max-steps 3 --lr 1e-5 --save-every"
    " 0 --set micro_batch_size=1 --max-seq-len 16"
)


BERT_BASE = 86.1e6
"""Parameters of a bert-base whose vocabulary is that of rows.json."""


def peak(name: str, strategy: str, *flags: str) -> float:
    """Peak memory of a bert-base, in bytes per parameter."""
    report = trained(name, "--strategy", strategy, *flags, job=f"train {BASE}")
    return float(report["peak_memory_bytes"]) / BERT_BASE


@pytest.mark.parametrize(("strategy", "most"), [("single", 18), ("ddp", 22)])
def test_memory_is_what_the_docs_say(strategy: str, most: int, folder: Path, row: Row) -> None:
    """16 bytes of parameter, gradient and moments; DDP replaces its buckets, 4 more, while the
    first ones are there.
    """
    bytes_each = peak(f"memory-{strategy}", strategy)
    row(
        f"{strategy}: peak memory of bert-base in fp32, AdamW",
        f"{bytes_each:.1f} bytes per parameter",
        f"16 to {most}",
    )
    assert 16 <= bytes_each <= most


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_memory_is_what_the_plan_says(strategy: str, folder: Path, row: Row) -> None:
    """An estimate there: a device's allocator rounds sizes up, and its kernels take
    room of their own.
    """
    plan = json.loads(
        command("plan", *BASE.split(), "--strategies", strategy, "--nproc", "1", "--json")
    )
    planned, measured = (
        plan["rows"][0]["step"]["peak"]["total"],
        peak(f"memory-{strategy}", strategy) * BERT_BASE,
    )
    row(
        f"{strategy}: peak memory of bert-base, by its plan",
        f"{measured / planned:.2f} of it",
        "0.9 to 1.2",
    )
    assert 0.9 <= measured / planned <= 1.2


def test_fsdp_offload_takes_less_memory(folder: Path, row: Row) -> None:
    kept, off = (
        peak("memory-fsdp", "fsdp"),
        peak("offload-fsdp", "fsdp", "--set", "strategy_options.cpu_offload=true"),
    )
    row(
        "fsdp: peak without and with cpu_offload",
        f"{kept:.1f}, {off:.1f} bytes per parameter",
        "less",
    )
    assert off < kept


@deepspeed
@pytest.mark.parametrize("place", ["cpu", pytest.param("nvme", marks=nvme)])
def test_deepspeed_offload(place: str, folder: Path, row: Row) -> None:
    options = [
        f"strategy_options.{name}={place}" for name in ("offload_optimizer", "offload_param")
    ]
    flags = [
        word
        for option in [*options, f"strategy_options.nvme_path={folder}/nvme"]
        for word in ("--set", option)
    ]
    (folder / "nvme").mkdir(exist_ok=True)
    error = difference(trained(f"ds-{place}", "--strategy", "deepspeed:3", *flags), on_cpu())
    kept, off = peak("memory-ds", "deepspeed:3"), peak(f"memory-ds-{place}", "deepspeed:3", *flags)
    measured = f"loss {error:.1e} off; {kept:.1f} → {off:.1f} bytes per parameter"
    row(f"deepspeed:3 offloads to {place}", measured, "1e-4; less")
    assert error <= 1e-4
    assert off < kept


@deepspeed
@pytest.mark.parametrize(
    ("optimizer", "bound"), [("deepspeed-adamw", 1e-4), ("deepspeed-lamb", None)]
)
def test_deepspeed_kernels(optimizer: str, bound: float | None, folder: Path, row: Row) -> None:
    report = trained(optimizer, "--strategy", "deepspeed:1", "--set", f"optimizer.name={optimizer}")
    error = difference(report, on_cpu())
    row(
        f"{optimizer}, compiled",
        f"loss {error:.1e} off AdamW's on the CPU",
        "" if bound is None else f"{bound:.0e}",
    )
    assert loss(report) == loss(report)  # a number
    assert bound is None or error <= bound


@two
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_two_devices_train_as_one(strategy: str, folder: Path, row: Row) -> None:
    report = trained(f"two-{strategy}".replace(":", "-"), "--strategy", strategy, "--nproc", "2")
    error = difference(report, on_cpu())
    row(
        f"{strategy}, two devices over {torch.distributed.get_default_backend_for_device(KIND)}",
        f"{error:.1e}",
        "1e-4",
    )
    assert report["world_size"] == 2
    assert error <= 1e-4
