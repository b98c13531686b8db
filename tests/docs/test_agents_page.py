"""AGENTS.md: its commands do what it says of them, in the order in which they stand there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from published_pages import ROOT, lines, workshop

from distcore.cli.main import main

PAGE = ROOT / "AGENTS.md"
pytestmark = pytest.mark.needs("distcore-tasks", "distcore-ddp", "distcore-workbench")


@pytest.mark.programs
def test_every_command_does_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = workshop(tmp_path / "page", PAGE)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for command in lines(PAGE, "sh"):
        words = shlex.split(command)
        assert words[0] == "distcore"
        is_there = (folder / "runs").exists()
        code = main(words[1:])
        said = capsys.readouterr()
        assert code == 0, f"{command}\n{said.err}"
        if "--json" in words:
            json.loads(said.out)
        if "--dry-run" in words or words[1] == "plan":
            assert (folder / "runs").exists() == is_there
    files = re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.M)
    assert len(files) == 5
    for name in files:
        assert list((folder / "runs/first").glob(name.replace("NNNNNNNN", "*").rstrip("/"))), name
    report = json.loads((folder / "runs/first/report.json").read_text())
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| `report.json`")]
    keys = re.findall(r"`(\w+)`", row)
    assert len(keys) == 6
    assert set(keys) <= report.keys()
    # Without --resume a folder with a run is refused, in one line with exit code 2.
    first_run = next(line for line in lines(PAGE, "sh") if "--save-every" in line)
    assert main(shlex.split(first_run)[1:]) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("error: ")
    assert "--resume auto" in last_line
