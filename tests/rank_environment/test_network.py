"""A rank and its machines: names that do not resolve, its address, the interface, and
the error of each.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from distcore.errors import ConfigError
from distcore.launchers.processes.failures import Failure
from distcore.plugin.strategy.contract import RankInfo
from distcore.rank_environment import network

FAR = RankInfo(rank=1, size=2, launcher="slurm", master_addr="127.0.0.1", master_port=29500)
"""A rank alone on its machine."""


def test_a_name_that_does_not_resolve_is_one_line_within_seconds() -> None:
    rank_info = RankInfo(
        rank=1, size=2, launcher="slurm", master_addr="gpu09.invalid", master_port=1
    )
    with pytest.raises(
        ConfigError,
        match=r"^slurm: rank 0's machine is 'gpu09\.invalid', a name for which .* finds no",
    ):
        network.prepare_network(rank_info, patience=0.3)


def test_ranks_of_one_machine_need_no_name() -> None:
    network.prepare_network(
        RankInfo(rank=1, size=2, local_size=2, master_addr="gpu09.invalid"), patience=0
    )
    assert network.where(RankInfo(size=2, local_size=2)) == ""


def test_gloo_gets_an_interface_where_the_own_name_is_a_loopback_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what is set below goes with the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    network.prepare_network(FAR)
    assert os.environ["GLOO_SOCKET_IFNAME"] == network.interface_of("127.0.0.1")


def test_an_interface_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    network.prepare_network(FAR)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_machine_whose_own_name_is_a_loopback_address_knows_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a fresh Debian, whose hosts file has ``127.0.1.1 host0``."""
    monkeypatch.setattr(
        network, "_addresses_of", {"host0": {"127.0.1.1"}, "host1": {"192.0.2.7"}}.get
    )
    assert network.is_here("host0")
    assert not network.is_here("host1")


def test_the_address_told_to_others_is_one_that_they_can_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "_route_to", {"host0": "127.0.0.1", "localhost": "::1"}.get)
    interfaces = [("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("eth1", "10.1.0.7")]
    kinds = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address)]
        for name, address in interfaces
    }
    monkeypatch.setattr(network, "_interfaces", lambda: kinds)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert network.address_toward("host0") == "10.0.0.7"
    assert network.address_toward("localhost") == "::1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert network.address_toward("host0") == "10.1.0.7"


def test_a_lost_peer_is_told_with_machine_address_and_likely_cause(tmp_path: Path) -> None:
    failure = Failure(rank=1, kind="lost", cause="lost its peers: RuntimeError: timed out", when=0)
    assert (
        failure.line(2, tmp_path, network.where(FAR))
        == f"rank 1 of 2 on {socket.gethostname()} (127.0.0.1; rank 0 at 127.0.0.1:29500) failed:"
        " lost its peers: RuntimeError: timed out; likely another rank, its machine or the link"
        f" to it is gone; traceback in {tmp_path}"
    )


@pytest.mark.programs
def test_a_traceback_comes_home_to_the_run_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from distcore.launchers.processes.failures import"
        " run_as_rank\nhere = Path(sys.argv[1])\nrun_as_rank(lambda: 1 / 0, here / 'node', 3, 4,"
        " 'gpu1 (10.0.0.1)', lambda: here / 'errors')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    file = tmp_path / "errors/rank-3.txt"
    assert done.returncode == 3
    assert done.stderr.startswith(
        "error: rank 3 of 4 on gpu1 (10.0.0.1) failed: ZeroDivisionError: division by zero; "
    )
    assert done.stderr.endswith(f"traceback in {file}\n")
    assert "1 / 0" in file.read_text() or "ZeroDivisionError" in file.read_text()


@pytest.mark.programs
def test_each_rank_prints_to_a_file_of_its_own_and_errors_to_the_screen_too(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from distcore.launchers.processes.failures import"
        " run_as_rank\n"
        "rank = int(sys.argv[2])\n"
        # in one write: print makes two of it, and an error may come between them
        "hello = f'hello of {rank}\\n'\n"
        "run_as_rank(lambda: (sys.stdout.write(hello), 1 / rank), Path(sys.argv[1], sys.argv[2]),"
        " rank, 2)\n"
    )
    environ = {**os.environ, "DISTCORE_LOG_DIR": str(tmp_path / "logs")}
    done = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), rank],
            env=environ,
            capture_output=True,
            text=True,
        )
        for rank in ("0", "1")
    ]
    logs = [(tmp_path / f"logs/rank-{rank}.log").read_text() for rank in range(2)]
    assert (done[0].stdout, done[1].stdout) == ("hello of 0\n", "")
    assert done[0].stderr.count("error: rank 0 of 2 failed: ZeroDivisionError") == 1
    assert logs[1] == "hello of 1\n"
    assert "hello of 0\n" in logs[0]
    assert "error: rank 0 of 2 failed" in logs[0]
