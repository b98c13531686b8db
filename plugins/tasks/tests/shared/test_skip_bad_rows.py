"""``--skip-bad-rows N``: a run without the bad rows, the same on every rank and on resume, and a list of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distcore import DataError, RunConfig, launch, train
from distcore.cli.main import main
from distcore.errors import ConfigError
from distcore_tasks.image_classification.task import ImageClassification
from distcore_tasks.masked_lm.task import MaskedLM

BAD = {5: '{"text": "cut', 11: '{"texts": "another name"}'}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    lines = [BAD.get(number, json.dumps({"text": f"number {number}", "label": number % 2})) for number in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    good = [line for number, line in enumerate(lines) if number not in BAD]
    (tmp_path / "good.jsonl").write_text("\n".join(good) + "\n")
    return tmp_path / "rows.jsonl"


def config(rows: Path, out: str, most: int = 2, **changes: Any) -> RunConfig:
    options = {"data": str(rows), "model": "bert-tiny", "max_seq_len": 16, "dropout": 0.0, "skip_bad_rows": most}
    keys = {"task": "text-classification", "task_options": options, "max_steps": 4, "global_batch_size": 4, "lr": 1e-3,
            "device": "cpu", "log_every": 1, "schedule": {"name": "constant"}, "out": str(rows.parent / out),
            "extensions": {"progress": False}}  # fmt: skip
    return RunConfig.model_validate(keys | changes)


def losses(rows: Path, out: str) -> list[float]:
    lines = map(json.loads, (rows.parent / out / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.ranks
@pytest.mark.programs
@pytest.mark.timeout(300)
def test_two_ranks_train_without_them_as_on_the_good_rows_alone_and_go_on(rows: Path) -> None:
    train(config(rows.with_name("good.jsonl"), "good", 0))
    two: dict[str, Any] = {"nproc": 2, "strategy": "ddp"}
    launch(train, config(rows, "run", max_steps=2, **two), nproc=2)
    listed = (rows.parent / "run/bad_rows.txt").read_text().splitlines()
    assert listed[0].startswith(f"data file {rows}, line 6, column 10: not valid JSON")
    assert listed[1].startswith(f"data file {rows}, row 12: no column 'text'")
    launch(train, config(rows, "run", resume="auto", resume_changed="max_steps", **two), nproc=2)
    assert losses(rows, "run") == pytest.approx(losses(rows, "good"), rel=1e-4)


def test_more_of_them_than_allowed_are_one_line_also_from_the_cache(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(rows.parent)
    flags = ["train", "--data", "rows.jsonl", "--out", "run", "--strategy", "ddp", "--nproc", "2", "--skip-bad-rows"]
    line = "error: data file rows.jsonl, row 12: no column 'text'"
    assert main([*flags, "1"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)
    data = MaskedLM(data="rows.jsonl", skip_bad_rows=2).prepare(RunConfig())
    assert data.warnings[0].startswith("2 rows that cannot be read or lack a column are passed over, the first is data")
    with pytest.raises(DataError, match=r"row 12: .*; more bad rows than the 1 of --skip-bad-rows$"):
        MaskedLM(data="rows.jsonl", skip_bad_rows=1).prepare(RunConfig())


def test_images_are_refused(rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"^skip_bad_rows = 1: images that cannot be read are refused; leave it out$"):
        ImageClassification(skip_bad_rows=1).prepare(RunConfig())
