"""The documentation runs: every command of a ``sh`` block, as it is published, with the files that
its page speaks of.

What one machine without GPUs cannot run (two machines, a launcher that is not installed) stands in
``text`` blocks; of those, the ``distcore train`` in them is checked by ``--dry-run``.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from published_pages import (
    ROOT,
    RUN_HERE,
    SHORTER,
    blocks,
    lines,
    name_of,
    program,
    run,
    run_page,
    workshop,
)

from distcore.cli.main import main
from distcore.plugin.strategy.hooks import EVENTS, OPERATIONS
from distcore.plugin.strategy.hookspecs import Operations

PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
]
PUBLISHED = ROOT / "tests/house/published_commands.md"
"""Commands of tutorials, as commands of ours, with the files that they read."""
PAGES.append(PUBLISHED)
TASKS = ROOT / "docs/tasks.md"
SEEN_ELSEWHERE = ("make", "pip", "distcore-horovod")
"""Programs whose commands the tests below look at, or tests of their own: the
set-up, and Horovod's build.
"""
OF_OTHERS = ("pillow", "pytest", "sacrebleu")
"""Libraries that a page has its reader install, since no install line of ours brings them."""


def commands(*programs: str) -> list[tuple[str, str]]:
    """Page and command for every line of a shell block that starts with one of these programs."""
    return [
        (name_of(page), line)
        for page in PAGES
        for line in lines(page, "sh")
        if program(line) in programs
    ]


FIRST_READ = [ROOT / "README.md", ROOT / "plugins/fsdp/README.md"]
"""Pages whose commands run in every test run, the long ones with fewer steps; those of the others
take minutes.
"""
RUN_BY_ITS_TEST = [TASKS, ROOT / "AGENTS.md"]
"""Pages whose commands a test of their own runs."""
OTHERS = [
    page for page in PAGES if page not in (*FIRST_READ, *RUN_BY_ITS_TEST) and lines(page, "sh")
]


@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_every_command_of_the_pages_that_are_read_first_runs_for_some_steps(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = [tmp_path / name_of(page) for page in FIRST_READ]
        failed = pool.map(partial(run_page, whole=False), FIRST_READ, folders)
        problems = [problem for page in failed for problem in page]
    assert not problems, "\n\n".join(problems)


def test_each_command_that_is_made_shorter_is_published() -> None:
    published = [line for page in FIRST_READ for line in lines(page, "sh")]
    for words in SHORTER:
        assert any(words in line for line in published), words


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [*FIRST_READ, *OTHERS], ids=name_of)
def test_every_published_command_runs_in_the_order_of_its_page(page: Path, tmp_path: Path) -> None:
    problems = run_page(page, tmp_path / name_of(page))
    assert not problems, "\n\n".join(problems)


def test_shell_blocks_hold_only_commands_that_some_test_sees() -> None:
    unseen = [(name_of(page), line) for page in PAGES for line in lines(page, "sh")
              if program(line) not in RUN_HERE + SEEN_ELSEWHERE]  # fmt: skip
    assert not unseen


@pytest.mark.parametrize(
    ("page", "command"),
    [
        (name_of(page), line)
        for page in PAGES
        for line in lines(page, "text")
        if "distcore train " in line
    ],
)
def test_a_command_in_a_text_block_would_train(
    page: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(workshop(tmp_path / "page", ROOT / page))
    arguments = shlex.split(command.partition("distcore train ")[2].replace("/shared/", ""))
    assert main(["train", *arguments, "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.programs
def test_the_published_commands_would_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They take minutes, so each command is looked at without its ranks; their programs
    write what they read.
    """
    folder = workshop(tmp_path / "page", PUBLISHED)
    monkeypatch.chdir(folder)
    trained = 0
    for command in lines(PUBLISHED, "sh"):
        if program(command) == "python":
            done = run(command, folder)
            assert done.returncode == 0, done.stderr
        elif "distcore train " in command:
            arguments = shlex.split(command.partition("distcore train ")[2])
            assert main(["train", *arguments, "--dry-run"]) == 0, capsys.readouterr().err
            trained += 1
    assert trained == 11


@pytest.mark.ranks
def test_python_examples_run(tmp_path: Path) -> None:
    workshop(tmp_path / "page", ROOT / "README.md")
    for body in blocks(ROOT / "README.md", "python"):
        if re.match(r"# \S+\.py\n", body):
            continue  # a file that a command of the page runs
        done = run(f"python -c {shlex.quote(body)}", tmp_path / "page")
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_the_task_of_the_page_ends_alike_on_one_rank_and_on_two(tmp_path: Path) -> None:
    assert not run_page(TASKS, tmp_path / "page")
    one, two = (
        json.loads((tmp_path / f"page/runs/sines-{name}/report.json").read_text())
        for name in ("one", "two")
    )
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["evaluation"]["loss"] == pytest.approx(two["evaluation"]["loss"], rel=1e-5)


@pytest.mark.parametrize(("page", "command"), commands("make"))
def test_make_targets_exist(page: str, command: str) -> None:
    assert run(f"{command} --dry-run", ROOT).returncode == 0


@pytest.mark.parametrize(("page", "command"), commands("pip"))
def test_the_arguments_of_pip_are_there(page: str, command: str) -> None:
    """A folder of this checkout, an extra of a wheel (test_distributions.py builds and installs
    some), or a library.
    """
    arguments = shlex.split(command)[2:]
    words = [word for word in arguments if not word.startswith("-") and word != "dist"]
    assert words
    for word in words:
        if word.endswith(".txt"):
            assert "-r" in arguments
            assert (ROOT / word).is_file(), word
            continue
        source, _, extra = word.rstrip("]").partition("[")
        if source.startswith("."):
            assert (ROOT / source / "pyproject.toml").is_file(), word
        elif source == "distcore":
            assert extra in extras_of(ROOT)
            assert "--find-links" in command, "no package index has it"
        else:
            assert source in OF_OTHERS, word


def test_a_message_names_extras_of_its_own_distribution_alone() -> None:
    """It is installed, so pip finds it where no index has it; ``hints.how_to_get`` says
    where another one is.
    """
    for folder in (ROOT / "core", *(ROOT / "plugins").iterdir()):
        for file in folder.glob("distcore*/**/*.py"):
            for named in re.findall(
                r"pip install '?(distcore[\w-]*)", file.read_text(encoding="utf-8")
            ):
                assert named == f"distcore-{folder.name}", file


def extras_of(folder: Path) -> dict[str, list[str]]:
    """Return the extras of a distribution with what each brings."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project.get("optional-dependencies", {})
    return extras


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda file: file.stem
)
def test_a_benchmark_states_its_bound(file: Path) -> None:
    source = file.read_text()
    assert re.search(r"ArgumentParser\(\s*description=__doc__", source), (
        "--help shows what stands at the top of the file"
    )
    assert re.search(r"\bBounds?: \S", ast.get_docstring(ast.parse(source)) or "")


@pytest.mark.programs
@pytest.mark.parametrize(
    ("page", "command"),
    [each for each in commands("python") if each[1].startswith("python benchmarks/")],
)
def test_a_benchmark_of_the_pages_explains_itself(page: str, command: str) -> None:
    done = run(f"{command} --help", ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\bBounds?: \S", done.stdout)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            other = page.parent / target if target else page
            assert other.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(other), f"{page}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_hook_stands_in_the_reference_with_its_arguments() -> None:
    page = (ROOT / "docs/writing-a-strategy.md").read_text()
    for name in OPERATIONS:
        arguments = ", ".join(list(inspect.signature(getattr(Operations, name)).parameters)[1:])
        assert f"`{name}({arguments})`" in page
    for name in EVENTS:
        assert f"`{name}`" in page
