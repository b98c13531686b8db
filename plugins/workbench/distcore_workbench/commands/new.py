"""``distcore new strategy|task NAME``: write a package that passes its own contract test as written."""

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

SUMMARY = "write the package of a strategy or a task"

KINDS = {"strategy": "distcore.strategies", "task": "distcore.tasks"}
"""What can be written, with the group of its entry point."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore new strategy|task NAME [--into FOLDER]"
    parser.add_argument("kind", metavar="strategy|task", help="what to write")
    parser.add_argument(
        "name", metavar="NAME", help="name that will follow --strategy or --task; the folder is distcore-NAME"
    )
    parser.add_argument(
        "--into", metavar="FOLDER", default=".", help="where the new folder goes (default: the current one)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the package, print the next commands, and return 0; raises ConfigError."""
    kind = arguments.kind
    if kind not in KINDS:
        raise ConfigError(f"new {kind}: no such kind{nearest(kind, KINDS)} (kinds: {', '.join(KINDS)})")
    folder = write_package(kind, arguments.name, Path(arguments.into))
    print(f"wrote {folder}; next:")
    print(f"  {_in_path('python')} -m pip install --editable {folder}")
    print(f"  {_in_path('python')} -m pytest {folder}")
    print(f"  {_in_path('distcore')} check --{kind} {arguments.name}")
    return 0


def _in_path(program: str) -> str:
    """Return how a shell here starts ``program`` of this environment: by its name if that is the one that is found."""
    there = Path(sys.executable).parent / program
    in_path = shutil.which(program)
    if in_path and Path(in_path) == there:
        return program
    return str(there.relative_to(Path.cwd()) if there.is_relative_to(Path.cwd()) else there)


def write_package(kind: str, name: str, into: Path) -> Path:
    """Write the package of the strategy or task ``name`` into a new folder below ``into``; raises ConfigError."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ConfigError(f"new {kind} {name!r}: expected lower-case letters, digits and hyphens, a letter first")
    folder, package = into / f"distcore-{name}", f"distcore_{name.replace('-', '_')}"
    if name in entry_points(group=KINDS[kind]).names or folder.name in {one.name for one in distributions()}:
        raise ConfigError(f"new {kind} {name!r}: is installed, and pip would replace it; choose another name")
    if folder.exists():
        raise ConfigError(f"new {kind} {name!r}: {folder} already exists; choose another name or --into")
    templates = files("distcore_workbench") / "skeleton" / kind
    for template, target in {
        "pyproject.toml.txt": "pyproject.toml",
        "README.md.txt": "README.md",
        f"{kind}.py.txt": f"{package}/__init__.py",
        "py.typed.txt": f"{package}/py.typed",
        "test.py.txt": f"tests/test_{package}.py",
    }.items():
        text = Template((templates / template).read_text(encoding="utf-8")).substitute(name=name, package=package)
        try:
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            (folder / target).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"new {kind} {name!r}: {folder / target} cannot be written: {error.strerror}") from None
    return folder
