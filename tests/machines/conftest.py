"""Machines for the tests of this folder, a run in one process to compare with, and engines
that start on demand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import machine_job as job
import pytest
from machines import Machine, machines, why_not

MINUTES = 30
HERE = Path(__file__).parent
PROGRAMS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": PROGRAMS}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("machines")
            item.add_marker("ranks")
            item.add_marker(pytest.mark.timeout(60 * MINUTES))


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """The environment of every program of these tests: no GPU, a thread per
    rank, this interpreter's programs.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, environment: None
) -> Iterator[tuple[Machine, ...]]:
    """Two machines for all tests; a test that turns one off heals it."""
    if reason := why_not():
        pytest.skip(reason)
    with machines(tmp_path_factory.mktemp("machines")) as made:
        yield made


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory, environment: None) -> Path:
    """The run folder of the job in one process, undisturbed."""
    folder = tmp_path_factory.mktemp("single")
    words = [
        sys.executable,
        "-m",
        "distcore",
        "train",
        *job.FLAGS.split(),
        "--max-steps",
        str(job.STEPS),
    ]
    subprocess.run(
        [*words, "--save-every", "0", "--out", "run"],
        cwd=folder,
        check=True,
        timeout=500,
        capture_output=True,
    )
    return folder / "run"
