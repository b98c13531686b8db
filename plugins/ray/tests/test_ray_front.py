"""The plan of ``--launcher ray``, and what it says without Ray. On a real cluster: tests/machines/test_ray.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from distcore import ConfigError
from distcore.fronts import Here, Spec
from distcore_ray.front import RayFront

SPEC = Spec(
    train=("c.yaml",), nproc=2, here=Here(python="/py", environment={"NCCL_DEBUG": "INFO"}), global_batch_size=32
)


def line(**asked: Any) -> str:
    (command,) = RayFront().plan(replace(SPEC, **asked)).commands
    return str(command)


def test_the_driver_gets_the_machines_and_the_command_of_a_rank() -> None:
    elastic = {"nodes": (1, 2), "out": "o", "resume": "auto", "timeout": 60, "value": "10.0.0.1:6379"}
    assert line(**elastic, environment={"A": "b c"}, device="cuda") == (
        "/py -m distcore_ray.driver --address 10.0.0.1:6379 --nodes 1 2 --nproc 2 --max-restarts 0 --timeout 60 --gpus "
        "--env=NCCL_DEBUG=INFO '--env=A=b c' -- /py -m distcore train c.yaml --set nproc=auto"
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"nproc": None}, r"^--launcher ray: say how many ranks each machine gets: --nproc N$"),
        ({"include": "host0"}, r"^--launcher ray takes no --include: Ray has its own machines"),
        ({"nodes": (1, 2)}, r"^--nodes 1:2 starts ranks again, .* add --out DIR --resume auto$"),
    ],
)
def test_what_it_cannot_start_is_one_line(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        line(**asked)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_one_line_says_how_to_install_it() -> None:
    words = [sys.executable, "-m", "distcore_ray.driver", "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: --launcher ray: there is no ray here; pip install 'distcore-ray[ray]'\n"
