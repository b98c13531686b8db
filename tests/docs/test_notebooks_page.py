"""The page of notebooks runs, cell after cell, as a kernel runs it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from published_pages import ROOT, blocks, workshop

import distcore
from distcore import Report
from distcore.cli.main import main

PAGE = ROOT / "docs/notebooks.md"
pytestmark = pytest.mark.needs("distcore-tasks", "distcore-workbench")


def cell(source: str) -> str:
    """The source of a cell that also prints the value of its last expression, as a kernel does."""
    *_, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        return source
    lines = source.rstrip().splitlines()
    before = "\n".join(lines[: last.lineno - 1])
    value = "\n".join(lines[last.lineno - 1 :])
    return f"{before}\nprint('value:', repr({value}))\n"


@pytest.mark.programs
def test_the_cells_of_the_page_run_twice_in_one_folder(tmp_path: Path) -> None:
    folder = workshop(tmp_path / "page", PAGE)
    cells = [cell(source) for source in blocks(PAGE, "python")]
    # A notebook is run again from its top.
    program = "\n".join([*cells, cells[0]])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "the river" in done.stdout
    assert "value: curve" in done.stdout, "the curves as text"
    assert "the earlier run is now runs/notebook.old-1" in done.stderr
    assert len(list((folder / "runs").iterdir())) == 4


@pytest.mark.programs
def test_a_cell_shows_the_page_of_the_report(run_folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(run_folder), "--html", str(page)]) == 0
    shown = Report(out=str(run_folder)).plot()._repr_html_()
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)" width="100%" height="600" .*></iframe>', shown)
    assert frame
    tables = [
        re.findall("<table.*?</table>", text, re.S)
        for text in (page.read_text(), unescape(frame[1]))
    ]
    assert tables[0] == tables[1] != []
    with pytest.raises(distcore.ConfigError, match="nowhere"):
        Report(out=str(tmp_path / "nowhere")).plot()
