"""A strategy of one's own that is installed beside the project changes no test of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from work_folder import install

ROOT = Path(__file__).parents[2]


@pytest.mark.programs
def test_the_tests_do_not_see_a_strategy_of_somebody_else(tmp_path: Path) -> None:
    install(
        tmp_path,
        "distcore-localsgd",
        "[distcore.strategies]\nlocalsgd = distcore_localsgd:LocalSGD\n",
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-q", "tests/docs/test_which_strategy.py"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("asked", "blocked"),
    [("tests/docs", True), ("distcore-localsgd/tests/test_it.py::test", False)],
)
def test_a_strategy_of_ones_own_is_seen_by_its_own_tests(
    tmp_path: Path, asked: str, blocked: bool
) -> None:
    install(
        tmp_path,
        "distcore-localsgd",
        "[distcore.strategies]\nlocalsgd = distcore_localsgd:LocalSGD\n",
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    code = "import conftest, os; print(os.environ['DISTCORE_BLOCK_PLUGINS'])"
    done = subprocess.run(
        [sys.executable, "-c", code, asked],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("distcore-localsgd" in done.stdout) == blocked
