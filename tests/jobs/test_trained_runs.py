"""``distcore.evaluate``, ``predict`` and ``load``: a program does what the commands do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import distcore
from distcore import CheckpointError, ConfigError, DataError, RunConfig, TaskError
from distcore.cli.main import main
from distcore.testing.problem import Problem

ROWS = [{"text": f"{word} 7", "label": word} for word in ("good", "bad", "good")]
needs_tasks = pytest.mark.needs("distcore-tasks")


@needs_tasks
def test_a_run_is_evaluated_as_by_the_command(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, arguments in (([], {}), (["--step", "5"], {"step": 5}), (["--best"], {"best": True})):
        assert main(["eval", str(run_folder), "--json", *more]) == 0
        expected = json.loads(capsys.readouterr().out)
        assert distcore.evaluate(run_folder, **arguments) == expected
    trained = json.loads((run_folder / "report.json").read_text())["evaluation"]
    assert distcore.evaluate(str(run_folder))["evaluation"]["loss"] == trained["loss"]


@needs_tasks
def test_rows_in_memory_are_evaluated_and_predicted(
    work_folder: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = work_folder / "new.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    in_memory = distcore.evaluate(run_folder, data=ROWS)["evaluation"]
    assert in_memory == distcore.evaluate(run_folder, data="new.jsonl")["evaluation"]
    assert in_memory["evaluated"] == 3

    assert main(["predict", str(run_folder), "--data", "new.jsonl", "--out", "lines.jsonl"]) == 0
    lines = [json.loads(line) for line in Path("lines.jsonl").read_text().splitlines()]
    answers = distcore.predict(run_folder, ROWS)
    assert [answer["scores"] for answer in answers] == [line["scores"] for line in lines]
    assert distcore.predict(run_folder, "new.jsonl") == lines
    named = [{"body": row["text"], "key": number} for number, row in enumerate(ROWS)]
    answers = distcore.predict(run_folder, named, text_column="body", id_column="key")
    assert [answer["id"] for answer in answers] == [0, 1, 2]
    assert "predicted" not in capsys.readouterr().out.partition("\n")[2]


@needs_tasks
def test_the_model_and_its_tokenizer_answer_as_the_predictions_do(run_folder: Path) -> None:
    model, tokenizer = distcore.load(run_folder, device="cpu")
    assert not model.training
    inputs = tokenizer([row["text"] for row in ROWS], return_tensors="pt", padding=True)
    with torch.no_grad():
        scores = model(**inputs).logits.softmax(-1)
    answers = distcore.predict(run_folder, ROWS)
    names = ["bad", "good"]
    for row, answer in zip(scores, answers, strict=True):
        expected = [answer["scores"][name] for name in names]
        assert row.tolist() == pytest.approx(expected, abs=1e-6)


@needs_tasks
def test_a_frame_trains_and_goes_on_like_a_file(work_folder: Path) -> None:
    pd: Any = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {"body": [f"{'good' if n % 2 else 'bad'} {n}" for n in range(40)], "label": [0, 1] * 20}
    )
    job: dict[str, Any] = {"data": frame, "text_column": "body", "model": "bert-tiny"}
    job |= {"device": "cpu", "log_every": 1, "save_every": 2, "extensions": {"progress": False}}
    whole = distcore.train(RunConfig(**job, max_steps=4, out="whole"))
    distcore.train(RunConfig(**job, max_steps=2, out="cut"))
    going_on = {"resume": "auto", "resume_changed": "max_steps"}
    cut = distcore.train(RunConfig(**job, **going_on, max_steps=4, out="cut"))
    assert whole["data"]["train"] == cut["data"]["train"]
    other = {"data": frame[::-1].reset_index(drop=True)}
    with pytest.raises(DataError, match="as before the resume: rows 1 to 40"):
        distcore.train(RunConfig(**job | other, **going_on, max_steps=5, out="cut"))


class Own(Problem):
    """A task of a notebook, which has no other name."""


def test_a_run_of_a_task_object_needs_that_object(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = RunConfig(out=str(out), max_steps=2, lr=0.1, device="cpu")
    report = distcore.train(config, Own())
    with pytest.raises(distcore.StrategyError, match="was given to train"):
        distcore.evaluate(out)
    with pytest.raises(TaskError, match=r"was given the class; give Own\(\)"):
        distcore.load(out, task=Own)  # type: ignore[arg-type]
    evaluated = distcore.evaluate(out, task=Own())["evaluation"]
    assert evaluated["loss"] == report["evaluation"]["loss"]
    model, tokenizer = distcore.load(out, task=Own(), device="cpu")
    assert tokenizer is None
    assert sum(parameter.numel() for parameter in model.parameters())


@needs_tasks
def test_what_is_wrong_is_one_line(run_folder: Path, work_folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        distcore.load(work_folder / "nowhere")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 \(there are: 4, 5, 6\)"):
        distcore.evaluate(run_folder, step=7)
    with pytest.raises(DataError, match="no column 'text'"):
        distcore.predict(run_folder, [{"body": "good"}])
    with pytest.raises(ConfigError, match="torch knows no such device type"):
        distcore.load(run_folder, device="gpu0")


@pytest.mark.needs("distcore-tasks", "distcore-ddp")
@pytest.mark.ranks
def test_several_ranks_evaluate_and_predict_the_same(run_folder: Path) -> None:
    one = distcore.evaluate(run_folder)["evaluation"]
    two = distcore.evaluate(run_folder, strategy="ddp", nproc=2)
    assert two["world_size"] == 2
    assert two["evaluation"]["accuracy"] == one["accuracy"]
    assert two["evaluation"]["loss"] == pytest.approx(one["loss"], abs=1e-6)
    predicted = distcore.predict(run_folder, ROWS, strategy="ddp", nproc=2)
    alone = distcore.predict(run_folder, ROWS)
    assert [row["prediction"] for row in predicted] == [row["prediction"] for row in alone]
