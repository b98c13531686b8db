"""Shards that the packages of others write, which are installed in an environment of their own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PYTHON = Path(__file__).parents[2] / "build/shards/bin/python"


def write(out: Path, rows: Sequence[dict[str, Any]], *forms: str) -> Path:
    """Write the rows as ``out/FORM`` in forms of ``write_shards.py``; skip the
    test without that environment.
    """
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}: make shards makes it")
    command = [str(PYTHON), str(Path(__file__).with_name("write_shards.py")), str(out), *forms]
    done = subprocess.run(
        command,
        input=json.dumps(list(rows)),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return out


def written(out: Path, form: str) -> Path:
    """Return the shards of a form; skip the test where the package that writes
    it is not installed.
    """
    if not (out / form).is_dir():
        pytest.skip(f"no package that writes {form} for {PYTHON}: make shards installs it")
    return out / form
