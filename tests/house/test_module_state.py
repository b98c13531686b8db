"""Two runs in one process cannot meet: what a module keeps, and functions change, is listed here
with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    *sorted((ROOT / "core/distcore").rglob("*.py")),
    *sorted(file for file in ROOT.glob("plugins/*/*/**/*.py") if "tests" not in file.parts),
]
OF_THE_PROCESS = {
    "core/distcore/distributed/devices.py": {"_EARLIER_PEAKS"},  # the counter of the peak is one
    "core/distcore/distributed/process_group.py": {"_STORES"},  # its server outlives the worlds
    "core/distcore/model/row_dropout.py": {"F", "_current", "_of_runs"},  # torch's
    "core/distcore/registry.py": {"_importing"},  # imported modules are those of the process
    "plugins/mesh/distcore_mesh/process_groups.py": {"_GROUPS"},  # torch's default group is one
}
"""What belongs to the process, as torch or Python has it: each run puts back what it found there,
or has an entry of its own.
"""
BY_CONTENT = {
    "plugins/tasks/distcore_tasks/shared/generation/rows.py": {"_MEASURED"},  # by model
}
"""What is known of an object, and goes with it: any run would find the same."""
SAID = {
    "plugins/optimizers/distcore_optimizers/muon.py": {"_log_once"},
    "plugins/tasks/distcore_tasks/shared/matched_weights.py": {"say_once"},
    "plugins/tasks/distcore_tasks/shared/sources.py": {"say_embedded"},
}
"""Lines that are said once a process: one run builds its model and prepares its data several times,
and a notebook that trains again has read them.
"""
OF_FILES = {
    "plugins/data/distcore_data/fetching.py": {"HELD"},
    "plugins/data/distcore_data/formats/arrow_numbers.py": {"_KEPT"},
    "plugins/data/distcore_data/orders/ahead.py": {"_AHEAD"},
    "plugins/data/distcore_data/remote.py": {"REMOTE"},
}
"""Files that this process has open or has fetched, by their paths in the cache, which is one for
all processes. To become objects that are passed: names may leave this list, and none may join it.
"""
CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "remove", "setdefault", "sort", "update"),
}
"""Methods that change a container."""


def changed_state(text: str) -> Iterator[str]:
    """Yield each name of a module that one of its functions binds anew or changes, and each cached
    function that returns nothing: its cache is there to be changed.
    """
    tree = ast.parse(text)
    of_module = set(names_of_module(tree))
    for function in ast.walk(tree):
        if isinstance(function, ast.Global):
            yield from function.names
        if isinstance(function, ast.FunctionDef):
            changed = changed_in(function)
            yield from (name for name in changed if name in of_module or is_constant(name))
            is_cached = any("cache" in ast.unparse(mark) for mark in function.decorator_list)
            if is_cached and function.returns and ast.unparse(function.returns) == "None":
                yield function.name


def names_of_module(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module assigns, or imports from a package of ours."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            stores = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            yield from (name.id for name in stores if isinstance(name.ctx, ast.Store))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distcore"):
            yield from (alias.name for alias in node.names if is_constant(alias.name))


def is_constant(name: str) -> bool:
    """Return True for a name as those of values of a module are spelled."""
    return name.isupper()


def changed_in(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names in ``function`` that are changed in place, and are not its own."""
    own = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    own |= {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(function):
        changed: ast.expr | None = None
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                changed = node.func.value
            elif isinstance(node.func, ast.Name) and node.func.id == "next":
                changed = node.args[0]
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        if isinstance(changed, ast.Name) and changed.id not in own:
            yield changed.id
        if isinstance(changed, ast.Attribute) and is_constant(changed.attr):
            yield changed.attr


def test_what_a_module_keeps_and_changes_is_listed_with_its_reason() -> None:
    listed = OF_THE_PROCESS | BY_CONTENT | SAID
    kept = {
        file.relative_to(ROOT).as_posix(): set(changed_state(file.read_text(encoding="utf-8")))
        for file in SOURCES
    }
    kept = {file: names - OF_FILES.get(file, set()) for file, names in kept.items()}
    assert {file: names for file, names in kept.items() if names} == listed


def test_state_of_a_module_is_seen_however_it_is_changed() -> None:
    text = """
from distcore.somewhere import SHARED, elsewhere
A, B, C, D, E, F, G = {}, [], set(), 0, count(), {}, {}
@cache
def say() -> None: ...
@cache
def read() -> int: ...
def change(F):
    global D
    A["key"] = 1
    B.append(1)
    C.attribute = 2
    next(E)
    elsewhere.THEIRS.clear()
    elsewhere.update()
    F["key"] = 1
    del SHARED["key"]
    G = {}
    G["key"] = 1
"""
    assert sorted(changed_state(text)) == ["A", "B", "C", "D", "E", "SHARED", "THEIRS", "say"]
