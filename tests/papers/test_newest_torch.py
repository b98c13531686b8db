"""The newest torch of the package index: our code runs with it, and warns of nothing.

A warning from a module of ours is an error in pytest (pyproject.toml). Ranks print theirs, so
their output is read.
"""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from alone import CORE, PLUGINS, ROOT, make_environment

STRATEGIES = ("single", "ddp", "fsdp", "deepspeed", "accelerate", "mesh")
"""Horovod is compiled for one version of torch."""
OF_TORCH = ("torch", "functorch", "torchgen", "torchvision", "triton", "nvidia", "horovod")
"""Packages that belong to one version of torch."""
QUICK = "not slow and not machines and not gpu and not ranks and not programs"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the newest torch that pip finds."""
    ours = (
        word
        for folder in (CORE, *PLUGINS)
        if folder.name != "horovod"
        for word in ("--editable", str(folder))
    )
    made = make_environment(tmp_path_factory.mktemp("newest"), ours, OF_TORCH)
    installed = subprocess.run(
        [made, "-m", "pip", "install", "--quiet", "torch"],
        capture_output=True,
        text=True,
        check=False,
    )
    if installed.returncode:
        pytest.skip(f"no torch from an index: {installed.stderr.strip().splitlines()[-1]}")
    code = "from importlib.metadata import version; print(version('torch'))"
    newest = subprocess.run(
        [made, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    if newest == version("torch"):
        pytest.skip(f"torch {newest} is the newest, and runs all other tests")
    return made


def test_the_quick_tests_of_core_and_strategies_pass(python: Path) -> None:
    places = [
        "tests/engine",
        "tests/distributed",
        "tests/model",
        "tests/plugin",
        "tests/checkpoint",
    ]
    places += [f"plugins/{name}/tests" for name in STRATEGIES if name != "single"]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-m", QUICK, *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rank_warns(python: Path, tmp_path: Path, strategy: str) -> None:
    command = (
        f"train --strategy {strategy} --nproc {1 if strategy == 'single' else 2} --device cpu"
        " --max-steps 2"
    )
    done = subprocess.run(
        [python.parent / "distcore", *command.split(), "--model", "bert-tiny", "--out", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stdout + done.stderr
