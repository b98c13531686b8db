"""The documentation runs: every shell command of README and docs, in a folder with the files that it speaks of."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distcore.plugin.hooks import EVENTS, OPERATIONS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("examples/*/README.md")),
         *sorted(ROOT.glob("plugins/*/README.md"))]  # fmt: skip
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.S)
SHORT = {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def blocks(page: Path, language: str) -> Iterator[str]:
    yield from (body for kind, body in BLOCK.findall(page.read_text()) if kind == language)


def commands(*programs: str) -> list[tuple[str, str]]:
    """Page and command for every line of a shell block that starts with one of these programs."""
    whole = ((page, block.replace("\\\n", "")) for page in PAGES for block in blocks(page, "sh"))
    lines = [(page, line) for page, block in whole for line in block.splitlines()]
    return [
        (str(page.relative_to(ROOT)), line.partition("  #")[0].strip())
        for page, line in lines
        if line.split(" ")[0] in programs
    ]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages speak of; files that pages show are taken from the pages."""
    folder = tmp_path_factory.mktemp("docs")
    rows = [{"text": f"{word} {number}", "label": label} for number in range(40)
            for word, label in (("good wonderful", "like"), ("bad awful", "dislike"))]  # fmt: skip
    for name in ("reviews.jsonl", "held-out.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_accelerate.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    lines = [f"{row['text']},{5 if row['label'] == 'like' else 1}" for row in rows]
    (folder / "reviews.csv").write_text("\n".join(["review,stars", *lines]) + "\n")
    for page in PAGES:
        for body in (body for kind, body in BLOCK.findall(page.read_text()) if kind in {"python", "yaml"}):
            if named := re.match(r"# (\S+\.(?:py|yaml))\n", body):
                (folder / named[1]).write_text(body)
    for name in ("examples", "plugins"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(command: str, folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=os.environ | SHORT, capture_output=True, text=True, timeout=240
    )


@pytest.mark.timeout(1200)
def test_every_distcore_command_runs_in_the_order_of_the_pages(workshop: Path) -> None:
    failed = []
    for page, command in commands("distcore", "torchrun"):
        if " check " in command or "localsgd" in command:
            continue  # tests of the laws check every strategy; test_distributions.py installs the stranger's
        training = " train " in command and "--dry-run" not in command
        done = run(f"{command} --max-steps 2 --model bert-tiny" if training else command, workshop)
        if done.returncode:
            failed.append(f"{page}: {command}\n{done.stdout}{done.stderr}")
    assert not failed, "\n\n".join(failed)


def test_python_examples_run(workshop: Path) -> None:
    for body in blocks(ROOT / "README.md", "python"):
        done = run(f"python -c {shlex.quote(body)}", workshop)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "command"), commands("make"))
def test_make_targets_exist(page: str, command: str) -> None:
    assert run(f"{command} --dry-run", ROOT).returncode == 0


@pytest.mark.parametrize(("page", "command"), commands("pip"))
def test_what_pip_installs_from_the_checkout_builds(page: str, command: str) -> None:
    for source in re.findall(r"install (\.\S*)", command):
        done = run(f"python -m pip install --quiet --no-deps --no-build-isolation --dry-run {source}", ROOT)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "command"), commands("python"))
def test_benchmarks_explain_themselves(page: str, command: str) -> None:
    done = run(f"{command} --help", ROOT)
    assert done.returncode == 0, done.stderr
    assert "ound" in done.stdout  # each states its bound


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_hook_stands_in_the_reference_with_its_arguments() -> None:
    page = (ROOT / "docs/writing-a-strategy.md").read_text()
    for name in OPERATIONS:
        import inspect

        from distcore.plugin.hookspecs import Operations

        arguments = ", ".join(list(inspect.signature(getattr(Operations, name)).parameters)[1:])
        assert f"`{name}({arguments})`" in page
    for name in EVENTS:
        assert f"`{name}`" in page
