"""A data file that changed before a resume is one line with its name and its rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from stream_cases import ROWS

from distcore import DataError, RunConfig
from distcore.cli.main import main
from distcore.testing.problem import RandomRows
from distcore_tasks.shared.changed_files import FILES, check_files, write_files
from distcore_tasks.text_classification.task import TextClassification

SAVED = [("a.jsonl", "1", 30), ("b.jsonl", "2", 20), ("c.jsonl", "3", 10)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with a checkpoint."""
    (tmp_path / "run/checkpoints/step-00000004").mkdir(parents=True)
    write_files(tmp_path / "run", SAVED, RandomRows(3))
    return tmp_path / "run"


@pytest.mark.parametrize("by_path", [False, True], ids=["auto", "path"])
@pytest.mark.parametrize(
    ("files", "line"),
    [
        (
            [SAVED[0], ("b.jsonl", "9", 25), SAVED[2]],
            "b.jsonl: has changed on resume: rows 31 to 50 of data; put back",
        ),
        (
            [SAVED[0], SAVED[2]],
            "c.jsonl: is not b.jsonl, as before the resume: rows 31 to 50 of data; put back what",
        ),
        (
            SAVED[:2],
            "c.jsonl: is missing on resume: rows 51 to 60 of data; put back what was there when ",
        ),
        (
            [*SAVED, ("d.jsonl", "4", 5)],
            "d.jsonl: is new on resume: from row 61 of data on; put back what was there",
        ),
    ],
)
def test_a_file_that_changed_is_named_with_its_rows(
    files: list[tuple[str, str, int]], line: str, by_path: bool, run: Path
) -> None:
    resume = str(run / "checkpoints/step-00000004") if by_path else "auto"
    config = RunConfig(
        resume=resume, out=None if by_path else str(run), resume_changed=["max_steps"]
    )
    with pytest.raises(DataError) as error:
        check_files(files, TextClassification(), config)
    assert str(error.value).startswith(f"data file {line}")
    assert "\n" not in str(error.value)


def test_files_may_have_other_names_and_a_new_run_or_other_rows_other_files(run: Path) -> None:
    task, others = TextClassification(), SAVED[:1]
    check_files(
        [(f"moved/{name}", *rest) for name, *rest in SAVED],  # type: ignore[misc]
        task,
        RunConfig(resume="auto", out=str(run)),
    )
    check_files(others, task, RunConfig(out=str(run)))
    check_files(
        others, task, RunConfig(resume="auto", out=str(run), resume_changed=["task_options.order"])
    )
    # a run that was killed before its first checkpoint begins anew
    shutil.rmtree(run / "checkpoints")
    check_files(others, task, RunConfig(resume="auto", out=str(run)))


@pytest.mark.programs
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "stored"])
def test_a_run_lists_its_files_and_is_not_resumed_on_another(
    stream: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text(
            "".join(json.dumps(ROWS["labels"](n)) + "\n" for n in range(24))
        )
    flags = [
        "train",
        "--data",
        "a.jsonl,b.jsonl",
        "--stream",
        str(stream).lower(),
        "--model",
        "bert-tiny",
        "--device",
        "cpu",
    ]
    flags += [
        "--global-batch-size",
        "8",
        "--out",
        "run",
        "--resume",
        "auto",
        "--resume-changed",
        "max_steps",
    ]
    assert main([*flags, "--max-steps", "2"]) == 0
    listed = json.loads((tmp_path / "run" / FILES).read_text())["files"]
    assert [(name, rows) for name, _, rows in listed] == [("a.jsonl", 24), ("b.jsonl", 24)]
    if not stream:  # of stored rows only what a run reads of them counts
        Path("b.jsonl").write_text(Path("b.jsonl").read_text().replace("{", '{"more": 1, '))
        assert main([*flags, "--max-steps", "3"]) == 0
    Path("b.jsonl").write_text(Path("b.jsonl").read_text().replace("sky", "hill"))
    capsys.readouterr()
    assert main([*flags, "--max-steps", "4"]) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    expected = (
        "data file b.jsonl: has changed on resume: rows 25 to 48 of data; put back what was there"
        " when run began"
    )
    assert error == f"error: {expected}, or begin another run"
