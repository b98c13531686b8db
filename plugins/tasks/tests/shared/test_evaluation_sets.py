"""Several evaluation sets by ``--eval-data NAME=FILE``, in every task: prepared, evaluated
by ranks, and refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distcore import ConfigError, DataError, Report, RunConfig, launch, train
from distcore.cli.main import main
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.embedding.task import Embedding
from distcore_tasks.image_classification.task import ImageClassification
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.preference.task import Preference
from distcore_tasks.reward_model.task import RewardModel
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared.sources import data_warnings
from distcore_tasks.text_classification.task import TextClassification
from distcore_tasks.token_classification.task import TokenClassification

TASKS: dict[type[Any], Callable[[int], dict[str, Any]]] = {
    CausalLM: lambda n: {"prompt": f"after {n}?", "completion": f" comes {n + 1}"},
    Embedding: lambda n: {"anchor": f"after {n}?", "positive": f"comes {n + 1}"},
    MaskedLM: lambda n: {"text": f"number {n}"},
    Preference: lambda n: {
        "prompt": f"after {n}?",
        "chosen": f" comes {n + 1}",
        "rejected": " none",
    },
    RewardModel: lambda n: {
        "prompt": f"after {n}?",
        "chosen": f" comes {n + 1}",
        "rejected": " none",
    },
    Seq2Seq: lambda n: {"source": f"read {n}", "target": f"number {n % 7}"},
    TextClassification: lambda n: {"text": f"number {n}", "label": "ab"[n % 2]},
    TokenClassification: lambda n: {"tokens": ["number", str(n)], "tags": ["O", "B-N"]},
}
SIZES = {"train": 24, "easy": 9, "hard": 5}


def written(folder: Path, row: Callable[[int], dict[str, Any]]) -> dict[str, str]:
    """Write a file for each of ``SIZES``; return their paths."""
    for name, rows in SIZES.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row(number)) + "\n" for number in range(rows))
        )
    return {name: str(folder / f"{name}.jsonl") for name in SIZES}


def content(rows: Any) -> object:
    return rows.content, len(rows)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_every_task_prepares_each_set_as_it_prepares_one(task: type[Any], tmp_path: Path) -> None:
    train, *sets = written(tmp_path, TASKS[task]).values()
    several = task(data=train, eval_data=dict(zip(("easy", "hard"), sets, strict=True))).prepare(
        RunConfig()
    )
    assert list(several.evaluations) == ["easy", "hard"]
    assert several.test is several.evaluation is several.evaluations["easy"]
    for file, rows in zip(sets, several.evaluations.values(), strict=True):
        alone = task(data=train, eval_data=file).prepare(RunConfig())
        assert not alone.evaluations
        assert content(rows) == content(alone.evaluation)


def test_images_have_several_evaluation_sets() -> None:
    several = ImageClassification(
        data="digits", eval_data={"all": "digits", "again": "digits"}
    ).prepare(RunConfig())
    assert [len(rows) for rows in several.evaluations.values()] == [1797, 1797]


def config(folder: Path, out: str, **changes: Any) -> RunConfig:
    train, easy, hard = written(folder, TASKS[TextClassification]).values()
    options = {
        "data": train,
        "eval_data": {"easy": easy, "hard": hard},
        "model": "bert-tiny",
        "max_seq_len": 16,
        "dropout": 0.0,
    }
    keys = {
        "task": "text-classification",
        "task_options": options,
        "max_steps": 6,
        "global_batch_size": 8,
        "lr": 1e-3,
        "device": "cpu",
        "out": str(folder / out),
        "checkpoints": {"best": "hard/accuracy"},
        "extensions": {"progress": False},
    }
    return RunConfig.model_validate(keys | changes)


@pytest.mark.ranks
@pytest.mark.programs
@pytest.mark.timeout(300)
def test_two_ranks_count_each_row_of_each_set_once_as_one_process_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = train(config(tmp_path, "alone"))
    reports: list[Report] = launch(
        train, config(tmp_path, "ranks", nproc=2, strategy="ddp"), nproc=2
    )
    for name, one in alone["evaluations"].items():
        counted = dict.fromkeys(("evaluated", "unique", "dataset_size"), SIZES[name])
        for report in (alone, *reports):
            assert report["evaluations"][name] | counted == report["evaluations"][name]
            assert report["evaluations"][name]["loss"] == pytest.approx(one["loss"], rel=1e-5)
            assert report["evaluations"][name]["accuracy"] == one["accuracy"]
    assert reports[0]["best"] == alone["best"]
    assert main(["eval", str(tmp_path / "alone")]) == 0
    assert [
        line.partition(":")[0]
        for line in capfd.readouterr().out.splitlines()
        if "evaluated" in line
    ] == [
        "step-00000006, easy",
        "step-00000006, hard",
    ]
    assert main(["eval", str(tmp_path / "alone"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["evaluations"] == alone["evaluations"]
    command = ["eval", str(tmp_path / "alone"), "--data", str(tmp_path / "train.jsonl"), "--json"]
    assert main(command) == 0
    named = json.loads(capfd.readouterr().out)
    assert (named["evaluation"]["evaluated"], named["evaluations"]) == (
        SIZES["train"],
        {},
    ), "these rows and no others"
    assert alone["best"]
    assert alone["best"]["metric"] == "hard/accuracy"


@pytest.mark.programs
def test_a_resume_may_have_other_sets_as_it_may_have_another_file(tmp_path: Path) -> None:
    train(config(tmp_path, "run", max_steps=3, checkpoints={"best": "auto"}))
    flags = [
        "--out",
        str(tmp_path / "run"),
        "--resume",
        "auto",
        "--max-steps",
        "6",
        "--resume-changed",
        "max_steps",
    ]
    assert main(["train", *flags, "--eval-data", f"other={tmp_path}/hard.jsonl"]) == 0
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert list(report["evaluations"]) == ["other"]
    assert report["best"]["metric"] == "other/loss"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ["easy=easy.jsonl", "easy=hard.jsonl"],
            "--eval-data easy=hard.jsonl: 'easy' is given twice; name each",
        ),
        (
            ["ha rd=hard.jsonl"],
            "--eval-data ha rd=hard.jsonl: 'ha rd' cannot name an evaluation set, because",
        ),
        (
            ["easy=easy.jsonl", "hard.jsonl"],
            "--eval-data hard.jsonl: give each a name, --eval-data NAME=FILE, or give",
        ),
        (
            ["easy.jsonl", "hard.jsonl"],
            "--eval-data hard.jsonl: give each a name, --eval-data NAME=FILE, or give",
        ),
        (
            ["hard.jsonl", "easy=easy.jsonl"],
            "--eval-data easy=easy.jsonl: give each a name, --eval-data NAME=FILE, or",
        ),
        (
            ["easy=easy.jsonl", "hard=lacks.jsonl"],
            "evaluation set hard: data file lacks.jsonl, row 1: no column 'label'",
        ),
        (
            ["easy=easy.jsonl", "hard=empty.jsonl"],
            "evaluation set hard: data file empty.jsonl: is empty",
        ),
        (
            ["easy=easy.jsonl", "hard=missing.jsonl"],
            "evaluation set hard: data file missing.jsonl: no such file",
        ),
        (
            ["easy=easy.jsonl", "hard=other.jsonl"],
            "evaluation set hard: data file other.jsonl, row 1: label 'z' is out of range",
        ),
    ],
)
def test_a_set_that_cannot_be_used_is_one_line_before_ranks_start(
    given: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, TASKS[TextClassification])
    (tmp_path / "lacks.jsonl").write_text('{"text": "number 1"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "other.jsonl").write_text('{"text": "number 1", "label": "z"}\n')
    flags = [word for one in given for word in ("--eval-data", one)]
    command = ["train", "--data", "train.jsonl", "--strategy", "ddp", "--nproc", "2"]
    command += ["--out", "run", *flags]
    assert main(command) == 2
    errors = [said for said in capsys.readouterr().err.splitlines() if said.startswith("error: ")]
    assert [error.removeprefix("error: ")[: len(line)] for error in errors] == [line]
    assert not (tmp_path / "run").exists()


FOREIGN = {
    CausalLM: Embedding,
    Embedding: Seq2Seq,
    MaskedLM: RewardModel,
    Preference: CausalLM,
    RewardModel: TextClassification,
    Seq2Seq: TokenClassification,
    TextClassification: Preference,
    TokenClassification: MaskedLM,
}
"""Each task, and one of whose rows it makes nothing."""


@pytest.mark.parametrize("task", FOREIGN, ids=lambda task: task.__name__)
def test_no_task_says_that_a_set_may_have_the_metrics_of_another(
    task: type[Any], tmp_path: Path
) -> None:
    train, easy, _ = written(tmp_path, TASKS[task]).values()
    hard = tmp_path / "of_another.jsonl"
    hard.write_text("".join(json.dumps(TASKS[FOREIGN[task]](number)) + "\n" for number in range(5)))
    with pytest.raises(
        DataError,
        match=(
            r"evaluation set hard: data file .*of_another\.jsonl.* (no column|none of the columns) "
        ),
    ):
        task(data=train, eval_data={"easy": easy, "hard": str(hard)}).prepare(RunConfig())


def test_a_set_of_another_form_is_refused_by_name(tmp_path: Path) -> None:
    train, easy, _ = written(tmp_path, TASKS[CausalLM]).values()
    (tmp_path / "texts.jsonl").write_text('{"text": "number 1"}\n')
    with pytest.raises(
        DataError,
        match=(
            r"texts\.jsonl, for evaluation\.hard: has documents, but .* has prompts: use one form"
        ),
    ):
        CausalLM(
            data=train, eval_data={"easy": easy, "hard": str(tmp_path / "texts.jsonl")}
        ).prepare(RunConfig())


def test_no_set_at_all_is_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^eval_data = \{\}: names no file; leave it out, or name one$"
    ):
        _ = MaskedLM(data="rows.jsonl", eval_data={}).held_out


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        ("rows/../rows/a.jsonl", "is what is trained on (rows)"),
        ("link.jsonl", "is what is trained on (rows)"),
        ("hard.jsonl", "is what is trained on (rows)"),
        ("other.jsonl,link.jsonl", "has link.jsonl, which is trained on"),
        ("other.jsonl", None),
    ],
)
def test_the_training_rows_by_another_name_are_said(
    held_out: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    for name in ("rows/a.jsonl", "other.jsonl"):
        Path(name).write_text('{"text": "number 1"}\n')
    Path("link.jsonl").symlink_to("rows/a.jsonl")
    Path("hard.jsonl").hardlink_to("rows/a.jsonl")
    warnings = list(data_warnings(MaskedLM(data="rows", eval_data=held_out)))
    line = f"--eval-data {held_out}: {said}; its metrics say nothing about other rows"
    assert warnings == ([line] if said else [])


def test_a_set_of_the_training_rows_is_said() -> None:
    warnings = list(
        data_warnings(
            MaskedLM(data="rows.jsonl", eval_data={"seen": "rows.jsonl", "new": "new.jsonl"})
        )
    )
    assert warnings == [
        "--eval-data seen=rows.jsonl: is what is trained on; its metrics say nothing about other"
        " rows"
    ]
