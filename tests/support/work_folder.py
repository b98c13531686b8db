"""A work folder with a small data file and a separate cache, isolated from the user's settings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

STRANGERS = os.environ.get("DISTCORE_BLOCK_PLUGINS", "")
"""Modules that conftest.py blocks, for a test that unblocks others."""


def write_rows(folder: Path) -> Path:
    """Write ``rows.json``: 40 rows in two classes, which a model learns in a few steps."""
    file = folder / "rows.json"
    file.write_text(
        json.dumps([[f"{'good' if n % 2 else 'bad'} text {n}", n % 2] for n in range(40)])
    )
    return file


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make ``folder`` the current one, with a cache of its own; no launcher's environment,
    none of ours blocked.
    """
    patch.chdir(folder)
    patch.setenv("DISTCORE_CACHE", str(folder / "cache"))
    patch.setenv("DISTCORE_BLOCK_PLUGINS", STRANGERS)
    for variable in ("RANK", "WORLD_SIZE", "DISTCORE_LOAD_PLUGINS"):
        patch.delenv(variable, raising=False)


def install(site: Path, name: str, entry_points: str) -> None:
    """Leave in ``site``, a folder of ``sys.path``, the metadata that pip would leave
    for distribution ``name`` 1.0.
    """
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
