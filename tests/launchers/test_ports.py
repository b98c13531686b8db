"""A port at which ranks were to meet, and at which another program listens already."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from distcore.config import RunConfig
from distcore.distributed.process_group import join_process_group, open_store
from distcore.errors import ConfigError
from distcore.plugin.strategy.contract import RankInfo

AGENT = [sys.executable, "-m", "distcore_clusters.agent", "--nproc-per-node", "1"]


@pytest.fixture
def port() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def line(port: int) -> str:
    return rf"port {port} is used by .+ \(process {os.getpid()}\); choose another "


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize(
    "meet", [lambda rank: join_process_group(RunConfig(device="cpu"), rank), open_store]
)
def test_the_variables_of_ranks_name_it(
    monkeypatch: pytest.MonkeyPatch, port: int, line: str, address: str, meet: object
) -> None:
    for name, value in {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert callable(meet)
    with pytest.raises(ConfigError, match=f"^{line}\\(MASTER_PORT=N "):
        meet(
            RankInfo(
                rank=0,
                size=2,
                local_size=2,
                launcher="torchrun",
                master_addr=address,
                master_port=port,
            )
        )


@pytest.mark.needs("distcore-clusters")
@pytest.mark.programs
@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        (
            "--nnodes 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{}",
            r"\(--launcher torchrun:HOST:PORT\)",
        ),
        (
            "--nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port {}",
            r"\(start the run again: ",
        ),
    ],
)
def test_an_agent_names_it_and_starts_no_rank(
    port: int, line: str, flags: str, instead: str
) -> None:
    command = [*AGENT, *flags.format(port).split(), "--no-python", "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"error: {line}{instead}.*\n", done.stderr)
