"""``distcore new``; that the skeletons pass their contracts stands in test_distributions.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distcore.cli.main import main

BIN = Path(sys.executable).parent


@pytest.mark.parametrize(("kind", "name"), [("strategy", "single"), ("task", "workbench")])
def test_what_is_installed_is_not_written_again(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", kind, name, "--into", str(tmp_path)]) == 2
    said = f"error: new {kind} {name!r}: is installed, and pip would replace it; choose another name\n"
    assert capsys.readouterr().err == said
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("kind", "cls"), [("strategy", "Strategy"), ("task", "Task")])
def test_the_skeleton_has_its_name_everywhere(
    kind: str, cls: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", kind, "my-own", "--into", str(tmp_path)]) == 0
    wrote, install, test, check = capsys.readouterr().out.splitlines()
    folder = tmp_path / "distcore-my-own"
    assert wrote == f"wrote {folder}; next:"
    assert install.endswith(f"python -m pip install --editable {folder}")
    assert test.endswith(f"python -m pytest {folder}")
    assert check.endswith(f"distcore check --{kind} my-own")
    written = {str(file.relative_to(tmp_path)): file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    assert set(written) == {
        f"distcore-my-own/{name}"
        for name in (
            "pyproject.toml",
            "README.md",
            "distcore_my_own/__init__.py",
            "distcore_my_own/py.typed",
            "tests/test_distcore_my_own.py",
        )
    }
    assert f'my-own = "distcore_my_own:{cls}"' in written["distcore-my-own/pyproject.toml"]
    assert not any("$" in text for text in written.values())


@pytest.mark.parametrize(("path", "program"), [(sys.executable, "distcore"), ("/nowhere/python", f"{BIN}/distcore")])
def test_the_next_commands_are_those_of_this_environment(
    path: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(path).parent))
    monkeypatch.chdir(tmp_path)
    assert main(["new", "task", "mine", "--into", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"  {program} check --task mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strategie", "x"], "new strategie: no such kind (did you mean 'strategy'?) (kinds: strategy, task)"),
        (
            ["strategy", "Mine!"],
            "new strategy 'Mine!': expected lower-case letters, digits and hyphens, a letter first",
        ),
    ],
)
def test_wrong_words_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "distcore-mine").mkdir()
    assert main(["new", "strategy", "mine", "--into", str(tmp_path)]) == 2
    assert "already exists; choose another name or --into" in capsys.readouterr().err
    assert not list((tmp_path / "distcore-mine").iterdir())
