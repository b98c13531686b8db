"""The wheels, installed as a user would into an environment that has nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for source in (ROOT, *(file.parent for file in sorted(ROOT.glob("plugins/*/pyproject.toml")))):
        command = [
            sys.executable,
            "-m",
            "build",
            "--quiet",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(folder),
            str(source),
        ]
        subprocess.run(command, check=True)
    return folder


@pytest.mark.timeout(900)
def test_distcore_with_an_extra_installs_from_wheels_and_finds_its_strategies(wheels: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    constraints = str(ROOT / "constraints.txt")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", constraints, "--find-links", str(wheels)]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, "distcore[ddp]"], check=True)
    shown = subprocess.run(
        [str(python.with_name("distcore")), "strategies", "--json"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    found = {strategy["name"]: strategy["distribution"] for strategy in json.loads(shown.stdout)}
    assert found == {"ddp": "distcore-ddp 0.1.0", "dp": "distcore-ddp 0.1.0", "single": "distcore 0.1.0"}


def test_every_plugin_has_a_wheel(wheels: Path) -> None:
    plugins = {f"distcore_{file.parent.name}" for file in ROOT.glob("plugins/*/pyproject.toml")}
    assert {wheel.name.split("-")[0] for wheel in wheels.glob("*.whl")} == plugins | {"distcore"}
