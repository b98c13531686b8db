"""The pictures of the README are there, small and of no machine in particular, and `make pictures` makes them."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = [ROOT / target for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())]
TOOL = runpy.run_path(str(ROOT / "tools/pictures.py"))
PAGE = """<html><head><style>
:root { --paper: #fff; }
svg { width: 100%;
  font-size: 12px; }
.a { fill: red; }
</style></head><body><h2>Speed</h2>
<svg viewBox="0 0 760 52" role="img"><rect class="a"/></svg>
<h2>Parts <small>with a legend</small></h2>
<svg viewBox="0 0 760 52" role="img"><rect class="b"/></svg>
<h2>Memory</h2>
<svg viewBox="0 0 760 26" role="img"><rect class="c"/></svg>
</body></html>"""


def test_the_readme_shows_a_terminal_and_a_comparison() -> None:
    assert {file.name for file in PICTURES} == {"terminal.svg", "compare.svg"}


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.name)
def test_a_picture_is_small_and_names_no_machine(file: Path) -> None:
    text = file.read_text()
    assert xml.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert len(text) < 100_000
    assert not re.search(r"/(tmp|home|root|usr|opt|work|Users)/|@import|url\(http", text)


@pytest.mark.parametrize("command", ["TRAIN", "COMPARE"])
def test_the_readme_shows_the_command_that_makes_a_picture(command: str) -> None:
    shown = re.sub(r"\\\n\s*", "", (ROOT / "README.md").read_text())
    assert f"\n{TOOL[command]}\n" in shown


def test_make_pictures_runs_the_tool() -> None:
    recipe = re.search(r"^pictures: install\n\t(.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert recipe
    assert recipe[1] == "$(BIN)/python tools/pictures.py"


def test_the_last_screen_has_what_a_live_line_was_redrawn_to() -> None:
    output = "a warning\r\nstep 1\r\n\x1b[?25h\r\x1b[2K\x1b[1A\x1b[2K\x1b[32mstep 2\x1b[0m\r\n\r\nreport\r\n"
    assert TOOL["last_screen"](output) == ["a warning", "\x1b[32mstep 2\x1b[0m", "", "report"]
    assert TOOL["last_screen"]("long line\rover") == ["over"]


def test_the_plots_without_a_legend_stand_below_each_other() -> None:
    picture = xml.fromstring(TOOL["plots_of"](PAGE))
    name = "{http://www.w3.org/2000/svg}"
    assert [title.text for title in picture.findall(f"{name}text")] == ["Speed", "Memory"]
    places = [group.attrib["transform"] for group in picture.findall(f"{name}g")]
    assert places == ["translate(0 30)", "translate(0 126)"]
    assert picture.attrib["viewBox"] == "0 0 760 166"
    style = picture.findtext(f"{name}style") or ""
    assert "--paper" in style
    assert "100%" not in style
