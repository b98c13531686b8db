"""Deprecation: one warning at the line that uses what is to go, until two minor versions later
it must be gone.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from distcore import DeprecatedWarning, deprecated, load_config
from distcore.deprecation import removal
from distcore.resolve.check_capabilities import check_declared
from distcore.strategies.single import SingleStrategy

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "core/distcore", *ROOT.glob("plugins/*/distcore_*")]


def old_name() -> None:
    deprecated("old_name()", "0.2", "new_name()")


def test_a_deprecated_name_warns_at_the_line_of_the_caller() -> None:
    with pytest.warns(DeprecatedWarning) as told:
        old_name()
    assert [str(each.message) for each in told] == [
        "old_name() is deprecated since 0.2 and goes with 0.4; use new_name()"
    ]
    assert (
        Path(told[0].filename).read_text().splitlines()[told[0].lineno - 1].strip() == "old_name()"
    )


def test_a_program_prints_it_on_one_line_and_other_warnings_as_ever() -> None:
    code = (
        "import warnings; from distcore.deprecation import *; print_on_one_line()\n"
        "def old(): deprecated('old()', '0.9', 'new()')\n"
        "old(); warnings.warn('another')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *others = done.stderr.splitlines()
    assert first == "warning: old() is deprecated since 0.9 and goes with 0.11; use new()"
    assert "UserWarning: another" in others[0]


def test_a_config_key_of_before_warns_and_is_read() -> None:
    with pytest.warns(
        DeprecatedWarning,
        match=r"^config key 'packing' is deprecated since .*; use 'padding_free'$",
    ):
        config = load_config(None, {"packing": "off"})
    assert config.padding_free == "off"


def test_a_strategy_of_an_older_version_runs_with_a_warning() -> None:
    declared, config = SingleStrategy.capabilities, load_config(None, {"strategy": "mine"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_declared(config, declared, "local")
    with pytest.warns(
        DeprecatedWarning,
        match=r"^strategy 'mine': hook-spec version 2 is deprecated since 0\.2 and",
    ):
        check_declared(config, dataclasses.replace(declared, spec_version=2), "local")


def calls(source: str) -> Iterator[str]:
    """The first version that warns, of each deprecation in a source; it must be written out."""
    for node in ast.walk(ast.parse(source)) if "deprecated(" in source else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "deprecated":
            since = (
                node.args[1]
                if len(node.args) > 1
                else {each.arg: each.value for each in node.keywords}["since"]
            )
            assert isinstance(since, ast.Constant), ast.unparse(node)
            yield str(since.value)


def gone(source: str, version: str) -> list[str]:
    """The deprecations of a source that must be gone in a version of its distribution."""
    return [since for since in calls(source) if as_numbers(version) >= as_numbers(removal(since))]


def as_numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]


def test_a_deprecated_name_is_gone_after_two_minor_versions() -> None:
    for package in PACKAGES:
        version = re.search(r'__version__ = "([\d.]+)"', (package / "__init__.py").read_text())
        assert version
        left = [file for file in package.rglob("*.py") if gone(file.read_text(), version[1])]
        assert not left, f"remove what {left} still has in {version[1]}"


@pytest.mark.parametrize(
    ("version", "too_late"), [("0.2.0", False), ("0.3.9", False), ("0.4.0", True), ("1.0", True)]
)
def test_a_deprecation_that_has_stayed_too_long_is_seen(version: str, too_late: bool) -> None:
    assert bool(gone('x.deprecated("old", since="0.2", instead="new")', version)) == too_late
