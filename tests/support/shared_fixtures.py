"""Fixtures that several rooms use."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import resume_job
import work_folder as work

from distcore.cli.main import main


@pytest.fixture(autouse=True)
def _untouched_logger() -> None:
    """The logger ``distcore`` as an import leaves it.

    A command of another test has set it up for the screen, and libraries change the root logger
    or disable all others.
    """
    logging.disable(logging.NOTSET)
    # pytest's, the same in all tests; libraries set their level
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.NOTSET)
    log = logging.getLogger("distcore")
    log.handlers, log.propagate, log.disabled = [], True, False
    log.setLevel(logging.WARNING)


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
    """The folder of a run of 15 steps in one process, with checkpoints after 8, 12 and 15; not
    to be written to.
    """
    out = tmp_path_factory.mktemp("undisturbed")
    resume_job.run(out)
    return out


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with checkpoints after 5 and 6 steps, trained on ``rows.jsonl`` beside it;
    not to be written to.
    """
    folder = tmp_path_factory.mktemp("trained")
    rows = [
        {"text": f"{word} {number}", "label": word}
        for number in range(60)
        for word in ("good", "bad")
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (
        "--model bert-tiny --max-steps 6 --save-every 5 --keep-last 3 --set schedule.name=constant"
    )
    assert main(f"train --data {folder}/rows.jsonl {flags} --out {folder}/run".split()) == 0
    return folder / "run"
