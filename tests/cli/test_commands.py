"""Commands are plugins: one that a stranger installed is listed, runs, and hurts no other
if it is broken.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from first_line import after_first_line

from distcore import registry

ROOT = Path(__file__).parents[2]


def install(site: Path, distribution: str, commands: dict[str, str], code: str = "") -> None:
    """Put a distribution into ``site``: its metadata, and ``code`` as its module."""
    package = distribution.replace("-", "_")
    (site / f"{package}.py").write_text(code)
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
    )
    lines = [f"{name} = {value}" for name, value in commands.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[distcore.commands]", *lines, ""]))


def distcore(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distcore", *arguments]
    # without what tests run at the start of every process
    alone = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(command, env=alone, capture_output=True, text=True, check=False)


def published_command() -> str:
    """The module of the page's own example."""
    page = (ROOT / "docs/architecture.md").read_text()
    [code] = re.findall(r'^```python\n("""distcore_hello/command.py.+?)^```$', page, re.M | re.S)
    return str(code)


def test_a_command_of_a_stranger_is_listed_with_its_summary_and_runs(tmp_path: Path) -> None:
    install(tmp_path, "distcore-hello", {"hello": "distcore_hello"}, published_command())
    assert re.search(r"^ +hello +print a greeting$", distcore(tmp_path, "--help").stdout, re.M)
    done = distcore(tmp_path, "hello", "you")
    assert (done.returncode, done.stdout) == (0, "hello, you\n"), done.stderr
    assert "name" in distcore(tmp_path, "hello", "--help").stdout


def test_help_runs_no_code_of_a_command_so_that_a_broken_one_is_listed_and_costs_one_line(
    tmp_path: Path,
) -> None:
    install(
        tmp_path,
        "distcore-broken",
        {"broken": "distcore_broken"},
        'SUMMARY = "does nothing"\nimport nowhere\n',
    )
    shown = distcore(tmp_path, "--help")
    assert shown.returncode == 0
    assert re.search(r"^ +broken +does nothing$", shown.stdout, re.M)
    done = distcore(tmp_path, "broken")
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: command 'broken' is installed \(distcore-broken 1.0\) but does not import: "
        r"ModuleNotFoundError: No module named 'nowhere'; raised at \S+distcore_broken.py:\d+\n",
        done.stderr,
    )


def test_two_distributions_with_one_command_are_refused_and_both_are_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        install(tmp_path, f"distcore-{name}", {"hello": f"distcore_{name}"}, published_command())
    done = distcore(tmp_path, "hello", "you")
    assert done.returncode == 2
    assert re.match(r"error: command 'hello' .*distcore-one 1.0.*distcore-two 1.0", done.stderr)
    assert distcore(tmp_path, "--help").returncode == 0


@pytest.mark.programs
def test_a_command_cannot_take_the_name_of_one_of_the_core(tmp_path: Path) -> None:
    install(tmp_path, "distcore-hello", {"eval": "distcore_hello"}, published_command())
    assert "distcore eval RUN_OR_CHECKPOINT" in distcore(tmp_path, "eval", "--help").stdout


@pytest.mark.parametrize("name", registry.entries("commands"))
def test_a_blocked_command_says_so(tmp_path: Path, name: str) -> None:
    done = distcore(tmp_path, "-p", f"no:{name}", name)
    assert done.returncode == 2
    assert f"command {name!r} is installed but blocked" in done.stderr


def test_an_unknown_command_names_those_that_there_are(tmp_path: Path) -> None:
    done = distcore(tmp_path, "trian")
    assert done.returncode == 2
    assert "train" in done.stderr
    assert (
        "no command named 'evaluate' (did you mean 'eval'?)"
        in distcore(tmp_path, "evaluate").stderr
    )
    assert len(after_first_line(done.stderr).splitlines()) == 1
