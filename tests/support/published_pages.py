"""The published pages, and their commands as they stand there, with the files that
each page speaks of.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.S)
RUN_HERE = ("distcore", "torchrun", "python")
"""Programs whose commands run in the page's own folder, in the order of the page."""
SEPARATELY = (
    (" check ", "the contract tests measure the laws for every strategy"),
    ("--compile regions", "a C++ compiler takes minutes; test_compile_strategies.py runs it"),
    ("--strategy localsgd", "test_distributions.py installs that package and runs it"),
    (
        "distcore tune --data reviews.jsonl --model bert-tiny --budget 10",
        "docs/tune.md has one of half a minute",
    ),
    (
        "python benchmarks/",
        "they take minutes to hours; test_docs.py looks at what they say they are",
    ),
)
SHORTER = {
    "--epochs 3 --out runs/first": "--max-steps 20",
    "--max-steps 30 --rounds 2": "--max-steps 6 --rounds 1",
}
"""Flags that end long commands early, by words of the command: all else of it stays as published.
"""
HERE = Path(sys.executable).parent
"""The folder of the programs of this environment."""


def name_of(page: Path) -> str:
    """Return the path of a page in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> Iterator[str]:
    """Yield the bodies of the page's code blocks in a language."""
    yield from (body for kind, body in BLOCK.findall(page.read_text()) if kind == language)


def lines(page: Path, language: str) -> list[str]:
    """Return the commands of the page's blocks, comments and line breaks taken out."""
    joined = "\n".join(re.sub(r"\\\n\s*", "", block) for block in blocks(page, language))
    return [
        line.partition("  #")[0].strip()
        for line in joined.splitlines()
        if line and not line.startswith("#")
    ]


def program(command: str) -> str:
    """Return the program that a command starts."""
    return command.lstrip("(").split(" ")[0]


def workshop(folder: Path, page: Path) -> Path:
    """Fill ``folder`` with the data that all pages speak of, and the files that this one shows."""
    folder.mkdir(parents=True)
    rows = [{"text": f"{word} {number}", "label": label} for number in range(40)
            for word, label in (("good wonderful", "like"), ("bad awful", "dislike"))]  # fmt: skip
    for name in ("reviews.jsonl", "held-out.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    films = [{"review": f"a {('dull', 'wonderful')[n % 2]} film, {n}", "stars": 2 + n % 2 * 3}
             for n in range(80)]  # fmt: skip
    for name in ("stars.jsonl", "more-stars.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in films))
    new = [{"id": f"r-{number}", "text": f"good or bad {number}"} for number in range(20)]
    (folder / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new))
    (folder / "my_accelerate.yaml").write_text(
        "distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"
    )
    stars = [f"{row['text']},{5 if row['label'] == 'like' else 1}" for row in rows]
    (folder / "reviews.csv").write_text("\n".join(["review,stars", *stars]) + "\n")
    for body in (*blocks(page, "python"), *blocks(page, "yaml")):
        if named := re.match(r"# (\S+\.(?:py|yaml|json))\n", body):
            (folder / named[1]).write_text(body)
    for name in ("examples", "plugins"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(
    command: str, folder: Path, programs: Path = HERE, timeout: float = 600, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command line in ``folder``, as if the environment with
    these ``programs`` were active.
    """
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def is_run_here(command: str) -> bool:
    """Return True for a command that the page's own run runs, not another test."""
    return program(command) in RUN_HERE and not any(part in command for part, _ in SEPARATELY)


def run_page(page: Path, folder: Path, whole: bool = True) -> list[str]:
    """Run the page's commands one after the other in this environment; say which failed.

    Unless ``whole``, those of ``SHORTER`` end early.
    """
    if "horovod" in page.parts and importlib.util.find_spec("horovod") is None:
        return []
    workshop(folder, page)
    commands = filter(is_run_here, lines(page, "sh"))
    return run_commands(page, folder, commands if whole else map(shorter, commands))


def shorter(command: str) -> str:
    """Return the command with the flags that end it early, if it is a long one."""
    flags = [flags for words, flags in SHORTER.items() if words in command]
    return " ".join([command, *flags])


def run_commands(
    page: Path,
    folder: Path,
    commands: Iterable[str],
    programs: Path = HERE,
    timeout: float = 600,
    **variables: str,
) -> list[str]:
    """Run these commands of ``page`` one after the other; return those that failed, each
    with what it printed.
    """
    failed = []
    for command in commands:
        done = run(command, folder, programs, timeout, **variables)
        if done.returncode:
            failed.append(f"{name_of(page)}: {command}\n{done.stdout}{done.stderr}")
    return failed
