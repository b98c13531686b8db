"""``distcore new KIND NAME``: write the package of a plugin that keeps the laws of
its kind as written.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from importlib.metadata import distributions, entry_points
from importlib.resources import files
from pathlib import Path
from string import Template

from distcore import ConfigError, nearest

SUMMARY = "write the package of a strategy, a task or another plugin"

KINDS = {
    "strategy": "strategies",
    "task": "tasks",
    "optimizer": "optimizers",
    "schedule": "schedules",
    "extension": "extensions",
    "reader": "readers",
    "launcher": "launchers",
    "export": "exports",
    "command": "commands",
}
"""What can be written, with the group of its entry point."""
OBJECTS = {"reader": "", "command": "", "export": ":export", "schedule": ":schedule"}
"""By kind: the object of the entry point, in the package, unless it is a class with the
name of the kind.
"""
NEEDS = {"task": ("scikit-learn>=1.3",)}
"""By kind: what its package imports beside distcore and torch."""
FILES = {
    "package/pyproject.toml.txt": "pyproject.toml",
    "package/ci.yml.txt": ".github/workflows/laws.yml",
    "package/py.typed.txt": "{package}/py.typed",
    "{skeleton}/README.md.txt": "README.md",
    "{skeleton}/{skeleton}.py.txt": "{package}/__init__.py",
}
"""Templates, with the files of the package that they become."""
ROWS = "rows"
"""The skeleton of a task on rows of data files."""
FILES_OF_ROWS = {
    "rows/rows.jsonl.txt": "{package}/rows.jsonl",
    "rows/test_rows.py.txt": "tests/test_rows.py",
}
"""Templates of such a task in addition."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore new KIND NAME [--rows] [--into FOLDER]"
    parser.add_argument("kind", metavar="KIND", help=f"what to write: {', '.join(KINDS)}")
    parser.add_argument(
        "name",
        metavar="NAME",
        help="its name, as it will follow --KIND; the folder is distcore-NAME",
    )
    parser.add_argument(
        "--rows",
        action="store_true",
        help="a task on rows of data files, with a cache and streams, and a test of its rows",
    )
    parser.add_argument(
        "--into",
        metavar="FOLDER",
        default=".",
        help="where the new folder goes (default: the current one)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the package, print the next commands, and return 0; raises ConfigError."""
    kind = arguments.kind
    if kind not in KINDS:
        raise ConfigError(
            f"new {kind}: no such kind{nearest(kind, KINDS)} (kinds: {', '.join(KINDS)})"
        )
    if arguments.rows and kind != "task":
        raise ConfigError(f"new {kind} --rows: only a task has rows; leave it out")
    skeleton = ROWS if arguments.rows else kind
    folder = write_package(kind, arguments.name, Path(arguments.into), skeleton)
    print(f"wrote {folder}; next:")
    print(f"  {_in_path('python')} -m pip install --editable {folder}")
    print(f"  {_in_path('python')} -m pytest {folder}")
    print(f"  {_in_path('distcore')} check --{kind} {arguments.name}")
    return 0


def _in_path(program: str) -> str:
    """Return how a shell here starts ``program`` of this environment: by its name or its path."""
    file = Path(sys.executable).parent / program
    in_path = shutil.which(program)
    # The name alone may start the program of another environment.
    if in_path and Path(in_path) == file:
        return program
    folder = Path.cwd()
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)


def write_package(kind: str, name: str, into: Path, skeleton: str = "") -> Path:
    """Write the package of a plugin into a new folder below ``into``; raises ConfigError.

    ``skeleton``: the folder of its templates, by default that of its kind.
    """
    skeleton = skeleton or kind
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ConfigError(
            f"new {kind} {name!r}: expected lower-case letters, digits and hyphens, a letter first"
        )
    folder, package = into / f"distcore-{name}", f"distcore_{name.replace('-', '_')}"
    if name in entry_points(group=f"distcore.{KINDS[kind]}").names or folder.name in {
        one.name for one in distributions()
    }:
        raise ConfigError(
            f"new {kind} {name!r}: is installed, and pip would replace it; choose another name"
        )
    if folder.exists():
        raise ConfigError(
            f"new {kind} {name!r}: {folder} already exists; choose another name or --into"
        )
    words = {
        "kind": kind,
        "name": name,
        "package": package,
        "group": KINDS[kind],
        "object": OBJECTS.get(kind, f":{kind.capitalize()}"),
        "needs": ", ".join(
            f'"{need}"' for need in ("distcore>=0.1,<1", *NEEDS.get(skeleton, ()), "torch>=2.9")
        ),
    }
    templates = files("distcore_workbench") / "skeleton"
    more_files = FILES_OF_ROWS if skeleton == ROWS else {}
    for template, target in (FILES | more_files).items():
        text = (templates / template.format(skeleton=skeleton)).read_text(encoding="utf-8")
        file = folder / target.format(package=package)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(text).substitute(words), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"new {kind} {name!r}: {file} cannot be written: {error.strerror}"
            ) from None
    return folder
