"""Prepared data go to a cache of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, which is not there yet."""
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
