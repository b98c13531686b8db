"""``distcore eval``: the weights of a run, evaluated under any strategy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distcore.cli.main import main

pytestmark = pytest.mark.needs("distcore-tasks")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "world", ["--strategy single", "--strategy ddp --nproc 2", "--strategy ddp --nproc 3"]
)
def test_every_world_evaluates_as_the_run_did(
    run_folder: Path, world: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run_folder), "--json", *world.split()]) == 0
    evaluated = json.loads(capfd.readouterr().out.splitlines()[-1])["evaluation"]
    reported = json.loads((run_folder / "report.json").read_text())["evaluation"]
    assert evaluated["loss"] == pytest.approx(reported["loss"], rel=1e-5)
    assert evaluated | {"loss": 0} == reported | {"loss": 0}


@pytest.mark.parametrize("choice", ["--step 5", "--best", ""])
def test_the_checkpoint_is_chosen_and_named(
    run_folder: Path, capfd: pytest.CaptureFixture[str], choice: str
) -> None:
    assert main(["eval", str(run_folder), "--json", *choice.split()]) == 0
    out, err = capfd.readouterr()
    report = json.loads((run_folder / "report.json").read_text())
    best = report["best"]["step"]
    step = {"--step 5": 5, "--best": best, "": 6}[choice]
    assert f"evaluating step-0000000{step}" in err
    assert (", the newest" in err) is (choice == "")
    assert (f"; the best by loss is step-0000000{best}: --best\n" in err) is (step != best)
    loss = json.loads(out.splitlines()[-1])["evaluation"]["loss"]
    expected = {best: report["best"]["value"], 6: report["evaluation"]["loss"]}
    assert all(
        (loss == pytest.approx(value, rel=1e-5)) is (at == step) for at, value in expected.items()
    )


def test_rows_of_another_file_can_be_evaluated(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more.jsonl").write_text(
        '{"text": "good 1", "label": "good"}\n{"text": "bad 2", "label": "bad"}\n'
    )
    command = ["eval", str(run_folder / "checkpoints/step-00000006")]
    command += ["--data", str(tmp_path / "more.jsonl")]
    assert main(command) == 0
    assert "evaluated 2 of 2" in capfd.readouterr().out


def test_a_folder_without_checkpoint_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert (
        capfd.readouterr().err
        == f"error: {tmp_path}: holds no checkpoint; expected a run folder or a folder"
        " step-NNNNNNNN\n"
    )


def test_a_damaged_checkpoint_names_the_command_that_names_whole_ones(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_folder, run := tmp_path / "run")
    file = run / "checkpoints/step-00000006/model-00000-000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert main(["eval", str(run)]) == 2
    others = f"distcore checkpoint verify {run} names whole ones, for --step"
    assert (
        capfd.readouterr()
        .err.splitlines()[-1]
        .endswith(f"its SHA-256 is not the one in the manifest; {others}")
    )
    assert main(["eval", str(run), "--step", "5"]) == 0


def test_a_missing_column_gets_no_advice_that_would_not_help(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more.csv").write_text("review,label\nfine,good\nsad,bad\n")
    assert main(["eval", str(run_folder), "--data", str(tmp_path / "more.csv")]) == 2
    remedy = (
        "no column 'text' (found: review, label); all files of a run have the same columns; rows"
        " without"
    )
    assert remedy in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("setting", ["checkpoints.best=accuracy", "lr=2"])
def test_a_setting_of_training_is_refused(
    run_folder: Path, setting: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run_folder), "--best", "--set", setting]) == 2
    said = (
        f"error: --set {setting.partition('=')[0]}: belongs to training, and changes nothing here;"
        " leave it out"
    )
    assert capfd.readouterr().err.splitlines()[-1] == said


@pytest.fixture
def rows_file(run_folder: Path) -> Iterator[Path]:
    """The file that the run trained on, for a test to edit."""
    file = run_folder.parent / "rows.jsonl"
    before = file.read_text()
    yield file
    file.write_text(before)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [*rows, '{"text": "good more", "label": "good"}\n'],
        lambda rows: rows[1:],
        lambda rows: [row.replace('"label": "bad"', '"label": "so bad"') for row in rows],
        lambda rows: [rows[0].replace('"label": "good"', '"label": "bad"'), *rows[1:]],
    ],
    ids=["a row more", "a row less", "classes in another order", "another label"],
)
@pytest.mark.parametrize("ranks", ["", "--strategy ddp --nproc 2"])
def test_changed_training_data_are_refused(
    run_folder: Path,
    rows_file: Path,
    change: Callable[[list[str]], list[str]],
    ranks: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rows_file.write_text("".join(change(rows_file.read_text().splitlines(keepends=True))))
    assert main(["eval", str(run_folder), *ranks.split()]) == 2
    path = run_folder / "checkpoints/step-00000006"
    refused = capfd.readouterr().err.splitlines()[-1]
    assert refused.startswith(
        f"error: {path}: the training data ({rows_file}) are not the rows that its run trained on"
    )


def test_changed_rows_of_the_run_are_refused_beside_rows_of_another_file_too(
    run_folder: Path, rows_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test.jsonl").write_text(rows_file.read_text())
    command = ["eval", str(run_folder), "--data", str(tmp_path / "test.jsonl")]
    assert main(command) == 0
    rows_file.write_text("".join(rows_file.read_text().splitlines(keepends=True)[1:]))
    assert main(command) == 2
    assert "are not the rows that its run trained on" in capfd.readouterr().err.splitlines()[-1]
