"""A disk that is really full in the middle of a save: one line, the previous checkpoint intact, and
it can go on.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from resume_job import SCRIPT, at_step

from distcore.checkpoint import Checkpoint, find, read_tensors

pytestmark = pytest.mark.ranks

WAYS = {
    "in line": ("nproc=1", "checkpoints={keep_last: 3, best: null, asynchronous: false}"),
    "beside training": ("nproc=1",),
    "two ranks": ("nproc=2", "strategy=ddp"),
}
EACH = [pytest.param(way, marks=pytest.mark.slow) if way == "in line" else way for way in WAYS]
PAGE = 4096


def go_on(
    out: Path, way: str, before: Callable[[], object] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", SCRIPT, str(out), "resume=auto", *WAYS[way]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, preexec_fn=before
    )


def check_refused(done: subprocess.CompletedProcess[str], out: Path, reason: str) -> None:
    """One line, the previous checkpoint whole, nothing left of the new one."""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"error: checkpoint {out}/checkpoints/step-00000012 could not be written: "
    )
    assert reason in line
    assert done.returncode == 2
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000008"]
    Checkpoint(find("auto", out) or Path()).verify()


def goes_on(out: Path, way: str, undisturbed: Path) -> None:
    done = go_on(out, way)
    assert done.returncode == 0, done.stderr
    resumed, expected = (
        read_tensors(one / "checkpoints/step-00000015") for one in (out, undisturbed)
    )
    if way != "two ranks":  # which draw other dropout masks
        assert all(torch.equal(resumed[name], expected[name]) for name in expected)


@pytest.mark.needs("distcore-ddp")
@pytest.mark.parametrize("way", EACH)
def test_no_space_left(undisturbed: Path, small_disk: Path, way: str) -> None:
    out = at_step(8, undisturbed, small_disk / "run")
    size = sum(-(-file.stat().st_size // PAGE) for file in out.glob("checkpoints/*/*"))
    free = os.statvfs(small_disk).f_bavail - size * 2 // 3
    (small_disk / "ballast").write_bytes(bytes(free * PAGE))
    check_refused(go_on(out, way), out, "No space left on device")
    (small_disk / "ballast").unlink()
    goes_on(out, way, undisturbed)


@pytest.mark.needs("distcore-ddp")
@pytest.mark.parametrize("way", EACH)
def test_a_limit_on_the_size_of_files(undisturbed: Path, tmp_path: Path, way: str) -> None:
    out = at_step(8, undisturbed, tmp_path / "run")
    largest = max(file.stat().st_size for file in out.glob("checkpoints/*/*.safetensors"))
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (largest // 3,) * 2)
    check_refused(go_on(out, way, limit), out, "File too large")
    goes_on(out, way, undisturbed)
