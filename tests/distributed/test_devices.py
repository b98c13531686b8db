"""The device of a rank, and what follows from its kind. Kinds that this machine lacks are
asked by name only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distcore import ConfigError, RankInfo, RunConfig, StrategyError, device_of
from distcore.distributed import devices
from distcore.distributed.arithmetic import arithmetic_of, check_arithmetic
from distcore.distributed.devices import backend_of, peak_memory, resolve_device, seed


@pytest.mark.parametrize(("kind", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "xccl")])
def test_the_backend_is_the_one_that_torch_names(kind: str, backend: str) -> None:
    assert backend_of(torch.device(kind)) == backend


def test_a_device_for_which_torch_names_no_backend_is_one_line() -> None:
    with pytest.raises(
        StrategyError, match=r"^device = 'meta': torch names no process-group backend for it"
    ):
        backend_of(torch.device("meta"))


@pytest.mark.parametrize(("seen", "index"), [(1, 0), (4, 3), (8, 3)])
def test_a_rank_has_the_device_of_its_local_rank_or_the_only_one(
    seen: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "count_devices", lambda _kind: seen)
    assert devices._index("cuda", 3) == index


def test_a_rank_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_devices", lambda _kind: 2)
    with pytest.raises(
        ConfigError,
        match=r"^device = 'xpu': local rank 2 has none, torch sees 2 here; start no more",
    ):
        devices._index("xpu", 2)


def test_the_cpu_is_taken_where_there_is_nothing_else() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert resolve_device(RunConfig()) == "cpu"
    assert device_of(RunConfig(device="cpu"), RankInfo(local_rank=7)) == torch.device("cpu")


def test_a_module_of_torch_that_is_no_device_is_none() -> None:
    assert devices.count_devices("nn") == 0
    with pytest.raises(ConfigError, match=r"^device = 'nn': torch knows no such device type"):
        resolve_device(RunConfig(device="nn"))


def test_emulated_bf16_does_not_count() -> None:
    class Emulates:
        @staticmethod
        def is_bf16_supported(including_emulation: bool = True) -> bool:
            return including_emulation

    class Has:
        @staticmethod
        def is_bf16_supported() -> bool:
            return True

    assert [devices._computes_bf16(module) for module in (Emulates, Has, object)] == [
        False,
        True,
        True,
    ]


def test_the_same_seed_draws_the_same_numbers() -> None:
    drawn = []
    for number in (7, 7, 8):
        seed(torch.device("cpu"), number)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def test_memory_of_a_rank_on_the_cpu_is_that_of_its_process() -> None:
    (now,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    assert peak_memory(torch.device("cpu")) >= int(now.split()[1]) * 1024 // 2


def test_a_workspace_that_excludes_it_is_refused_on_an_accelerator_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    check_arithmetic(RunConfig(device="cpu", deterministic=True))
    check_arithmetic(RunConfig(device="cuda"))
    with pytest.raises(
        ConfigError,
        match=r"^deterministic: CUBLAS_WORKSPACE_CONFIG=:0:0 .* must be :4096:8 or :16:8",
    ):
        check_arithmetic(RunConfig(device="cuda", deterministic=True))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    check_arithmetic(RunConfig(device="cuda", deterministic=True))


def test_tf32_is_for_accelerators_and_lasts_as_long_as_the_run() -> None:
    backend = torch.backends.cuda.matmul
    with arithmetic_of(RunConfig(device="cuda", tf32=True)):
        assert backend.fp32_precision == "tf32"
    assert backend.fp32_precision != "tf32"
    with pytest.raises(ConfigError, match=r"^tf32: a CPU has no such arithmetic; leave it out$"):
        check_arithmetic(RunConfig(device="cpu", tf32=True))
