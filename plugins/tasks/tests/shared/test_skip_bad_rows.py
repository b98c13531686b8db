"""``--skip-bad-rows N``: a run without the bad rows, the same on every rank and on resume, and
a list of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import CLASSES, encoded, in_folders, in_parquet, pixels
from shard_cases import tar

from distcore import DataError, RunConfig, launch, train
from distcore.cli.main import main
from distcore_tasks.image_classification.task import ImageClassification
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.shared.bad_rows import bad_rows_warnings

BAD = {5: '{"text": "cut', 11: '{"texts": "another name"}'}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    lines = [
        BAD.get(number, json.dumps({"text": f"number {number}", "label": number % 2}))
        for number in range(24)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    good = [line for number, line in enumerate(lines) if number not in BAD]
    (tmp_path / "good.jsonl").write_text("\n".join(good) + "\n")
    return tmp_path / "rows.jsonl"


def config(rows: Path, out: str, most: int = 2, **changes: Any) -> RunConfig:
    options = {
        "data": str(rows),
        "model": "bert-tiny",
        "max_seq_len": 16,
        "dropout": 0.0,
        "skip_bad_rows": most,
    }
    keys = {
        "task": "text-classification",
        "task_options": options,
        "max_steps": 4,
        "global_batch_size": 4,
        "lr": 1e-3,
        "device": "cpu",
        "log_every": 1,
        "schedule": {"name": "constant"},
        "out": str(rows.parent / out),
        "extensions": {"progress": False},
    }
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


def test_more_bad_rows_than_allowed_are_one_line_also_from_the_cache(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(rows.parent)
    flags = [
        "train",
        "--data",
        "rows.jsonl",
        "--out",
        "run",
        "--strategy",
        "ddp",
        "--nproc",
        "2",
        "--skip-bad-rows",
    ]
    line = "error: data file rows.jsonl, row 12: no column 'text'"
    assert main([*flags, "1"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)
    data = MaskedLM(data="rows.jsonl", skip_bad_rows=2).prepare(RunConfig())
    assert data.warnings[0].startswith("2 bad rows are passed over, the first is data")
    assert bad_rows_warnings(["row 7"])[0].startswith(
        "1 bad row is passed over, the first is row 7;"
    )
    with pytest.raises(
        DataError, match=r"row 12: .*; more bad rows than the 1 of --skip-bad-rows$"
    ):
        MaskedLM(data="rows.jsonl", skip_bad_rows=1).prepare(RunConfig())


def damaged_folder(folder: Path) -> Path:
    images = in_folders(folder / "photos", 12)
    (images / "red/03.png").write_bytes(b"no image")
    (images / "blue/06.png").write_bytes(b"")
    return images


def damaged_parquet(folder: Path) -> Path:
    images: list[bytes | None] = [encoded(pixels(row)) for row in range(12)]
    images[3], images[6] = b"no image", None
    return in_parquet(folder / "photos.parquet", images, [CLASSES[row % 2] for row in range(12)])


def damaged_shards(folder: Path) -> Path:
    """A shard with one image that is none, and one that ends inside its third row."""
    for shard in range(3):
        rows = [
            {"cls": str(row % 2).encode(), "png": encoded(pixels(6 * shard + row))}
            for row in range(6)
        ]
        if shard == 0:
            rows[3]["png"] = b"no image"
        tar(folder / f"photos-{shard}.tar", rows)
    content = (folder / "photos-2.tar").read_bytes()
    (folder / "photos-2.tar").write_bytes(content[: content.index(b"000002.png") + 600])
    return folder / "photos-*.tar"


def damaged_array(folder: Path) -> Path:
    labels = [-1 if row == 0 else -7 if row == 5 else row % 2 for row in range(12)]
    np.savez(
        folder / "photos.npz", images=np.stack([pixels(row) for row in range(12)]), labels=labels
    )
    return folder / "photos.npz"


IMAGES: dict[Callable[[Path], Path], tuple[int, list[str]]] = {
    damaged_folder: (10, ["blue/06.png: is empty", "red/03.png: is no image that Pillow knows"]),
    damaged_parquet: (
        10,
        ["row 4: is no image that Pillow knows", "row 7: image is missing (null), expected the"],
    ),
    damaged_array: (10, ["row 1: label -1 is out of range", "row 6: label -7 is out of range"]),
    damaged_shards: (13, ["row 3: 000002.png has ", "row 4: is no image that Pillow knows"]),
}


@pytest.mark.parametrize("make", IMAGES, ids=lambda make: make.__name__)
def test_images_that_cannot_be_read_are_passed_over_and_listed(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    source, (left, expected) = str(make(tmp_path)), IMAGES[make]
    for _ in range(2):  # the second time from the cache
        task = ImageClassification(data=source, eval_data=source, skip_bad_rows=2)
        data: Any = task.prepare(RunConfig())
        assert len(data.train) == len(data.evaluation) == left
        assert len(data.train.batch(np.arange(left))["labels"]) == left
        task.save(tmp_path / "run", RunConfig(), data)
        listed = (tmp_path / "run/bad_rows.txt").read_text().splitlines()
        assert [
            line.split(", ", 1)[1][: len(part)] for line, part in zip(listed, expected, strict=True)
        ] == expected
    for most in (1, 0):
        with pytest.raises(DataError) as error:
            ImageClassification(data=source, skip_bad_rows=most).prepare(RunConfig())
        assert str(error.value).endswith("; more bad rows than the 1 of --skip-bad-rows") == bool(
            most
        )
        assert "\n" not in str(error.value)


def test_images_of_an_array_stay_with_their_labels_and_rows(tmp_path: Path) -> None:
    bad = str(damaged_array(tmp_path))
    rows = [row for row in range(12) if row not in (0, 5)]
    np.savez(
        tmp_path / "good.npz",
        images=np.stack([pixels(row) for row in rows]),
        labels=[row % 2 for row in rows],
    )
    sets: list[Any] = [
        ImageClassification(data=data, eval_data=data, skip_bad_rows=2)
        .prepare(RunConfig())
        .evaluation
        for data in (bad, str(tmp_path / "good.npz"))
    ]
    one, two = sets
    for name, values in one.batch(np.arange(10)).items():
        assert values.tolist() == two.batch(np.arange(10))[name].tolist()
    assert [origin["row"] for origin in one.origins()] == [row + 1 for row in rows]
