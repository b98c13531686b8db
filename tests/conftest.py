"""Fixtures that several rooms use."""

from __future__ import annotations

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


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 15 steps in one process, with checkpoints after 8, 12 and 15; not to be written to."""
    out = tmp_path_factory.mktemp("undisturbed")
    resume_job.run(out)
    return out
