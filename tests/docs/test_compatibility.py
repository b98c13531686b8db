"""The compatibility page says what the packages speak."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from distcore import DistcoreError
from distcore.plugin.strategy.capabilities import OLDEST_SPEC_VERSION, SPEC_VERSION
from distcore.registry import load, offers

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    return importlib.import_module("compatibility")


@pytest.mark.programs
def test_the_table_is_made_from_the_packages(tool: Any) -> None:
    page = tool.PAGE.read_text()
    assert page == tool.with_table(page), "run tools/compatibility.py"
    assert (
        f"of hook-spec versions {OLDEST_SPEC_VERSION}, with a warning, and {SPEC_VERSION};" in page
    )


@pytest.mark.programs
def test_the_table_has_the_versions_that_strategies_declare(tool: Any) -> None:
    rows = {name: versions for name, versions, _ in tool.distributions()}
    for name, (entry, *_) in offers("strategies").items():
        try:
            declared = load("strategies", name)().capabilities.spec_version
        except DistcoreError:  # a backend that is not installed
            continue
        assert entry.dist is not None
        if entry.dist.name in rows:
            assert rows[entry.dist.name].split(", ") == [str(declared)], name


def test_a_package_speaks_what_it_declares_and_else_what_its_core_does(
    tool: Any, tmp_path: Path
) -> None:
    (tmp_path / "none.py").write_text("from distcore import train")
    assert tool.spoken(tmp_path) == set()
    (tmp_path / "events.py").write_text("from distcore import hookimpl")
    assert tool.spoken(tmp_path) == {tool.SPEC_VERSION}
    (tmp_path / "strategy.py").write_text("Capabilities(spec_version=2)")
    assert tool.spoken(tmp_path) == {2}
