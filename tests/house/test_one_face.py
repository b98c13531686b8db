"""The abilities of a task and of a dataset are looked up in one module each, for the
core and the workbench.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "core/distcore", ROOT / "plugins/workbench/distcore_workbench")
ASKING = {"isinstance", "issubclass", "hasattr", "getattr", "callable", "vars", "dir"}
DATA_SETS = {"dataset", "data.train", "data.evaluation", "data.test"}


def asked(source: str, of: set[str]) -> Iterator[int]:
    """The lines that ask an object which is written as one of ``of``, at its end, for its
    class or its members.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Match):
            subject, owner = ast.unparse(node.subject), ""
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ASKING
            and node.args
        ):
            subject = ast.unparse(node.args[0]).removesuffix(")").removeprefix("type(")
            # of the method that is asked for
            owner = subject.rpartition(".")[0] if node.func.id == "callable" else ""
        else:
            continue
        if any(
            each == name or each.endswith(f".{name}") for name in of for each in (subject, owner)
        ):
            yield node.lineno


def asking(of: set[str]) -> set[str]:
    return {
        str(file.relative_to(package))
        for package in PACKAGES
        for file in package.rglob("*.py")
        if any(asked(file.read_text(), of))
    }


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(task, X)",
        "hasattr(self.task, 'save')",
        "getattr(lab.task, 'save', None)",
        "hasattr(type(task), 'x')",
        "callable(job.task.save)",
        "vars(bound.task)",
        "match task:\n    case X(): pass",
    ],
)
def test_a_question_to_a_task_is_seen(line: str) -> None:
    assert list(asked(line, {"task"})) == [1]


def test_a_task_is_asked_in_one_module() -> None:
    # metrics of a class, which help shows without importing torch
    declared = {"plugin/task/task.py"}
    bound = {"plugin/task/bound.py"}  # is it bound already
    assert asking({"task"}) - declared - bound == {"plugin/task/methods.py"}


def test_a_dataset_is_asked_in_one_module() -> None:
    # Answers of a task, the torch datasets of `Simple`, and a law that counts the rows of
    # its own dataset.
    others = {"plugin/task/task_predictions.py", "plugin/task/simple.py", "testing/laws/resume.py"}
    assert asking(DATA_SETS) - others == {"plugin/task/datasets.py"}
