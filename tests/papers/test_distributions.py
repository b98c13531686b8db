"""The built distributions, installed as a user would into an environment that has nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import distcore
import distcore_ddp

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def empty_environment(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has ``distcore[ddp]`` from the wheels and nothing of this checkout."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = ["--constraint", str(ROOT / "constraints.txt"), "--find-links", str(distributions)]
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *constraints]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, "distcore[ddp]", "pytest", "hatchling"], check=True)
    return folder / "bin"


def run(command: str, environment: Path, folder: Path) -> str:
    """Run a command line in ``folder`` with the programs of ``environment``; what it prints."""
    variables = os.environ | {"PATH": f"{environment}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def strategies(environment: Path, folder: Path) -> dict[str, str]:
    shown = json.loads(run("distcore strategies --json", environment, folder))
    return {strategy["name"]: strategy["distribution"] for strategy in shown}


@pytest.mark.programs
@pytest.mark.timeout(900)
def test_distcore_with_an_extra_installs_from_wheels_and_finds_its_strategies(
    empty_environment: Path, tmp_path: Path
) -> None:
    assert strategies(empty_environment, tmp_path) == {
        "ddp": f"distcore-ddp {distcore_ddp.__version__}",
        "dp": f"distcore-ddp {distcore_ddp.__version__}",
        "single": f"distcore {distcore.__version__}",
    }


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_a_strangers_strategy_is_installed_found_checked_and_trains(empty_environment: Path, tmp_path: Path) -> None:
    package = shutil.copytree(ROOT / "examples/strategy-localsgd", tmp_path / "strategy-localsgd")
    run(f"pip install --quiet --no-build-isolation --no-deps {package}", empty_environment, tmp_path)
    assert strategies(empty_environment, tmp_path)["localsgd"] == "distcore-localsgd 0.1.0"
    run(f"python -m pytest -q {package}/tests", empty_environment, tmp_path)
    apart = "--set strategy_options.every=4 --model bert-tiny --max-steps 8 --out apart"
    assert "evaluated" in run(f"distcore train --strategy localsgd --nproc 2 {apart}", empty_environment, tmp_path)


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_the_skeleton_of_a_strategy_passes_its_own_contract(empty_environment: Path, tmp_path: Path) -> None:
    run("distcore new strategy my-own", empty_environment, tmp_path)
    run("pip install --quiet --no-build-isolation --no-deps ./distcore-my-own", empty_environment, tmp_path)
    run("python -m pytest -q distcore-my-own", empty_environment, tmp_path)


@pytest.mark.programs
@pytest.mark.timeout(900)
def test_the_skeleton_of_a_task_passes_its_own_contract(empty_environment: Path, tmp_path: Path) -> None:
    run("distcore new task my-task", empty_environment, tmp_path)
    run("pip install --quiet --no-build-isolation --no-deps ./distcore-my-task", empty_environment, tmp_path)
    run("python -m pytest -q distcore-my-task", empty_environment, tmp_path)
    assert "my-task" in run("distcore tasks", empty_environment, tmp_path)
    job = "--task my-task --set task_options.points=500 --epochs 2 --out moons"
    assert "accuracy" in run(f"distcore train {job}", empty_environment, tmp_path)
