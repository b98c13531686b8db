"""Run public files and command lines through ``distcore migrate``: each ends in a config
or in one line.

    python benchmarks/migrate_corpus.py --clones DIR [--list
    benchmarks/migrate_corpus.txt] [--collect OWNER/NAME …]

The list has a source a line: repository, commit, path and, for a file of commands, the number of
the command in it. ``DIR/OWNER+NAME`` is a git directory of each repository, which this program only
reads; nothing of it is kept here. ``--collect`` writes the list anew, from the newest commit of
these. Prints, by repository, how many sources became a config and how many ended in one line.

Bound: no traceback, no message of several lines, and no key of a file or flag of a command that the
config does not name.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from distcore.errors import DistcoreError
from distcore_migrate import migrate
from distcore_migrate.sources import read_tree

PROGRAMS = r"torchrun|deepspeed|accelerate launch|python3? |horovodrun|srun|trl "
STARTS = re.compile(rf"^[\s$`]*((?:[A-Z_]+=\S+ )*(?:{PROGRAMS}).*)")
"""The beginning of a command that trains, in a shell script or a page."""
TRAINS = re.compile(r"\.py\b|\btrl (sft|dpo)\b")
FILES = (".yaml", ".yml", ".json")
FOLDERS = re.compile(r"example|config|ds_|training|deepspeed|accelerate", re.IGNORECASE)
LONGEST = 200_000
"""Bytes of a config file, at most: a larger one is data."""


def git(folder: Path, *words: str) -> str:
    """Return what a command of git prints."""
    command = ["git", f"--git-dir={folder}", *words]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace"
    ).stdout


def commands_of(text: str) -> list[str]:
    """Return the commands of a page or script that start a Python script, in order,
    each on one line.
    """
    joined = re.sub(r"\\\s*\n\s*", " ", text)
    candidates = (
        match[1].strip().rstrip("`")
        for line in joined.splitlines()
        if (match := STARTS.match(line))
    )
    return [command for command in candidates if TRAINS.search(command)]


def collect(clones: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the list: every config file and every command of these repositories."""
    for name in names:
        folder = clones / name.replace("/", "+")
        folder = folder / "repo" if (folder / "repo").is_dir() else folder
        commit = git(folder, "rev-parse", "HEAD").strip()
        for path in git(folder, "ls-tree", "-r", "--name-only", "HEAD").splitlines():
            if path.endswith(FILES) and FOLDERS.search(path) and "/." not in f"/{path}":
                yield f"{name} {commit} {path}"
            elif path.endswith((".sh", ".md")):
                with contextlib.suppress(subprocess.CalledProcessError):
                    for number in range(len(commands_of(git(folder, "show", f"HEAD:{path}")))):
                        yield f"{name} {commit} {path} {number + 1}"


def outcome(folder: Path, commit: str, path: str, number: int | None) -> str:
    """Return ``config``, ``line``, or what went wrong with a source."""
    try:
        text = git(folder, "show", f"{commit}:{path}")
    except subprocess.CalledProcessError:
        return "absent"
    words: list[str] = []
    if number is None:
        if len(text) > LONGEST:
            return "absent"
        Path(Path(path).name).write_text(text)
    else:
        try:
            words = shlex.split(commands_of(text)[number - 1])
        except ValueError:
            return "absent"  # no command by itself: a quote stays open
    files = [] if words else [Path(path).name]
    try:
        made = migrate(files, words)
    except DistcoreError as error:
        return "several lines" if "\n" in str(error) else "line"
    except Exception as error:  # what must not be
        print(f"{path} {number or ''}: {type(error).__name__}: {error}", file=sys.stderr)
        return "traceback"
    tree = (
        read_tree(files[0])
        if files
        else {word[2:].partition("=")[0]: "" for word in words if word[:2] == "--"}
    )
    gone = [key for key, value in tree.items() if not _is_named(key, value, made.text)]
    if gone:
        print(f"{path} {number or ''}: not named: {', '.join(gone)}", file=sys.stderr)
    return "keys gone" if gone else "config"


def _is_named(key: str, value: object, text: str) -> bool:
    """Return True if a key or flag stands in the config; of a section, its own name or
    all of its keys.
    """
    words = (key, key.replace("-", "_"), key.replace("-", "_").removeprefix("no_"))
    if any(
        re.search(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", text) for word in words
    ):
        return True
    return isinstance(value, dict) and all(
        any(_is_named(name, "", text) for name in (str(inner), str(inner).removeprefix("fsdp_")))
        for inner in value
    )


def main() -> int:
    """Run the corpus, or collect it; return 1 if a source ended in anything else than a
    config or one line.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--list", type=Path, default=Path(__file__).with_suffix(".txt"))
    parser.add_argument("--collect", nargs="+", metavar="OWNER/NAME")
    given = parser.parse_args()
    clones, listed = given.clones.absolute(), given.list.absolute()
    if given.collect:
        listed.write_text("".join(f"{line}\n" for line in collect(clones, given.collect)))
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for line in listed.read_text().splitlines():
            name, commit, path, *number = line.split(" ")
            clone = clones / name.replace("/", "+")
            clone = clone / "repo" if (clone / "repo").is_dir() else clone
            counts[name][outcome(clone, commit, path, int(number[0]) if number else None)] += 1
    kinds = ["config", "line", "traceback", "several lines", "keys gone", "absent"]
    print(f"| repository | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    for name, by_kind in counts.items():
        print(f"| {name} | {' | '.join(str(by_kind[kind]) for kind in kinds)} |")
    total = sum(counts.values(), Counter())
    print(f"| all | {' | '.join(str(total[kind]) for kind in kinds)} |")
    return int(any(total[kind] for kind in kinds[2:5]))


if __name__ == "__main__":
    sys.exit(main())
