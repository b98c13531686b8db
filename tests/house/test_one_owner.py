"""One owner of the resolved run: one place copies a config, builds a strategy, builds a task,
asks what it declares.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    *sorted((ROOT / "core/distcore").rglob("*.py")),
    *sorted(file for file in ROOT.glob("plugins/*/*/**/*.py") if "tests" not in file.parts),
]
OF_A_MANIFEST = "core/distcore/checkpoint/manifest.py"
"""The one copy of a model of pydantic that is no config."""


def calls(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each function that is called, and its first argument where
    that is a text.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            first = node.args[0] if node.args else None
            yield (
                name,
                (
                    first.value
                    if isinstance(first, ast.Constant) and isinstance(first.value, str)
                    else None
                ),
            )


@cache
def calls_by_file() -> dict[str, list[tuple[str, str | None]]]:
    """The calls of each file of the sources, which are parsed once for all tests."""
    return {
        file.relative_to(ROOT).as_posix(): [*calls(file.read_text(encoding="utf-8"))]
        for file in SOURCES
    }


def places(function: str, first: str | None = None) -> dict[str, int]:
    """How often each file calls ``function``, with the text ``first`` as its first argument
    if one is given.
    """
    counts: Counter[str] = Counter()
    for file, made in calls_by_file().items():
        counts[file] = sum(name == function and first in (None, text) for name, text in made)
    return dict(+counts)


def test_a_config_is_copied_in_one_module() -> None:
    assert places("model_copy").keys() - {OF_A_MANIFEST} == {"core/distcore/config/loading.py"}


def test_a_strategy_is_built_in_one_place() -> None:
    assert places("build", "strategy") == {"core/distcore/resolve/strategies.py": 1}
    assert places("load", "strategies") == {
        "core/distcore/resolve/strategies.py": 1,
        # which option a value after the colon sets: builds nothing
        "core/distcore/plugin/strategy/argument.py": 1,
    }


def test_a_task_is_built_in_one_place() -> None:
    assert places("build", "task") == {"core/distcore/resolve/tasks.py": 1}


def test_a_run_is_made_in_one_place() -> None:
    """Who needs one without training, such as a planner or the laws, asks that place for it."""
    assert places("Run") == {"core/distcore/engine/build.py": 1}


def test_a_strategy_is_asked_what_it_declares_in_one_place_beside_its_hooks() -> None:
    assert places("capabilities_of") == {
        "core/distcore/resolve/strategies.py": 1,
        "core/distcore/plugin/strategy/hooks.py": 1,  # of an object that a caller registers himself
    }


def test_the_engine_and_the_jobs_of_a_run_build_neither() -> None:
    below = ("core/distcore/engine/", "core/distcore/jobs/")
    rooms = {
        file
        for name in ("named", "bind", "expanded")
        for file in places(name)
        if file.startswith(below)
    }
    assert not rooms
    assert not [file for file in places("load_strategy") if file.startswith(below)]
    # of a checkpoint: no run
    tasks = [file for file in places("load_task") if file.startswith(below)]
    assert tasks == ["core/distcore/jobs/export.py"]


def test_calls_are_counted_however_a_function_is_reached() -> None:
    text = (
        "config.model_copy(update={})\nbuild('strategy', 1)\noptions.build('strategy',"
        " 2)\nbuild(kind, 3)\n"
    )
    assert list(calls(text)) == [
        ("model_copy", None),
        ("build", "strategy"),
        ("build", "strategy"),
        ("build", None),
    ]
