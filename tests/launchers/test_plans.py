"""The commands that each launcher would start, word for word, and its
refusals before anything starts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distcore.errors import ConfigError
from distcore.launchers import Command, Here, Host, Launcher, LaunchPlan, LaunchSpec, run_command
from distcore.launchers.local import LocalLauncher

HERE = Here(folder="/work dir", python="/py", job="job-7", environment={"NCCL_DEBUG": "INFO"})
HOSTS = (Host(name="host0", slots=2), Host(name="host1", slots=2, chosen=(3, 1)))
SPEC = LaunchSpec(train=("c.yaml", "--lr", "0.1"), environment={"A": "b c"}, here=HERE)


def lines(launcher: Launcher, **asked: Any) -> list[str]:
    return str(launcher.plan(replace(SPEC, **asked))).splitlines()


def test_local_is_the_command_without_the_flags_of_starting() -> None:
    host = Host(name="localhost", slots=2, chosen=(2, 0))
    assert lines(LocalLauncher(), hosts=(host,), log_dir="/logs", bind_cores="all") == [
        "A='b c' DISTCORE_LOG_DIR=/logs DISTCORE_BIND_CORES=all CUDA_VISIBLE_DEVICES=2,0 "
        "/py -m distcore train c.yaml --lr 0.1 --nproc 2"
    ]


def test_local_leaves_the_number_of_ranks_to_the_config() -> None:
    assert lines(LocalLauncher()) == ["A='b c' /py -m distcore train c.yaml --lr 0.1"]


REFUSED: list[tuple[Launcher, dict[str, Any], str]] = [
    (
        LocalLauncher(),
        {"nodes": (2, 2)},
        r"^--launcher local takes no --nodes: it starts ranks here",
    ),
    (
        LocalLauncher(),
        {"hosts": HOSTS},
        r"^--launcher local starts ranks here, not on host0, host1; --launcher ssh",
    ),
]


@pytest.mark.parametrize(
    ("launcher", "asked", "message"), REFUSED, ids=[message for _, _, message in REFUSED]
)
def test_a_job_that_a_launcher_cannot_start_is_one_line(
    launcher: Launcher, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        launcher.plan(replace(SPEC, **asked))
    assert "\n" not in str(caught.value)


def test_a_program_that_is_missing_is_found_before_anything_is_written(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    script = str(tmp_path / "logs/job.sh")
    plan = LaunchPlan(
        commands=(Command(words=("sbatch", script)),), files={script: "#!/bin/bash\n"}
    )
    with pytest.raises(
        ConfigError, match=r"^no program 'sbatch' on PATH; --dry-run prints what would be started$"
    ):
        run_command(plan)
    assert not (tmp_path / "logs").exists()
