"""What the sources themselves promise: the core names no backend, plugins import only public names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import distcore

ROOT = Path(__file__).parents[2]
CORE = sorted((ROOT / "core").rglob("*.py"))
PLUGINS = sorted(file for file in ROOT.glob("plugins/*/*/**/*.py") if "tests" not in file.parts)
ROOMS = (
    "plugin", "distributed", "launchers", "data", "checkpoint", "engine", "tasks", "extensions", "jobs", "compare",
    "testing", "cli",
)  # fmt: skip
"""From the ground up: a room imports the rooms before it, never one behind it."""
LOOSE = {"__init__", "__main__", "config", "errors", "files", "tables"}
"""Modules beside the rooms, which every room may import; they import no room, but for the two dunder ones."""
BACKENDS = re.compile(r"\b(ddp|dp|fsdp2?|fully_shard|deepspeed|horovod|accelerate|DistributedDataParallel)\b", re.I)


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(ROOT / "core")))
def test_the_core_names_no_backend(file: Path) -> None:
    for number, line in enumerate(file.read_text().splitlines(), 1):
        assert not BACKENDS.search(line), f"{file}:{number}: {line.strip()}"


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything of distcore that ``file`` imports: at the top, in functions, for types."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "distcore":
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "distcore")


def upward(file: Path, room: str | None) -> list[str]:
    """The imports of ``file`` that lead to a room which it may not know; ``None``: it stands loose beside the rooms."""
    below = set(ROOMS[: ROOMS.index(room) + 1]) if room else set()
    above = set(ROOMS) - below
    return [f"{file}:{line}: {name}" for line, name in imported(file) if name.split(".")[1] in above]


def test_the_core_is_its_rooms_and_a_few_loose_modules() -> None:
    package = ROOT / "core/distcore"
    assert {file.parent.name for file in package.glob("*/__init__.py")} == set(ROOMS)
    assert {file.stem for file in package.glob("*.py")} == LOOSE


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(ROOT / "core")))
def test_a_room_imports_only_rooms_below_it(file: Path) -> None:
    room, *inner = file.relative_to(ROOT / "core/distcore").parts
    if not inner and file.stem.startswith("__"):
        return  # the public names, and ``python -m distcore``
    assert not upward(file, room if inner else None)


def test_an_import_of_a_room_above_is_seen_wherever_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "from distcore.plugin.contract import Run\n"
        "if TYPE_CHECKING:\n    from distcore.engine import trainer\n"
        "def late():\n    import distcore.cli.main\n"
    )
    assert [line.partition(":")[2] for line in upward(file, "data")] == [
        "4: distcore.engine.trainer", "6: distcore.cli.main",
    ]  # fmt: skip


@pytest.mark.parametrize("file", PLUGINS, ids=lambda file: str(file.relative_to(ROOT / "plugins")))
def test_a_plugin_imports_only_public_names(file: Path) -> None:
    package = file.relative_to(ROOT / "plugins").parts[1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0].startswith("distcore"):
            if node.module == "distcore":
                private = {alias.name for alias in node.names} - set(distcore.__all__)
                assert not private, f"{file}:{node.lineno}: not public: {private}"
            else:
                assert node.module.split(".")[0] == package, f"{file}:{node.lineno}: {node.module}"


def test_public_names_exist() -> None:
    for name in distcore.__all__:
        assert getattr(distcore, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'distcore' has no attribute 'nothing'"):
        distcore.nothing  # noqa: B018
