"""A test that starts ranks without the mark fails, whether it starts them
itself or in another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import rank_watch

HERE = (
    "def test_it():\n    from distcore import launch\n    assert launch(int, nproc=1, timeout=60)"
    " == [0]\n"
)
ELSEWHERE = """import subprocess, sys
def test_it():
    launching = "from distcore import launch; launch(int, nproc=1, timeout=60)"
    subprocess.run([sys.executable, "-c", launching], check=True)
"""
JOINED = """import os, subprocess, sys
def test_it():
    rank = os.environ | {"RANK": "0", "WORLD_SIZE": "2"}
    subprocess.run([sys.executable, "-c", ""], env=rank, check=True)
"""
MARKED = f"import pytest\npytestmark = pytest.mark.ranks\n{HERE}"
NONE = (
    "def test_it():\n    import subprocess, sys\n    subprocess.run([sys.executable, '-c', ''],"
    " check=True)\n"
)


def run(test: str, folder: Path, *arguments: str) -> str:
    """Output of pytest for ``test`` in a project that has the plugin."""
    (folder / "test_one.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = ranks: of ranks\n")
    paths = [str(Path(rank_watch.__file__).parent), os.environ["PYTHONPATH"]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "rank_watch", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.ranks
@pytest.mark.parametrize("test", [HERE, ELSEWHERE, JOINED], ids=["here", "elsewhere", "joined"])
def test_ranks_without_the_mark_fail_the_test(test: str, tmp_path: Path) -> None:
    said = run(test, tmp_path)
    assert "test_one.py::test_it starts ranks: mark it with @pytest.mark.ranks" in said
    assert "1 failed" in said


@pytest.mark.ranks
def test_a_test_with_the_mark_passes_and_can_be_left_out(tmp_path: Path) -> None:
    assert "1 passed" in run(MARKED, tmp_path)
    assert "1 deselected" in run(MARKED, tmp_path, "-m", "not ranks")


@pytest.mark.programs
def test_a_process_that_is_no_rank_needs_no_mark(tmp_path: Path) -> None:
    assert "1 passed" in run(NONE, tmp_path)
