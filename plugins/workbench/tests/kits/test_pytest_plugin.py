"""``pytest --distcore KIND=NAME``: laws as tests of pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BROKEN = Path(__file__).with_name("broken_optimizers.py")


def pytest_run(folder: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.programs
def test_each_law_is_a_test_with_the_line_of_the_command(tmp_path: Path) -> None:
    said = pytest_run(
        tmp_path, "--distcore", f"optimizer={BROKEN}:Uphill", "-k", "down or apart or decay"
    )
    assert "FAILED" in said
    assert "bound 1; " in said
    assert "the sign or the size of a step is wrong" in said
    assert f"PASSED distcore::optimizer={BROKEN}:Uphill::parameters-apart" in said.splitlines()
    assert "1 failed, 2 passed, 10 deselected in" in said.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.programs
def test_an_argument_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    said = pytest_run(
        tmp_path,
        "--distcore",
        "optimizer=lion",
        "--distcore-set",
        "optimizer.beta=1",
        "-k",
        "down or own",
    )
    assert "error: unknown key 'optimizer.beta'" in said
    assert "1 failed, 1 passed, 12 deselected in" in said.splitlines()[-1]
