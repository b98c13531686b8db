"""``--launcher ray`` on a Ray cluster of two machines, from an environment of its own that has Ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import machine_job as job
import pytest
from machines import Machine, wait_for

BIN = Path(__file__).parents[2] / "build/machines/bin"
PORT = 6379


@pytest.fixture
def ray(nodes: tuple[Machine, ...], tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables under which Ray's environment finds distcore; a head on the first machine, a worker on the other."""
    if not (BIN / "ray").exists():
        pytest.skip(f"no {BIN / 'ray'}: make machines makes it")
    ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site,) = BIN.parent.glob("lib/python*/site-packages")
    (site / "distcore-tests.pth").write_text(ours)
    given = {"PATH": f"{BIN}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    begun = []
    for node in nodes:
        place = ("--head", f"--port={PORT}", "--include-dashboard=false") if node is nodes[0] else (
            f"--address={nodes[0].address}:{PORT}",)  # fmt: skip
        words = ("ray", "start", "--block", f"--node-ip-address={node.address}", "--num-cpus=1", "--num-gpus=0")
        extra = (f"--temp-dir={temporary(node)}", "--object-store-memory=100000000")
        begun.append(node.start(*words, *place, *extra, folder=tmp_path, environment=given, stdout=subprocess.DEVNULL))
        if node is nodes[0]:
            wait_for(lambda: node.find("gcs_server"), *begun)  # noqa: B023  # called at once
    yield given
    for node in nodes:
        node.end()
        node.turn_on()
        shutil.rmtree(temporary(node), ignore_errors=True)


def temporary(node: Machine) -> Path:
    """Return a folder with a short name, for the names of sockets below it may not be long."""
    return Path(f"/tmp/r{os.getpid()}-{node.name}")


def start(node: Machine, folder: Path, environment: dict[str, str], flags: str) -> subprocess.Popen[str]:
    words = (
        f"python -m distcore train {job.FLAGS} --launcher ray:{node.address}:{PORT} --nproc 1 --strategy ddp --out run "
        f"--resume auto --set timeout=30 {flags}"
    )
    return node.start(*words.split(), folder=folder, environment=environment)


def test_a_lost_machine_leaves_a_run_that_goes_on_with_the_losses_of_one_process(
    ray: dict[str, str], nodes: tuple[Machine, ...], single: Path, tmp_path: Path
) -> None:
    front = start(nodes[0], tmp_path, ray, "--nodes 1:2 --max-steps 60 --set task_options.seconds=0.4")
    wait_for(lambda: all(node.ranks() for node in nodes), front)
    wait_for((tmp_path / "run/checkpoints/step-00000005").exists, front)
    nodes[1].kill()
    try:
        said = front.communicate(timeout=250)[0]
    finally:
        nodes[1].heal()  # the end of the cluster turns it on
    assert front.returncode == 0, said
    assert f"ray: lost the machine {nodes[1].address}" in said
    job.is_same(tmp_path / "run", single, 60)
