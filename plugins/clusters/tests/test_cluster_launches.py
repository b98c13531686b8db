"""The launchers by the command line of ``distcore train``, and at work."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from distcore.cli.main import main
from distcore.launchers import Command, LaunchPlan
from distcore_clusters.ssh import SshLauncher


def test_ranks_know_by_which_flags_a_run_that_goes_on_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    Path("hosts").write_text("host0 slots=1\n")
    flags = "--launcher ssh --hostfile hosts --env 'A=b c' --env B=2 --bind-cores --nproc 1"
    assert main(["train", "--lr", "0.1", *shlex.split(flags), "--dry-run"]) == 0
    (command,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ssh ")]
    settings = shlex.split(shlex.split(command)[-1].partition("exec env ")[2])
    (again,) = [setting for setting in settings if setting.startswith("DISTCORE_LAUNCHER_FLAGS=")]
    assert shlex.split(again.partition("=")[2]) == [
        *(
            "--launcher",
            "ssh",
            "--hostfile",
            "hosts",
            "--env",
            "A=b c",
            "--env",
            "B=2",
            "--bind-cores",
            "--nproc",
            "1",
        )
    ]


def test_the_end_of_any_machine_is_seen_while_the_first_one_still_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = Command(words=("sleep", "60"), host="host0")
    second = Command(words=("sh", "-c", "exit 255"), host="host1")
    begun = time.monotonic()
    assert SshLauncher().run(LaunchPlan(commands=(first, second), patience=0.2)) == 3
    assert time.monotonic() - begun < 30
    assert (
        capsys.readouterr().err
        == "error: host1: ssh cannot reach it, or lost the connection; try: ssh host1 true\n"
    )
