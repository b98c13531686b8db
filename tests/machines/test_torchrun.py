"""``--launcher torchrun`` on two machines: every strategy, and machines that come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import machine_job as job
import pytest
from machines import PATIENCE, Machine, wait_for

from distcore import registry

TIMEOUT, MARGIN = 20, 90
"""Seconds after which ranks give each other up, and beside them for agents that end
on a busy machine.
"""
STRATEGIES = ("ddp", "fsdp", "deepspeed", "horovod", "accelerate")


def start(machine: Machine, folder: Path, flags: str) -> subprocess.Popen[str]:
    words = (
        f"distcore train {job.FLAGS} --launcher torchrun:node0:29500 --nproc 1 --out run {flags}"
    )
    return machine.start(*words.split(), folder=folder)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_the_losses_of_one_process(
    strategy: str, nodes: tuple[Machine, ...], single: Path, tmp_path: Path
) -> None:
    if strategy not in registry.offers("strategies"):
        pytest.skip(f"{strategy} is not installed")
    agents = [
        start(node, tmp_path, f"--nodes 2 --strategy {strategy} --max-steps 12") for node in nodes
    ]
    said = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    job.is_same(tmp_path / "run", single, 12)


def test_a_machine_comes_and_another_dies_and_the_run_goes_on(
    nodes: tuple[Machine, ...], single: Path, tmp_path: Path
) -> None:
    flags = (
        "--nodes 1:2 --max-restarts 2 --strategy ddp --max-steps 120 --resume auto --log-dir logs"
        " --set timeout=60 --set task_options.seconds=0.3"
    )
    first = start(nodes[0], tmp_path, flags)
    wait_for((tmp_path / "run/checkpoints/step-00000005").exists, first)
    second = start(nodes[1], tmp_path, flags)
    joined = tmp_path / "logs/rank-1.log"
    wait_for(lambda: joined.exists(), first, second)
    before = max(job.losses(tmp_path / "run"))
    wait_for(lambda: max(job.losses(tmp_path / "run")) > before + 6, first, second)
    nodes[1].kill()
    try:
        said = first.communicate(timeout=PATIENCE)[0]
    finally:
        nodes[1].turn_on()
    assert first.returncode == 0, said
    job.is_same(tmp_path / "run", single, 120)


def test_a_killed_agent_takes_its_ranks_along_and_another_one_goes_on(
    nodes: tuple[Machine, ...], single: Path, tmp_path: Path
) -> None:
    flags = (
        "--nodes 2 --max-restarts 2 --strategy ddp --max-steps 40 --resume auto --set timeout=60 "
        "--set task_options.seconds=0.3"
    )
    first, second = (start(node, tmp_path, flags) for node in nodes)
    wait_for((tmp_path / "run/checkpoints/step-00000005").exists, first, second)
    (agent,) = nodes[1].find("distcore_clusters.agent")
    os.kill(agent, signal.SIGKILL)
    # within timeout: it is not the lost peer that ends them
    wait_for(lambda: not nodes[1].ranks(), first, seconds=30)
    second = start(nodes[1], tmp_path, flags)
    said = [process.communicate(timeout=PATIENCE)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], said
    assert not [text for text in said if "Traceback" in text or "frame #" in text], said
    job.is_same(tmp_path / "run", single, 40)


def test_a_link_that_is_cut_ends_both_machines_within_the_timeout_with_a_line_that_says_where(
    nodes: tuple[Machine, ...], tmp_path: Path
) -> None:
    flags = (
        f"--nodes 2 --strategy ddp --max-steps 4000 --set timeout={TIMEOUT} --set"
        " task_options.seconds=0.2"
    )
    agents = [start(node, tmp_path, flags) for node in nodes]
    wait_for((tmp_path / "run/checkpoints/step-00000005").exists, *agents)
    nodes[1].cut()
    begun = time.monotonic()
    try:
        said = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
    finally:
        nodes[1].heal()
    assert time.monotonic() - begun < TIMEOUT + MARGIN
    assert [agent.returncode for agent in agents] == [3, 3], said
    for node, text in zip(nodes, said, strict=True):
        (line,) = [line for line in text.splitlines() if line.startswith("error: rank ")]
        assert f" on {node.name} ({node.address}; rank 0 at {nodes[0].address}:" in line
        assert "; likely another rank, its machine or the link to it is gone; " in line
        assert "Traceback" not in text
