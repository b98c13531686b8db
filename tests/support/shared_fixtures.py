"""Fixtures that several rooms use."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import resume_job
import work_folder as work


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with ``rows.json`` in it."""
    work.write_rows(tmp_path)
    work.enter(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for 2 MiB."""
    (tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path / "disk")]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path / "disk"
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 15 steps in one process, with checkpoints after 8, 12 and 15; not to be written to."""
    out = tmp_path_factory.mktemp("undisturbed")
    resume_job.run(out)
    return out
