"""The kit of commands: ours keep its laws, and each law is broken by a command
with one line changed.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from kit_cases import use_module

from distcore import ConfigError, registry
from distcore_workbench.kits.command import SUITE

SOURCE = (files("distcore_workbench") / "skeleton/command/command.py.txt").read_text(
    encoding="utf-8"
)
TAKES_ALL = (
    "    known = argparse.Namespace(folder=Path('.'), newest=1, block=[])\n"
    "    parser.parse_known_args = lambda *_: (known, [])\n"
)
BROKEN = {
    "joined-summary": (
        "summary-is-read",
        'SUMMARY = "list the runs',
        'SUMMARY = "list " + "the runs',
    ),
    "long-summary": ("summary-is-read", "list the runs", "list the runs" + " and runs" * 12),
    "imports-torch": ("help-without-torch", "import json\n", "import json\n\nimport torch\n"),
    "fails-in-help": ("help-without-torch", "where to look", "where to look for 100 % of them"),
    "computes-in-help": (
        "help-is-quick",
        "    parser.add",
        "    sum(range(10**8))\n    parser.add",
    ),
    "silent-flag": ("flags-have-help", ', help="only the N newest runs (default: 10)"', ""),
    "takes-any-flag": ("unknown-flag", "    parser.add", TAKES_ALL + "    parser.add"),
    "own-traceback": ("wrong-word", "raise ConfigError(", "raise OSError("),
    "makes-the-folder": (
        "wrong-word",
        "raise ConfigError",
        'Path("new").mkdir()\n        raise ConfigError',
    ),
    "example-fails": ("example-works", "    return 0", "    return 1"),
    "says-nothing": ("example-works", "-> int:", "-> None:"),
    "colors": ("plain-in-a-pipe", "{len(reports)} runs", "\\x1b[1m{len(reports)} runs"),
}
"""By name: the case that must notice, a text of the skeleton, and what is there instead."""


@pytest.mark.programs
@pytest.mark.parametrize(
    "name", ["makes-the-folder", pytest.param("colors", marks=pytest.mark.slow)]
)
def test_a_broken_command_breaks_its_law(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_broken(name, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_command_breaks_its_law(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_broken(name, tmp_path, monkeypatch)


def check_broken(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, old, new = BROKEN[name]
    assert old in SOURCE
    use_module(SOURCE.replace(old, new, 1), "commands", "", folder, monkeypatch)
    (finding,) = SUITE.measure("mine", only=[case])
    assert finding.held is False, finding
    assert finding.note


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.parametrize("name", sorted(registry.offers("commands")))
def test_our_commands_keep_the_laws(name: str) -> None:
    assert [str(finding) for finding in SUITE.measure(name) if finding.held is False] == []


def test_every_case_has_a_broken_command() -> None:
    assert {case for case, _, _ in BROKEN.values()} == set(SUITE.cases)


def test_a_module_without_a_part_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_module(SOURCE.replace("def run(", "def runs("), "commands", "", tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="command 'mine': its module has no run"):
        SUITE.measure("mine")
