"""What a newcomer meets first: the length of the README, the end of the demo, the top of the site."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_the_demo_ends_with_a_command_to_type_next() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "--old-file=install", "demo"]  # these tests run under make
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *_, trains, says = done.stdout.splitlines()
    folder = shlex.split(trains)[-1]
    next_command = shlex.split(says)[-1].partition(": ")[2].split()
    assert next_command[0] == shlex.split(trains)[0] == ".venv/bin/distcore"
    assert next_command[-1] == folder


def test_the_top_of_the_site_is_its_first_page() -> None:
    at_the_top = runpy.run_path(str(ROOT / "docs/_ext/front_page.py"))["at_the_top"]
    page = at_the_top('<head>\n<link href="../_static/style.css"></head><a href="plan.html">', "docs")
    assert re.search(r'<head>\s*<base href="docs/index.html">', page)
    assert "http-equiv" not in page
