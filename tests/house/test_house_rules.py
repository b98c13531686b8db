"""Promises of the sources: the core names no backend, a plugin imports only public
names of what it declares.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from itertools import chain
from pathlib import Path
from pkgutil import iter_modules

import pytest

import distcore

ROOT = Path(__file__).parents[2]
CORE = sorted((ROOT / "core").rglob("*.py"))
PACKAGES = sorted(file.parent for file in ROOT.glob("plugins/*/distcore_*/__init__.py"))
ROOMS = (
    "config",
    "plugin",
    "rank_environment",
    "distributed",
    "strategies",
    "launchers",
    "model",
    "checkpoint",
    "resolve",
    "engine",
    "extensions",
    "jobs",
    "testing",
    "cli",
)
"""From the ground up: a room imports the rooms before it, never one behind it."""
BELOW = {"deprecation", "errors", "files", "hints", "lazy", "registry", "rounding"}
"""Modules beside the rooms, which every room may import; they import no room."""
LOOSE = {"__init__", "__main__", "lab", *BELOW}
"""All modules beside the rooms. No room imports the others, which offer what is in rooms."""
FACES = {
    "distcore": 80,
    "distcore.lab": 20,
    "distcore.checkpoint": 10,
    "distcore.cli": 20,
    "distcore.distributed": 10,
    "distcore.engine.tracing": 10,
    "distcore.files": 10,
    "distcore.hints": 5,
    "distcore.launchers": 20,
    "distcore.launchers.processes": 15,
    "distcore.model": 20,
    "distcore.plugin.batching": 10,
    "distcore.plugin.strategy": 10,
    "distcore.rank_environment": 10,
    "distcore.registry": 5,
    "distcore.resolve.padding_free": 5,
    "distcore.testing": 20,
    "distcore_data.formats": 30,
    "distcore_tasks.rows": 10,
}
"""The packages and modules whose ``__all__`` is public, each with the largest number of names."""
BACKENDS = re.compile(
    r"\b(ddp|dp|fsdp2?|fully_shard|deepspeed|horovod|accelerate|DistributedDataParallel)\b", re.I
)
PLUGIN = re.compile(rf"\bdistcore[-_]({'|'.join(folder.parent.name for folder in PACKAGES)})\b")
"""The distribution or the package of a plugin of this repository."""


def names_and_texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each identifier, import and string of a module, docstrings left out."""
    tree = ast.parse(source)
    explanations = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            yield node.lineno, " ".join([module, *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Constant) and node not in explanations:
            yield node.lineno, str(node.value)


def plugins_named(source: str) -> list[str]:
    """The lines of a module that name a backend, or a plugin of this repository."""
    return [
        f"{line}: {text}"
        for line, text in names_and_texts(source)
        if BACKENDS.search(text) or PLUGIN.search(text)
    ]


def test_the_core_names_no_backend_and_no_plugin() -> None:
    for file in CORE:
        assert not plugins_named(file.read_text()), file


def test_a_plugin_that_the_core_names_is_seen() -> None:
    source = (
        '"For readers, such as ddp\'s."\nimport deepspeed\nfrom torch import fully_shard\n'
        "NAMES = ('fsdp',)\ndef late(module):\n    how = f'pip install distcore-tasks{NAMES}'\n"
        "    return module.horovod  # unlike accelerate\n"
    )
    lines = [line.partition(":")[0] for line in plugins_named(source)]
    assert sorted(lines) == ["2", "3", "4", "6", "7"]


@cache
def imports_of(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """Every import of a file: at the top, in functions, for types."""
    return [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything of distcore that ``file`` imports: at the top,
    in functions, for types.
    """
    for node in imports_of(file):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "distcore"
        ):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name)
                for alias in node.names
                if alias.name.split(".")[0] == "distcore"
            )


def upward(file: Path, room: str | None) -> list[str]:
    """The imports of ``file`` that lead to a room which it may not know; ``None``: it stands
    loose beside the rooms.
    """
    below = set(ROOMS[: ROOMS.index(room) + 1]) if room else set()
    above = {*ROOMS, "lab"} - below
    return [
        f"{file}:{line}: {name}" for line, name in imported(file) if name.split(".")[1] in above
    ]


def test_the_core_is_its_rooms_and_a_few_loose_modules() -> None:
    package = ROOT / "core/distcore"
    assert {file.parent.name for file in package.glob("*/__init__.py")} == set(ROOMS)
    assert {file.stem for file in package.glob("*.py")} == LOOSE


def test_a_room_imports_only_rooms_below_it() -> None:
    for file in CORE:
        room, *inner = file.relative_to(ROOT / "core/distcore").parts
        # but the public names, and ``python -m distcore``
        if inner or not file.stem.startswith("__"):
            assert not upward(file, room if inner else None)


def test_an_import_of_a_room_above_is_seen_wherever_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "from distcore.plugin.strategy.contract import Run\n"
        "if TYPE_CHECKING:\n    from distcore.engine import trainer\n"
        "def late():\n    import distcore.cli.main\n"
    )
    assert [line.partition(":")[2] for line in upward(file, "model")] == [
        "4: distcore.engine.trainer", "6: distcore.cli.main",
    ]  # fmt: skip


def declared(plugin: Path) -> set[str]:
    """The packages of distcore that the distribution in ``plugin`` requires, always
    or for an extra.
    """
    project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    names = [
        re.split(r"[^\w.-]", line)[0]
        for line in (*project["dependencies"], *chain.from_iterable(extras))
    ]
    packages = {name.replace("-", "_") for name in names if name.startswith("distcore")}
    return {"distcore" if package == "distcore_core" else package for package in packages}


def not_public(file: Path, package: str, others: set[str]) -> list[str]:
    """The imports of ``file`` beyond its own package that a stranger may not make: only
    names in an ``__all__``.
    """
    imports = []
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            roots = {alias.name.split(".")[0] for alias in node.names}
            imports += [
                f"{file}:{node.lineno}: import {root}"
                for root in roots
                if root.startswith("distcore")
            ]
        elif (
            isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("distcore")
        ):
            if node.module.split(".")[0] == package:
                continue
            names = {alias.name for alias in node.names}
            public = set(import_module(node.module).__all__) if node.module in others else set()
            imports += [
                f"{file}:{node.lineno}: {node.module}.{name}" for name in sorted(names - public)
            ]
    return imports


def test_a_plugin_imports_only_public_names_of_what_it_declares() -> None:
    for folder in PACKAGES:
        allowed = declared(folder.parent) | set(FACES)
        for file in sorted(folder.rglob("*.py")):
            assert not not_public(file, folder.name, allowed)


def test_imports_beyond_what_is_public_and_declared_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "from distcore import Run, nothing\nfrom distcore.plugin.strategy import contract\nfrom"
        " distcore_own.inner import anything\ndef late():\n    from distcore_deepspeed import"
        " read_config\n    import distcore_deepspeed\n"
    )
    private = [
        "1: distcore.nothing",
        "2: distcore.plugin.strategy.contract",
        "6: import distcore_deepspeed",
    ]
    lines = not_public(file, "distcore_own", {"distcore", "distcore_deepspeed"})
    assert sorted(line.partition(":")[2] for line in lines) == private
    undeclared = not_public(file, "distcore_own", {"distcore"})
    assert sorted(line.partition(":")[2] for line in undeclared) == sorted(
        [*private, "5: distcore_deepspeed.read_config"]
    )


def imports_by_name(file: Path, modules: Collection[str]) -> set[str]:
    """The ``modules`` that a file imports by ``import_module``: of a name, or of a name whose end
    is open, as in ``f"package.laws.{name}"``.
    """
    named: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")):
            continue
        match node.args[0]:
            case ast.Constant(value=str(name)):
                named |= {name} & set(modules)
            case ast.JoinedStr(values=[ast.Constant(value=str(start)), *_]):
                named |= {module for module in modules if module.startswith(start)}
    return named


def imports_within(folder: Path) -> dict[str, set[str]]:
    """Imports of each module from its own package: at the top, in functions, for types, and by
    ``import_module``.
    """
    modules = {
        ".".join(file.relative_to(folder.parent).with_suffix("").parts): file
        for file in folder.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        names: set[str] = set()
        for node in imports_of(file):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= (inner & modules.keys()) or {node.module}
        names |= imports_by_name(file, modules) - {module}
        graph[module] = {
            name if name in modules else f"{name}.__init__" for name in names
        } & modules.keys()
    return graph


def test_modules_of_a_plugin_import_each_other_in_no_circle() -> None:
    for folder in PACKAGES:
        assert list(TopologicalSorter(imports_within(folder)).static_order())


def test_what_looks_at_a_run_needs_no_planner() -> None:
    """Both trace a step, which the core does for them."""
    within = imports_within(ROOT / "plugins/workbench/distcore_workbench")
    room = "distcore_workbench.observe."
    imports = {name for module in within if module.startswith(room) for name in within[module]}
    assert not [name for name in imports if name.startswith("distcore_workbench.planning")]


def test_modules_of_the_core_import_each_other_in_no_circle() -> None:
    within = imports_within(ROOT / "core/distcore")
    del within["distcore.__init__"]  # the public names, each imported where it is first used
    graph = {module: imports - {"distcore.__init__"} for module, imports in within.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_a_circle_is_seen_also_where_an_import_is_only_for_types(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "one.py").write_text("from package import two\nfrom package.three import name\n")
    (folder / "two.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import package.one\n"
    )
    (folder / "three.py").write_text("import os\n")
    (folder / "room").mkdir()
    (folder / "room/four.py").write_text('import_module("package.three")\n')
    (folder / "room/five.py").write_text('importlib.import_module(f"package.room.{name}")\n')
    assert imports_within(folder) == {
        "package.one": {"package.two", "package.three"},
        "package.two": {"package.one"},
        "package.three": set(),
        "package.room.four": {"package.three"},
        "package.room.five": {"package.room.four"},
    }
    with pytest.raises(CycleError, match="cycle"):
        TopologicalSorter(imports_within(folder)).prepare()


@pytest.mark.parametrize(("face", "most"), FACES.items())
def test_public_names_exist_and_are_few(face: str, most: int) -> None:
    module = import_module(face)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert len(module.__all__) <= most


@pytest.mark.parametrize("face", FACES)
def test_no_module_hides_a_public_name(face: str) -> None:
    """A package that offers ``name`` from its module ``name`` gives the module once that is
    imported.
    """
    package = import_module(face)
    modules = {module.name for module in iter_modules(getattr(package, "__path__", ()))}
    assert not modules & set(package.__all__)


def test_jobs_are_no_public_module() -> None:
    assert not hasattr(import_module("distcore.jobs"), "__all__")


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'distcore' has no attribute 'nothing'"):
        distcore.nothing  # type: ignore[attr-defined]  # noqa: B018
