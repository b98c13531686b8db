"""``distcore check``: what it says beside the findings."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks


def check(*flags: str) -> str:
    """Output of the command for one case of a strategy in one process."""
    command = [
        sys.executable,
        "-m",
        "distcore",
        "check",
        "--strategy",
        "single",
        "--case",
        "micro-batches-agree",
    ]
    return subprocess.run([*command, *flags], capture_output=True, text=True, check=True).stdout


def test_check_says_for_which_version_of_the_hook_specs_a_strategy_was_written() -> None:
    assert check().splitlines()[-1] == "written for hook-spec version 3"
    assert [finding["spec_version"] for finding in json.loads(check("--json"))] == [3]
