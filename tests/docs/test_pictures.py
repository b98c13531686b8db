"""The pictures of the README are there, small and of no machine in particular, and
`make pictures` makes them.
"""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = [
    ROOT / target
    for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
]
TOOL = runpy.run_path(str(ROOT / "tools/pictures.py"))


def test_the_readme_shows_a_terminal_and_a_comparison() -> None:
    assert {file.name for file in PICTURES} == {"terminal.svg", "compare.png"}


def test_a_picture_is_small_and_names_no_machine() -> None:
    for file in PICTURES:
        assert file.stat().st_size < 100_000, file
    terminal = (ROOT / "docs/pictures/terminal.svg").read_text()
    assert xml.fromstring(terminal).tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"/(tmp|home|root|usr|opt|work|Users)/|@import|url\(http", terminal)
    assert (ROOT / "docs/pictures/compare.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("command", ["TRAIN", "COMPARE"])
def test_the_readme_shows_the_command_that_makes_a_picture(command: str) -> None:
    shown = re.sub(r"\\\n\s*", "", (ROOT / "README.md").read_text())
    assert f"\n{TOOL[command]}\n" in shown


def test_make_pictures_runs_the_tool() -> None:
    recipe = re.search(r"^pictures: install\n\t(.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert recipe
    assert recipe[1] == "$(BIN)/python tools/pictures.py"


def test_the_last_screen_has_what_a_live_line_was_redrawn_to() -> None:
    output = (
        "a warning\r\nstep 1\r\n\x1b[?25h\r\x1b[2K\x1b[1A\x1b[2K\x1b[32mstep"
        " 2\x1b[0m\r\n\r\nreport\r\n"
    )
    assert TOOL["last_screen"](output) == ["a warning", "\x1b[32mstep 2\x1b[0m", "", "report"]
    assert TOOL["last_screen"]("long line\rover") == ["over"]
