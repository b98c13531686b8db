"""DeepSpeed beside other distributions: what migrate knows of it, and what a
broken one costs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distcore.testing import problem
from distcore_deepspeed.config_keys import SECTIONS
from distcore_migrate import deepspeed_config

JOB = (
    f"train --strategy ddp --nproc 1 --task {problem.__file__}:Problem --lr 0.01 --max-steps 1"
    " --set device=cpu"
)


def test_every_section_of_the_installed_deepspeed_has_a_row_in_migrate() -> None:
    assert set(deepspeed_config.ROWS) >= SECTIONS


@pytest.mark.programs
def test_a_broken_deepspeed_costs_the_strategy_of_another_distribution_nothing(
    tmp_path: Path,
) -> None:
    package = tmp_path / "path" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        'raise OSError("libcudart.so.12: cannot open shared object file")\n'
    )
    command = [sys.executable, "-m", "distcore", *JOB.split(), "--out", str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    assert "libcudart" not in ended.stdout + ended.stderr
