"""The built distributions, installed as a user would into an environment that has nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import distcore
import distcore_ddp
from distcore import registry

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def empty_environment(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has ``distcore[ddp]`` from the wheels and
    nothing of this checkout.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = [
        "--constraint",
        str(ROOT / "constraints.txt"),
        "--find-links",
        str(distributions),
    ]
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *constraints]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, "distcore[ddp]", "pytest", "hatchling"], check=True)
    return folder / "bin"


def run(command: str, environment: Path, folder: Path) -> str:
    """Run a command line in ``folder`` with the programs of ``environment``; what it prints."""
    variables = os.environ | {
        "PATH": f"{environment}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def strategies(environment: Path, folder: Path) -> dict[str, str]:
    shown = json.loads(run("distcore strategies --json", environment, folder))
    return {strategy["name"]: strategy["distribution"] for strategy in shown}


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.timeout(900)
def test_distcore_with_an_extra_installs_from_wheels_and_finds_its_strategies(
    empty_environment: Path, tmp_path: Path
) -> None:
    assert strategies(empty_environment, tmp_path) == {
        "ddp": f"distcore-ddp {distcore_ddp.__version__}",
        "dp": f"distcore-ddp {distcore_ddp.__version__}",
        "single": f"distcore-core {distcore.__version__}",
    }


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_a_strangers_strategy_is_installed_found_checked_and_trains(
    empty_environment: Path, tmp_path: Path
) -> None:
    package = shutil.copytree(ROOT / "examples/strategy-localsgd", tmp_path / "strategy-localsgd")
    run(
        f"pip install --quiet --no-build-isolation --no-deps {package}", empty_environment, tmp_path
    )
    assert strategies(empty_environment, tmp_path)["localsgd"] == "distcore-localsgd 0.1.0"
    run(f"python -m pytest -q {package}/tests", empty_environment, tmp_path)
    apart = "--set strategy_options.every=4 --model bert-tiny --max-steps 8 --out apart"
    assert "run folder" in run(
        f"distcore train --strategy localsgd --nproc 2 {apart}", empty_environment, tmp_path
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment of its own, in which all that this one has
    can be imported, too.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "here.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    return folder / "bin"


def write_and_install(kind: str, environment: Path, folder: Path) -> None:
    """Write the package of ``my-strategy`` and its like, install it, and run its own tests."""
    run(f"python -m distcore new {kind} my-{kind}", environment, folder)
    run(
        f"python -m pip install --quiet --no-build-isolation --no-deps ./distcore-my-{kind}",
        environment,
        folder,
    )
    run(f"python -m pytest -q distcore-my-{kind}", environment, folder)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_the_skeleton_of_a_strategy_passes_its_own_contract(
    environment: Path, tmp_path: Path
) -> None:
    write_and_install("strategy", environment, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", sorted(registry.offers("suites")))
def test_the_skeleton_of_another_plugin_keeps_the_laws_of_its_kind(
    kind: str, environment: Path, tmp_path: Path
) -> None:
    write_and_install(kind, environment, tmp_path)


@pytest.mark.programs
@pytest.mark.timeout(300)
def test_the_skeleton_of_a_task_passes_its_own_contract_and_trains(
    environment: Path, tmp_path: Path
) -> None:
    write_and_install("task", environment, tmp_path)
    assert "my-task" in run("python -m distcore tasks", environment, tmp_path)
    job = "--task my-task --set task_options.points=500 --epochs 2 --out moons"
    assert "accuracy" in run(f"python -m distcore train {job} 2>&1", environment, tmp_path)
