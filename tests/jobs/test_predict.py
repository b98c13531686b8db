"""``distcore predict``: a line for every row, under any strategy and number of ranks, also
after it was ended.
"""

from __future__ import annotations

import fcntl
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distcore import Simple
from distcore.cli.main import main
from distcore.errors import TaskError
from distcore.plugin.task.bound import BoundTask

pytestmark = pytest.mark.programs  # its runs are whole ones

ROWS = [
    {"id": f"r{n}", "text": f"{'good' if n % 3 else 'bad'} {n}" + " word" * (n % 7)}
    for n in range(150)
]
SMALL_WINDOWS = ["--set", "micro_batch_size=2"]
"""Of 64 rows for each rank."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "new.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def predict(run_folder: Path, rows: Path, out: Path, *flags: str) -> int:
    return main(
        [
            "predict",
            str(run_folder),
            "--data",
            str(rows),
            "--out",
            str(out),
            "--id-column",
            "id",
            *flags,
        ]
    )


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def by_one(
    run_folder: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The lines of a single process."""
    out = tmp_path_factory.mktemp("single") / "lines.jsonl"
    assert predict(run_folder, rows, out) == 0
    return lines_of(out)


def assert_same(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """But for the last digits of scores, which depend on the rows that share a forward pass."""
    for line, other in zip(actual, expected, strict=True):
        assert line["scores"] == pytest.approx(other["scores"], abs=2e-5)
        assert line | {"scores": 0} == other | {"scores": 0}


@pytest.mark.needs("distcore-tasks")
def test_every_row_has_a_line_in_order_with_its_file_number_and_id(
    rows: Path, by_one: list[dict[str, Any]]
) -> None:
    assert [(line["file"], line["row"], line["id"]) for line in by_one] == [
        (str(rows), number, row["id"]) for number, row in enumerate(ROWS, 1)
    ]
    assert all(sum(line["scores"].values()) == pytest.approx(1, abs=1e-5) for line in by_one)
    assert all(line["prediction"] == max(line["scores"], key=line["scores"].get) for line in by_one)
    assert set(by_one[0]) == {"file", "row", "id", "prediction", "scores"}


@pytest.mark.needs("distcore-ddp", "distcore-fsdp")
def test_rows_with_labels_are_predicted_as_the_run_s_own_test_did(
    run_folder: Path, tmp_path: Path
) -> None:
    file = run_folder.parent / "rows.jsonl"
    command = ["predict", str(run_folder), "--data", str(file)]
    command += ["--out", str(tmp_path / "lines.jsonl")]
    assert main(command) == 0
    tested = lines_of(run_folder / "predictions.jsonl")
    predicted = {line["row"]: line for line in lines_of(tmp_path / "lines.jsonl")}
    assert len(predicted) == 120
    assert_same([line | predicted[line["row"]] for line in tested], tested)


@pytest.mark.needs("distcore-ddp", "distcore-fsdp")
@pytest.mark.ranks
@pytest.mark.parametrize(
    "world", ["--strategy ddp --nproc 2", "--strategy fsdp --nproc 2", "--strategy ddp --nproc 3"]
)
def test_every_world_predicts_alike(
    run_folder: Path, rows: Path, tmp_path: Path, by_one: list[dict[str, Any]], world: str
) -> None:
    assert predict(run_folder, rows, tmp_path / "lines.jsonl", *world.split(), *SMALL_WINDOWS) == 0
    assert_same(lines_of(tmp_path / "lines.jsonl"), by_one)


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_rows_may_be_fewer_than_ranks(
    run_folder: Path, tmp_path: Path, by_one: list[dict[str, Any]]
) -> None:
    (tmp_path / "one.csv").write_text(f"name;review\nr0;{ROWS[0]['text']}\n")
    out, columns = tmp_path / "made/lines.jsonl", ["--text-column", "review", "--id-column", "name"]
    assert (
        predict(
            run_folder, tmp_path / "one.csv", out, *columns, "--strategy", "ddp", "--nproc", "3"
        )
        == 0
    )
    assert_same(lines_of(out), [by_one[0] | {"file": str(tmp_path / "one.csv")}])


def test_a_missing_column_of_names_is_said_with_its_flag(
    run_folder: Path, rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert predict(run_folder, rows, tmp_path / "lines.jsonl", "--id-column", "nmae") == 2
    assert capfd.readouterr().err.splitlines()[-1].endswith("; name it with --id-column NAME")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def ended(run_folder: Path, rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """The file of a prediction that found no space in the middle of a line of its second window."""
    out = tmp_path / "lines.jsonl"
    with files_of_at_most(12_500):
        assert predict(run_folder, rows, out, *SMALL_WINDOWS) == 2
    assert (
        capfd.readouterr().err.splitlines()[-1]
        == f"error: --out {out} cannot be written: File too large"
    )
    assert not out.exists()
    text = (tmp_path / "lines.jsonl.part").read_text()
    assert 64 < text.count("\n") < 128
    assert not text.endswith("\n")
    return out


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
@pytest.mark.parametrize("world", ["--strategy single", "--strategy ddp --nproc 2"])
def test_the_same_command_goes_on_behind_the_last_whole_line(
    run_folder: Path,
    rows: Path,
    ended: Path,
    by_one: list[dict[str, Any]],
    world: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    whole = (ended.parent / "lines.jsonl.part").read_text().rpartition("\n")[0]
    assert predict(run_folder, rows, ended, *world.split()) == 0
    assert (
        f"lines.jsonl.part has {whole.count(chr(10)) + 1} of 150 rows: going on"
        in capfd.readouterr().err
    )
    assert ended.read_text().startswith(whole)
    assert_same(lines_of(ended), by_one)
    assert [file.name for file in ended.parent.iterdir()] == ["lines.jsonl"]


@pytest.mark.needs("distcore-tasks")
def test_a_prediction_of_other_rows_does_not_go_on_in_the_same_file(
    run_folder: Path, rows: Path, ended: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.jsonl").write_text(rows.read_text() + json.dumps(ROWS[0]) + "\n")
    before = (tmp_path / "lines.jsonl.part").read_bytes()
    others: dict[str, list[Any]] = {
        "data file": [tmp_path / "other.jsonl"],
        "checkpoint": [rows, "--step", "5"],
        "task option": [rows, "--set", "max_seq_len=4"],
    }
    for what, (file, *flags) in others.items():
        assert predict(run_folder, Path(file), ended, *map(str, flags)) == 2
        assert (
            f"lines.jsonl.part was begun with another {what}; remove that file"
            in capfd.readouterr().err
        )
    assert (tmp_path / "lines.jsonl.part").read_bytes() == before


@pytest.mark.needs("distcore-ddp")
def test_two_processes_do_not_write_one_prediction(
    run_folder: Path, rows: Path, ended: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / "lines.jsonl.part"
    before = part.read_bytes()
    with part.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert predict(run_folder, rows, ended) == 2
    assert f"cannot be written: {part}: another process is writing it\n" in capfd.readouterr().err
    assert part.read_bytes() == before


GOOD = '{"text": "x", "id": 1}\n'
BAD = {
    "empty": ("", "lines.jsonl", "new.jsonl: is empty"),
    "no rows": ("\n", "lines.jsonl", "new.jsonl: holds no rows"),
    "column": (
        '{"txt": "x"}\n',
        "lines.jsonl",
        "no column 'text' (did you mean 'txt'?) (found: txt); name it with --text-column NAME",
    ),
    "text": (
        GOOD * 2000 + '{"text": 3, "id": 1}\n',
        "lines.jsonl",
        "row 2001: text is an integer (3)",
    ),
    "id": (
        '{"text": "x", "id": null}\n',
        "lines.jsonl",
        "row 1: id is missing, expected an integer or a",
    ),
    "suffix": (GOOD, "lines.json", "lines.json: expected a file that ends in .jsonl"),
    "there": (GOOD, "there.jsonl", "there.jsonl: is already there; name another file"),
    "no folder": (GOOD, "new.jsonl/lines.jsonl", "new.jsonl is not a folder that you may write to"),
}


@pytest.mark.needs("distcore-tasks")
@pytest.mark.parametrize(("content", "out", "line"), BAD.values(), ids=BAD.keys())
def test_rows_that_cannot_be_predicted_are_one_line_before_anything_is_written(
    run_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    content: str,
    out: str,
    line: str,
) -> None:
    (tmp_path / "new.jsonl").write_text(content)
    (tmp_path / "there.jsonl").touch()
    assert predict(run_folder, tmp_path / "new.jsonl", tmp_path / out) == 2
    _, error = capfd.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert line in error
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new.jsonl", "there.jsonl"]


def test_a_task_that_reads_no_rows_says_what_to_add_and_an_installed_one_what_else_there_is() -> (
    None
):
    with pytest.raises(
        TaskError, match=r"lacks row_columns\(\), unlabeled\(\), predictions\(\): add them; docs/"
    ):
        BoundTask.wrap(Simple()).predictions.check_without_labels("digits.py:Digits")
    with pytest.raises(
        TaskError, match=r"task digits: .* predictions\(\); distcore eval measures it on rows that"
    ):
        BoundTask.wrap(Simple()).predictions.check_without_labels("digits")


@pytest.mark.needs("distcore-tasks", "distcore-workbench")
@pytest.mark.parametrize("command", ["eval", "predict", "export"])
def test_labels_that_were_edited_after_the_run_are_refused(
    run_folder: Path, rows: Path, tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    labels = tmp_path / "run/labels.json"
    labels.write_text(json.dumps(list(reversed(json.loads(labels.read_text())))))
    out = str(tmp_path / "out.jsonl")
    run = str(tmp_path / "run")
    words = {
        "eval": ["eval", run],
        "predict": ["predict", run, "--data", str(rows), "--out", out],
        "export": ["checkpoint", "export", run, "--to", out],
    }
    assert main(words[command]) == 2
    assert (
        f"error: {labels}: is not the file that the run of step-00000006 saved"
        in capfd.readouterr().err
    )
    assert not Path(out).exists()
