"""An error in a user's own code: one line that ends where it was raised, and the traceback
in the run folder.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from work_folder import enter, install

from distcore.cli.main import main

TASK = """
import torch
from torch import nn
from distcore import Simple

class Points(Simple):
    def data(self):
        rows = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24))
        return rows, rows

    def model(self):
        return nn.Linear(4, 1)

    def row_loss(self, model, batch):
        points, targets = batch
        return self.squared(model(points)[:, 0], targets.reshape(7))

    def squared(self, predicted, targets):
        return (predicted - targets) ** 2

class Unprepared(Points):
    def data(self):
        return {}["rows"]
"""
STRATEGY = """
from distcore import hookimpl
from distcore.strategies.single import SingleStrategy

class Broken(SingleStrategy):
    @hookimpl
    def backward(self, loss):
        return 1 / 0
"""
JOB = (
    "train --device cpu --max-steps 1 --global-batch-size 8 --log-level error --out run --set"
    " extensions.progress=false"
)


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)
    for name, text in {"points.py": TASK, "broken.py": STRATEGY}.items():
        Path(name).write_text(text)


def line_number(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize(
    ("task", "cause", "part"),
    [
        ("Points", "RuntimeError: shape", "reshape(7)"),
        ("Unprepared", "KeyError: 'rows'", '{}["rows"]'),
    ],
)
def test_an_error_of_a_task_in_one_process(
    task: str, cause: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB.split(), "--task", f"points.py:{task}"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {cause}")
    place = f"points.py:{line_number(TASK, part)}"
    assert line.endswith(f"; traceback in run/errors/traceback.txt; raised at {place}")
    assert "Traceback" in Path("run/errors/traceback.txt").read_text()


@pytest.mark.parametrize("prove", ["auto", "off"])
def test_an_error_of_a_strategy_in_one_process(
    prove: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the task is at fault is measured in the first steps, if they are proved."""
    install(tmp_path, "broken-plugin", "[distcore.strategies]\nbroken = broken:Broken\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    Path("points.py").write_text(TASK.replace(".reshape(7)", ""))
    flags = ["--task", "points.py:Points", "--strategy", "broken", "--prove", prove]
    status = main([*JOB.split(), *flags])
    (line,) = capsys.readouterr().err.splitlines()
    cause = "ZeroDivisionError: division by zero"
    place = f"raised at broken.py:{line_number(STRATEGY, '1 / 0')}"
    if prove == "off":
        assert status == 3
        assert line == f"error: {cause}; traceback in run/errors/traceback.txt; {place}"
    else:
        assert status == 2
        assert line == (
            f"error: strategy 'broken' cannot train this model as it is: {cause}, where one plain"
            " process computes the same rows; another strategy may train it, such as --strategy"
            f" single; traceback in run/errors/rank-0.txt; {place}"
        )


@pytest.mark.parametrize("part", ["rows = torch", "points, targets = batch"])
@pytest.mark.parametrize("code", ["", "0", "'no rows'", "3"])
def test_a_task_that_exits_is_not_a_run_that_is_complete(
    part: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    leaving = TASK.replace(
        f"        {part}", f"        __import__('sys').exit({code})\n        {part}", 1
    )
    Path("points.py").write_text(leaving)
    assert main([*JOB.split(), "--task", "points.py:Points"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    place = f"points.py:{line_number(leaving, '.exit(')}"
    assert (
        line == f"error: the task's code, or a library, called sys.exit({code or None}); raised at"
        f" {place}"
    )


@pytest.mark.parametrize("part", ["rows = torch", "points, targets = batch"])
def test_a_task_that_takes_from_nothing_does_not_end_a_loop_of_ours(
    part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A StopIteration would end it, and within a generator Python says no more than
    that one was raised.
    """
    taking = TASK.replace(f"        {part}", f"        next(iter([]))\n        {part}", 1)
    Path("points.py").write_text(taking)
    assert main([*JOB.split(), "--task", "points.py:Points"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "took next() of what has no more values (StopIteration): give it a default" in line
    assert line.endswith(f"; raised at points.py:{line_number(taking, 'next(')}")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise SystemExit(0)", r"does not import: .* called sys.exit\(0\); raised at points.py:1"),
        (
            "__import__('argparse').ArgumentParser().parse_args(['a'])",
            r"called sys.exit\(2\); raised at points.py:1",
        ),
    ],
)
def test_a_file_that_exits_as_it_is_imported(
    code: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("points.py").write_text(f"{code}\n{TASK}")
    assert main([*JOB.split(), "--task", "points.py:Points"]) == 2
    assert re.search(says, capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "__import__('os').chdir('..')",
            r"task Points: its code changed the folder to \S+ \(os.chdir\); paths are of \S+",
        ),
        ("return [[1, None]] * 2", "rows of int, NoneType make no batch (.*); write collate"),
        (
            "return [[torch.ones(1), torch.ones(2)]] * 2",
            r"rows of \(1,\), \(2,\) make no batch .*; write collate",
        ),
    ],
)
def test_an_error_of_a_task_that_prepares_its_rows(
    code: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Path.cwd()
    Path("points.py").write_text(
        TASK.replace("        rows = torch", f"        {code}\n        rows = torch", 1)
    )
    try:
        assert main([*JOB.split(), "--task", "points.py:Points"]) == 2
    finally:
        os.chdir(here)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says, line)


def test_rows_of_a_file_for_a_task_that_makes_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("points.py").write_text(TASK.replace(".reshape(7)", ""))
    assert main([*JOB.split(), "--task", "points.py:Points"]) == 0
    assert main(["eval", "run", "--data", "rows.csv"]) == 2
    assert (
        "--data rows.csv: the task of this run makes its own rows"
        in capsys.readouterr().err.splitlines()[-1]
    )


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp")
def test_a_task_that_exits_in_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    Path("points.py").write_text(
        TASK.replace("points, targets = batch", "__import__('sys').exit(0)")
    )
    command = [*JOB.split(), "--task", "points.py:Points", "--strategy", "ddp", "--nproc", "2"]
    assert main(command) == 2
    assert "called sys.exit(0); raised at points.py:" in capfd.readouterr().err


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp")
def test_an_error_in_a_rank(capfd: pytest.CaptureFixture[str]) -> None:
    command = [*JOB.split(), "--task", "points.py:Points", "--strategy", "ddp", "--nproc", "2"]
    assert main(command) == 3
    (line,) = capfd.readouterr().err.splitlines()
    place = f"points.py:{line_number(TASK, 'reshape(7)')}"
    begin = r"error: rank ([01]) of 2 failed: RuntimeError: shape .*"
    said = re.fullmatch(
        rf"{begin}; traceback in \S*run/errors/rank-\1\.txt; raised at {place}", line
    )
    assert said, line
    assert "Traceback" in Path(f"run/errors/rank-{said[1]}.txt").read_text()


def test_a_file_that_does_not_import_says_in_which_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("points.py").write_text("import torch\n\nrows = tensor(3)\n")
    assert main([*JOB.split(), "--task", "points.py:Points"]) == 2
    assert capsys.readouterr().err.endswith("name 'tensor' is not defined; raised at points.py:3\n")


@pytest.mark.parametrize("missing", ["data", "model", "row_loss"])
def test_a_method_that_a_task_lacks_is_named(
    missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = re.sub(
        rf"    def {missing}\(self.*?\n(?=\n)", "    size = 3\n", TASK, count=1, flags=re.DOTALL
    )
    Path("points.py").write_text(own)
    assert main([*JOB.split(), "--task", "points.py:Points"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: task Points: has no {missing}(")
