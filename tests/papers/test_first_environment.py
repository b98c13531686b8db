"""The first pages in the environment that they speak of: what README's install line brings,
and nothing beside it.

The environment of the tests has accelerate, peft, datasets, Pillow and more, so it cannot
show what lacks them.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import from_wheels, shell
from published_pages import ROOT, is_run_here, lines, program, run_commands, workshop

SET_UP = (ROOT / "README.md", ROOT / "docs/quickstart.md")
"""Pages whose install lines make an environment; those of the others add to it."""
TASKS = (
    *(
        "text-classification",
        "distillation",
        "embedding",
        "language-models",
        "preference",
        "seq2seq",
    ),
    *("masked-lm", "token-classification", "images", "tasks", "lora"),
)
PAGES = (*SET_UP, *(ROOT / f"docs/{name}.md" for name in TASKS))
OF_PIP = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_QUIET": "1"}
"""Environment variables of pip, as the set-up of this environment had them."""

pytestmark = [pytest.mark.programs, pytest.mark.timeout(7200)]


def names_in(home: Path) -> set[str]:
    """Return the names of what pip has installed in an environment."""
    command = [str(home / "bin/python"), "-m", "pip", "list", "--format", "json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {each["name"] for each in json.loads(listed)}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["checkout", "wheels", "wheels-newest"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_first_page_runs_with_what_the_install_lines_bring(
    readme_environment: Callable[[str], Path],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    page: Path,
    kind: str,
) -> None:
    """What a page installs itself, such as an extra, is there for this page alone."""
    home = readme_environment(kind)
    before = names_in(home)
    folder = workshop(tmp_path / "page", page)
    commands = [line for line in lines(page, "sh") if is_run_here(line)]
    more = (
        [line for line in lines(page, "sh") if program(line) == "pip"] if page not in SET_UP else []
    )
    if kind.startswith("wheels"):
        more = [from_wheels(line, request.getfixturevalue("distributions")) for line in more]
    # else pytest would collect their tests, which import much more
    for name in ("examples", "plugins"):
        if not any(f"{name}/" in command for command in (*more, *commands)):
            (folder / name).unlink()
    try:
        failed = run_commands(page, folder, [*more, *commands], home / "bin", 3600, **OF_PIP)
    finally:
        if added := names_in(home) - before:
            shell(f"pip uninstall --yes {' '.join(added)}", home)
    assert not failed, "\n\n".join(failed)
