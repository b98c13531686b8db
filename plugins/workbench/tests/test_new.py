"""``distcore new``; that packages keep their laws once they are
installed stands in test_distributions.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from work_folder import install

from distcore.cli.main import main
from distcore.testing import suite_of
from distcore_workbench.commands.new import KINDS, write_package

BIN = Path(sys.executable).parent
OBJECTS = {
    "strategy": ":Strategy",
    "task": ":Task",
    "optimizer": ":Optimizer",
    "schedule": ":schedule",
    "extension": ":Extension",
    "reader": "",
    "launcher": ":Launcher",
    "export": ":export",
    "command": "",
}
"""By kind: the object of the entry point, in the package."""


@pytest.mark.parametrize(("kind", "name"), [("strategy", "single"), ("task", "workbench")])
def test_an_installed_name_is_not_written_again(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", kind, name, "--into", str(tmp_path)]) == 2
    said = (
        f"error: new {kind} {name!r}: is installed, and pip would replace it; choose another name\n"
    )
    assert capsys.readouterr().err == said
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("kind", "object_"), OBJECTS.items())
def test_the_skeleton_has_its_name_everywhere(
    kind: str, object_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", kind, "my-own", "--into", str(tmp_path)]) == 0
    wrote, install, test, check = capsys.readouterr().out.splitlines()
    folder = tmp_path / "distcore-my-own"
    assert wrote == f"wrote {folder}; next:"
    assert install.endswith(f"python -m pip install --editable {folder}")
    assert test.endswith(f"python -m pytest {folder}")
    assert check.endswith(f"distcore check --{kind} my-own")
    written = {
        str(file.relative_to(tmp_path)): file.read_text()
        for file in tmp_path.rglob("*")
        if file.is_file()
    }
    assert set(written) == {
        f"distcore-my-own/{name}"
        for name in (
            ".github/workflows/laws.yml",
            "pyproject.toml",
            "README.md",
            "distcore_my_own/__init__.py",
            "distcore_my_own/py.typed",
        )
    }
    project = tomllib.loads(written["distcore-my-own/pyproject.toml"])
    ((group, entry),) = project["project"]["entry-points"].items()
    assert group == f"distcore.{KINDS[kind]}"
    assert entry == {"my-own": f"distcore_my_own{object_}"}
    assert project["tool"]["pytest"]["ini_options"] == {"addopts": f"--distcore {kind}=my-own"}
    workflow = written.pop("distcore-my-own/.github/workflows/laws.yml")
    assert f'"$(distcore check --{kind} my-own)"' in workflow
    assert "jobs" in yaml.safe_load(workflow)
    assert not any("$" in text for text in written.values())


def test_the_skeleton_of_rows_has_a_test_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "task", "my-rows", "--rows", "--into", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("check --task my-rows\n")
    folder = tmp_path / "distcore-my-rows"
    written = {str(file.relative_to(folder)): file for file in folder.rglob("*.*")}
    own = {"distcore_my_rows/__init__.py", "distcore_my_rows/rows.jsonl", "tests/test_rows.py"}
    assert own < set(written)
    assert not any("$" in written[name].read_text() for name in own)
    # Not its laws, which take a minute.
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "tests"]
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_the_skeleton_of_rows_keeps_the_laws_of_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_package("task", "my-laws", tmp_path, "rows")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    reference = f"{folder}/distcore_my_laws/__init__.py:Task"
    findings = suite_of("task").measure(reference)
    assert [str(finding) for finding in findings if finding.held is False] == []
    assert any(finding.held for finding in findings)


def test_rows_are_those_of_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "reader", "mine", "--rows", "--into", str(tmp_path)]) == 2
    said = "error: new reader --rows: only a task has rows; leave it out\n"
    assert capsys.readouterr().err == said


SLOW = ("extension", "launcher")
"""Kinds whose laws take many seconds."""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW))
        for kind in sorted(OBJECTS.keys() - {"strategy", "task"})
    ],
)
def test_the_skeleton_keeps_the_laws_of_its_kind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_package(kind, "my-own", tmp_path)
    groups = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n{name} = {value}\n"
        for group, entry in groups.items()
        for name, value in entry.items()
    ]
    install(folder, "distcore-my-own", "".join(lines))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.delitem(sys.modules, "distcore_my_own", raising=False)
    findings = suite_of(kind).measure("my-own")
    assert [str(finding) for finding in findings if finding.held is False] == []
    assert any(finding.held for finding in findings)


@pytest.mark.parametrize(
    ("path", "program"), [(sys.executable, "distcore"), ("/nowhere/python", f"{BIN}/distcore")]
)
def test_the_next_commands_are_those_of_this_environment(
    path: str,
    program: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(Path(path).parent))
    monkeypatch.chdir(tmp_path)
    assert main(["new", "task", "mine", "--into", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"  {program} check --task mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["strategie", "x"],
            "new strategie: no such kind (did you mean 'strategy'?) (kinds: "
            + ", ".join(OBJECTS)
            + ")",
        ),
        (
            ["strategy", "Mine!"],
            "new strategy 'Mine!': expected lower-case letters, digits and hyphens, a letter first",
        ),
    ],
)
def test_wrong_words_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_folder_that_is_there_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "distcore-mine").mkdir()
    assert main(["new", "strategy", "mine", "--into", str(tmp_path)]) == 2
    assert "already exists; choose another name or --into" in capsys.readouterr().err
    assert not list((tmp_path / "distcore-mine").iterdir())
