"""Compilation of DeepSpeed's extensions: once, while other processes wait and say so; and
no compiler at all.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.ops.op_builder.builder import OpBuilder
from first_line import after_first_line

from distcore import ConfigError, launch, load_config, train
from distcore.resolve.resolve import resolve
from distcore.testing import problem
from distcore.testing.problem import Problem
from distcore_deepspeed import ops

SOURCE = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("answer", [] { return 42; }); }
"""
HAS_TOOLS = bool(shutil.which("c++") and shutil.which("ninja"))
NO_TOOLS = "no C++ compiler or ninja here"


class Small(OpBuilder):
    """An extension that compiles in seconds."""

    def __init__(self, source: Path) -> None:
        super().__init__(name="distcore_small")
        self.source = source

    def absolute_name(self) -> str:
        return "deepspeed.ops.small"

    def sources(self) -> list[str]:
        return [str(self.source)]

    def include_paths(self) -> list[str]:
        return []


def built(source: Path) -> list[str]:
    """Build it in this rank; what was logged, and what it answers."""
    log, said = logging.getLogger("distcore"), Said()
    log.setLevel(logging.INFO)
    log.addHandler(said)
    ops.build(Small(source))
    return [*said.lines, str(Small(source).load(verbose=False).answer())]


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(not HAS_TOOLS, reason=NO_TOOLS)
def test_an_extension_is_compiled_by_one_rank_while_the_other_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    source = tmp_path / "small.cpp"
    source.write_text(SOURCE)
    folder = tmp_path / "distcore_small"
    folder.mkdir()
    (folder / "lock").touch()  # of a compilation that was killed: torch would wait for it for ever
    first, second = sorted(launch(built, source, nproc=2, timeout=120), key=len)
    assert first[-1] == second[-1] == "42"
    assert second[0] == "waiting for another process that compiles DeepSpeed's distcore_small"
    assert (
        first[0]
        == second[1]
        == "loading DeepSpeed's distcore_small; the first time it is compiled, which takes minutes"
    )
    assert len(list(folder.glob("*.o"))) == 1


def is_compiled(builder: Any) -> bool:
    if not HAS_TOOLS:
        return False
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(builder.name, verbose=False), f"{builder.name}.so").exists()


@pytest.mark.ranks
@pytest.mark.skipif(
    not (is_compiled(ops.adam("cpu")) or (HAS_TOOLS and "DISTCORE_COMPILE" in os.environ)),
    reason=(
        "DeepSpeed's cpu_adam is not compiled; with DISTCORE_COMPILE=1 in the environment it is, in"
        " minutes"
    ),
)
@pytest.mark.timeout(1200)
def test_cpu_adam_on_offloaded_shards_takes_the_steps_of_torchs(tmp_path: Path) -> None:
    job = {
        "device": "cpu",
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "lr": 0.01,
        "max_steps": 6,
        "log_every": 1,
        "schedule.name": "constant",
        "extensions": {"progress": False, "metrics": True},
    }
    own = {
        "strategy": "deepspeed",
        "nproc": 2,
        "strategy_options": {"stage": 2, "offload_optimizer": "cpu"},
    }
    own |= {"optimizer.name": "deepspeed-adamw", "out": str(tmp_path / "zero")}
    launch(train, load_config(None, job | own), Problem(), nproc=2)
    launch(train, load_config(None, job | {"out": str(tmp_path / "alone")}), Problem(), nproc=1)
    assert losses(tmp_path / "zero") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    resolved = json.loads((tmp_path / "zero" / "deepspeed.json").read_text())
    assert resolved["optimizer"]["params"]["torch_adam"] is False


def losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in records if "train/loss" in line]


@pytest.fixture
def without_compilers(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has no compiler and no ninja."""
    (tmp_path / "bin").mkdir()
    for name in ("sh", "uname", "env"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    return {
        **os.environ,
        "PATH": str(tmp_path / "bin"),
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }


def distcore(arguments: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distcore", *arguments.split()]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environ
    )


JOB = (
    f"train --strategy deepspeed --task {problem.__file__}:Problem --lr 0.01 --global-batch-size 4"
    " --max-steps 2 --nproc 2 --set device=cpu --set extensions.progress=false --set"
    " schedule.name=constant "
)


@pytest.mark.ranks
def test_without_a_compiler_torchs_adam_is_used_and_a_line_says_so(
    tmp_path: Path, without_compilers: dict[str, str]
) -> None:
    own = "--set optimizer.name=deepspeed-adamw --set strategy_options.offload_optimizer=cpu"
    ended = distcore(f"{JOB} {own} --out {tmp_path}/run", without_compilers)
    assert ended.returncode == 0, ended.stderr
    line = (
        "DeepSpeed's cpu_adam cannot be compiled here (no C++ compiler or ninja): torch's AdamW is"
        " used"
    )
    assert ended.stderr.count(line) == 1
    resolved = json.loads((tmp_path / "run" / "deepspeed.json").read_text())
    assert resolved["optimizer"]["params"]["torch_adam"] is True


@pytest.mark.programs
def test_deepspeeds_own_adam_without_a_compiler_is_refused_before_launch(
    tmp_path: Path, without_compilers: dict[str, str]
) -> None:
    own = "--set optimizer.name=deepspeed-adamw --set schedule.name=constant"
    kernel = (
        "--set strategy_options.offload_optimizer=cpu --set"
        " strategy_options.optimizer_params.torch_adam=false"
    )
    ended = distcore(f"{JOB} {own} {kernel} --out {tmp_path}/run", without_compilers)
    assert ended.returncode == 2
    assert after_first_line(ended.stderr).startswith(
        "error: optimizer.params.torch_adam = false: DeepSpeed's cpu_adam cannot be compiled"
    )
    assert after_first_line(ended.stderr).count("\n") == 1


@pytest.mark.programs
def test_nvme_without_a_compiler_is_refused_before_launch(
    tmp_path: Path, without_compilers: dict[str, str]
) -> None:
    options = "--set strategy_options.stage=3 --set strategy_options.offload_param=nvme"
    ended = distcore(
        f"{JOB} {options} --set strategy_options.nvme_path={tmp_path} --out {tmp_path}/run",
        without_compilers,
    )
    assert ended.returncode == 2
    assert (
        after_first_line(ended.stderr)
        == "error: zero_optimization.offload_param.device = 'nvme': DeepSpeed's async_io needs a"
        " C++ compiler and ninja; install it\n"
    )


@pytest.mark.skipif(not HAS_TOOLS, reason=NO_TOOLS)
@pytest.mark.skipif(not ops.missing_for_nvme(), reason="libaio is here")
def test_nvme_without_libaio_is_refused() -> None:
    options = {"stage": 3, "offload_param": "nvme", "nvme_path": "/tmp"}
    config = load_config(
        None, {"strategy": "deepspeed", "strategy_options": options, "device": "cpu", "lr": 0.01}
    )
    with pytest.raises(ConfigError, match="needs libaio and its headers"):
        resolve(config, task=Problem())


def test_an_adam_that_cannot_be_compiled_is_refused_if_demanded_and_else_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ops, "can_load", lambda builder: False)
    assert ops.uses_torch_adam("cuda", "none", logs=False)
    assert not caplog.messages
    assert ops.uses_torch_adam("cuda", "none", logs=True)
    assert "cannot be compiled here" in caplog.text
    demanded = {"optimizer": {"type": "AdamW", "params": {"torch_adam": False}}}
    job = {
        "strategy": "deepspeed",
        "strategy_options": {"config": demanded},
        "device": "cpu",
        "lr": 0.01,
    }
    with pytest.raises(
        ConfigError, match=r"torch_adam = false: DeepSpeed's .* cannot be compiled here"
    ):
        resolve(load_config(None, job), task=Problem())
