"""Ranks die with the agent that started them, also where it is killed and cannot end them."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

RANK = """
import time
from distcore.launchers.processes.start_method import die_with_agent
die_with_agent()
print("joined", flush=True)
time.sleep(600)
"""
AGENT = f"""
import os, subprocess, sys
os.environ["DISTCORE_AGENT"] = str(os.getpid() + int(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", {RANK!r}])
print(child.pid, flush=True)
print("status", child.wait(), flush=True)
"""


def start(off: int) -> subprocess.Popen[str]:
    """Start an agent that is right about its process id, or ``off`` from it; it starts a rank
    and prints its id.
    """
    return subprocess.Popen(
        [sys.executable, "-c", AGENT, str(off)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.programs
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have nothing like it")
def test_a_rank_dies_with_an_agent_that_is_killed() -> None:
    agent = start(0)
    assert agent.stdout is not None
    rank = psutil.Process(int(agent.stdout.readline()))
    assert agent.stdout.readline() == "joined\n"
    agent.kill()
    agent.wait()
    assert not psutil.wait_procs([rank], timeout=30)[1]


@pytest.mark.programs
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have nothing like it")
def test_a_rank_whose_agent_is_already_dead_ends_at_once() -> None:
    said, _ = start(1).communicate(timeout=60)
    assert said.splitlines()[1:] == ["status 1"]
