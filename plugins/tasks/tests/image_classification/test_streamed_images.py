"""Streamed images are those that a run would store: the same ones, in the same order,
with the same losses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shard_cases as shards
from image_cases import CLASSES, encoded, in_folders, in_parquet, pixels
from row_cases import is_streamed

from distcore import ConfigError, DataError, RunConfig, launch, train
from distcore.plugin.batching.sampling import training_plan
from distcore_data import MixedRows
from distcore_tasks.image_classification import stream_sources
from distcore_tasks.image_classification.options import Augment, Columns
from distcore_tasks.image_classification.preprocessing import Preprocessing
from distcore_tasks.image_classification.rows import (
    AugmentedImages,
    ImageDataset,
    ImageRows,
    streamed_dataset,
)
from distcore_tasks.image_classification.sources import open_source
from distcore_tasks.image_classification.stream_sources import NumberedImages
from distcore_tasks.image_classification.task import ImageClassification
from distcore_tasks.shared.options import Filter, Order

pytestmark = pytest.mark.programs
ROWS, SIZE = 60, 12
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))


def rows(first: int = 0) -> list[Row]:
    return [
        {"image": encoded(pixels(row)), "label": CLASSES[row % 2]}
        for row in range(first, first + ROWS)
    ]


def tars(folder: Path, images: list[Row]) -> Path:
    folder.mkdir(parents=True)
    for number, some in enumerate(shards.some_of(images, 7)):
        members = [
            {
                "png": row["image"],
                "cls": str(row["label"]).encode(),
                "kind.txt": b"%d" % (place % 4),
            }
            for place, row in enumerate(some)
        ]
        shards.tar(folder / f"{number}.tar", members)
    return folder


def arrows(folder: Path, images: list[Row]) -> Path:
    folder.mkdir()
    (folder / "rows.arrow").write_bytes(shards.arrow_bytes(images, indexed=True))
    return folder / "rows.arrow"


def parquet(folder: Path, images: list[Row]) -> Path:
    folder.mkdir()
    numbers = [CLASSES.index(row["label"]) for row in images]
    return in_parquet(
        folder / "rows.parquet", [{"bytes": row["image"]} for row in images], numbers, CLASSES
    )


FORMS: dict[str, Callable[[Path, list[Row]], Path]] = {
    "tar": tars,
    "mds": lambda folder, images: shards.mds(folder, images, {"image": "png", "label": "str"}),
    "litdata": shards.litdata,
    "arrow": arrows,
    "parquet": parquet,
    "folder": lambda folder, images: in_folders(folder, len(images)),
}


def both(data: Path | str, **options: Any) -> tuple[Any, Any]:
    """The datasets of a run that streams, and of one that stores."""
    config = RunConfig(global_batch_size=8)
    streamed, stored = (
        ImageClassification(data=str(data), image_size=SIZE, stream=stream, **options).prepare(
            config
        )
        for stream in (True, False)
    )
    return streamed, stored


def check_alike(streamed: Any, stored: Any) -> None:
    """Each image of an epoch is the same, with its class and its changes, whatever else
    is in its batch.
    """
    assert len(streamed) == len(stored)
    order = np.random.default_rng(0).permutation(len(stored))
    for epoch in (0, 3):
        one, other = (
            rows.at(epoch) if hasattr(rows, "at") else rows for rows in (streamed, stored)
        )
        expected = other.batch(order)
        for start in range(0, len(order), 7):
            batch = one.batch(order[start : start + 7])
            assert batch["labels"].tolist() == expected["labels"][start : start + 7].tolist()
            assert bool(
                (batch["pixel_values"] == expected["pixel_values"][start : start + 7]).all()
            )
    assert streamed.lengths[order].tolist() == stored.lengths[order].tolist()
    assert streamed.items[order].tolist() == stored.items[order].tolist()


@pytest.mark.parametrize(
    ("form", "held"),
    [*((form, place % 2 == 0) for place, form in enumerate(FORMS)), ("tar", False)],
)
def test_streamed_images_are_the_stored_ones(form: str, held: bool, tmp_path: Path) -> None:
    data = FORMS[form](tmp_path / "data", rows())
    options = {"eval_data": str(tars(tmp_path / "held", rows(200)))} if held else {}
    streamed, stored = both(data, augment=Augment(0.25, flip=True), **options)
    assert is_streamed(streamed.train) == (form != "folder")
    assert streamed.facts["train"] == stored.facts["train"]
    assert streamed.labels == stored.labels == CLASSES
    check_alike(streamed.train, stored.train)
    check_alike(streamed.evaluation, stored.evaluation)
    places = [
        [(origin["file"], origin.get("row")) for origin in rows.test.origins()]
        for rows in (streamed, stored)
    ]
    assert places[0] == places[1]


def test_images_that_a_filter_keeps_and_bad_ones_are_those_that_a_run_would_store(
    tmp_path: Path,
) -> None:
    images = rows()
    images[5]["image"], images[17]["label"], images[30]["image"] = (
        b"no image",
        "",
        images[30]["image"][:40],
    )
    options: Row = {"filter": Filter("kind.txt", "[012]"), "skip_bad_rows": 4}
    streamed, stored = both(tars(tmp_path / "data", images), **options)
    check_alike(streamed.train, stored.train)
    check_alike(streamed.evaluation, stored.evaluation)
    assert streamed.bad_rows == stored.bad_rows
    assert [line.partition(": ")[0].partition("data/")[2] for line in streamed.bad_rows] == [
        "0.tar, row 6", "4.tar, row 3",
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["tar", "folder"])
def test_a_mixture_of_streams_is_the_stored_one(form: str, tmp_path: Path) -> None:
    for name, first in (("web", 0), ("photos", 100)):
        FORMS[form](tmp_path / name, rows(first))
    order = Order(mix={"web": 0.7, "photos": 0.3})
    streamed, stored = both(f"{tmp_path}/web,{tmp_path}/photos", order=order)
    assert isinstance(streamed.train.row_order, MixedRows)
    assert streamed.train.row_order.content == stored.train.row_order.content
    check_alike(streamed.train, stored.train)


def test_folders_may_have_classes_of_their_own(tmp_path: Path) -> None:
    more = in_folders(tmp_path / "more", 8)
    (more / "red").rename(more / "green")
    for data in (f"{in_folders(tmp_path / 'photos', 8)},{more}", f"{tmp_path}/*o*"):
        streamed, stored = both(data)
        assert streamed.classes == stored.classes == ("blue", "green", "red")
        check_alike(streamed.train, stored.train)
    with pytest.raises(DataError, match=r"^data /[^,]*/lost: no such folder or file$"):
        both(f"{tmp_path}/photos,{tmp_path}/lost")
    with pytest.raises(
        DataError, match=r"^data /[^,]*/0\.tar: is no folder of images, as others are$"
    ):
        both(f"{tars(tmp_path / 'tars', rows())}/0.tar,{tmp_path}/photos")


@pytest.mark.parametrize("kind", ["full", "windows"])
def test_an_epoch_has_each_image_once(kind: Any, tmp_path: Path) -> None:
    train: Any = both(tars(tmp_path / "data", rows()), order=Order(kind=kind), eval_fraction=0.2)[
        0
    ].train
    plan, seen = training_plan(RunConfig(global_batch_size=8), train), list[int]()
    for step in range(plan.steps):
        seen += plan.rows(1, step).tolist()
    assert sorted(seen) == list(range(48))
    assert len({train.table.values.number(row) for row in seen}) == 48


class WrongLabels(ImageDataset):
    """Takes classes by the row in the source, though some rows are not trained on."""

    def batch(self, indices: np.ndarray) -> Any:
        values: Any = self.table
        numbers = values.values.numbers(indices)
        return super().batch(indices) | {"labels": super().batch(numbers % len(self))["labels"]}


class EachPlace(ImageRows):
    """Changes an image by its place in the batch."""

    def collate(self, rows: Any, batch: Any, info: Any) -> Any:
        return super().collate(rows, replace(batch, numbers=batch.numbers % 2), info)


class ByPlace(AugmentedImages):
    """Changes an image by its place in the batch, so that another cut of a
    step has other pixels.
    """

    def at(self, epoch: int) -> Any:
        right = super().at(epoch)
        return replace(right, pipeline=EachPlace(**vars(right.pipeline)))


@pytest.mark.parametrize("broken", [WrongLabels, ByPlace])
def test_a_stream_that_is_broken_is_told_from_the_stored_images(
    broken: type[Any], tmp_path: Path
) -> None:
    augment = Augment(0.25 if broken is ByPlace else 0)
    streamed, stored = both(tars(tmp_path / "data", rows()), augment=augment, eval_fraction=0.3)
    fields = {name: getattr(streamed.train, name) for name in broken.__dataclass_fields__}
    with pytest.raises(AssertionError):
        check_alike(broken(**fields), stored.train)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({"png": b"text", "cls": b"red"}, "row 5: is no image that Pillow knows"),
    "cut": ({"png": encoded(pixels(0))[:-60], "cls": b"red"}, "row 5: cannot be decoded: "),
    "no member": ({"cls": b"red"}, "row 5: "),
}


@pytest.mark.parametrize("kind", BAD)
def test_an_image_that_cannot_be_read_is_named_when_its_step_comes_or_passed_over(
    kind: str, tmp_path: Path
) -> None:
    row, problem = BAD[kind]
    images = [{"png": image["image"], "cls": image["label"].encode()} for image in rows()]
    (tmp_path / "data").mkdir()
    shards.tar(tmp_path / "data/0.tar", images[:20])
    shards.tar(tmp_path / "data/1.tar", [*images[20:24], row, *images[24:]])
    options: Row = {
        "data": str(tmp_path / "data"),
        "eval_data": str(tmp_path / "data/0.tar"),
        "stream": True,
    }
    train = ImageClassification(**options).prepare(RunConfig()).train
    train.batch(np.array([23, 25]))
    with pytest.raises(DataError) as error:
        train.batch(np.array([3, 24]))
    line = f"data file {tmp_path}/data/1.tar, {problem}"
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
    assert "'image', which the rows before" in str(error.value) or kind != "no member"
    skipped: Any = ImageClassification(**options, skip_bad_rows=1).prepare(RunConfig())
    assert (len(train), len(skipped.train), len(skipped.bad_rows)) == (61, 60, 1)
    assert skipped.bad_rows[0].startswith(line)
    skipped.train.batch(np.arange(60))


def test_an_image_of_a_folder_is_decoded_when_its_step_comes(tmp_path: Path) -> None:
    photos = in_folders(tmp_path / "photos", 20)
    (photos / "red/03.png").write_bytes(b"text")
    task = ImageClassification(
        data=str(photos), stream=True, eval_data=str(in_folders(tmp_path / "held", 6))
    )
    train = task.prepare(RunConfig()).train
    with pytest.raises(DataError) as error:
        train.batch(np.arange(20))
    assert str(error.value) == f"image folder {photos}, red/03.png: is no image that Pillow knows"
    skipped: Any = replace(task, skip_bad_rows=1).prepare(RunConfig())
    assert [len(skipped.train), *skipped.bad_rows] == [19, str(error.value)]


def test_images_are_neither_decoded_nor_copied_before_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(stream_sources, "decode", lambda image: decoded.append(len(image)))
    monkeypatch.setattr(stream_sources, "check_images", None)
    data = tars(tmp_path / "data", rows())
    ImageClassification(data=str(data), stream=True).prepare(RunConfig())
    assert len(decoded) == 1, "the first, which shows whether the column is right"
    copied = sum(
        file.stat().st_size for file in (tmp_path / "cache/images").rglob("*") if file.is_file()
    )
    assert copied < len(rows()[0]["image"]) * 3


def test_a_column_without_images_is_one_line_before_ranks_start(tmp_path: Path) -> None:
    data = shards.tar(
        tmp_path / "a.tar", [{"txt": b"text", "cls": b"red"}, {"txt": b"text", "cls": b"blue"}]
    )
    with pytest.raises(DataError, match=r"a\.tar, row 1: no column 'image' \(found: .*txt"):
        ImageClassification(data=str(data), stream=True).prepare(RunConfig())
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 8, 8), np.uint8), labels=[0, 1, 0, 1])
    with pytest.raises(
        ConfigError, match=r"^task_options\.stream = true, data: an array is mapped into memory"
    ):
        ImageClassification(data=str(tmp_path / "a.npz"), stream=True).prepare(RunConfig())
    with pytest.raises(
        ConfigError, match=r"^task_options\.stream = true, data: digits comes with distcore"
    ):
        ImageClassification(stream=True).prepare(RunConfig())


def content_of(task: ImageClassification) -> str:
    train: Any = task.prepare(RunConfig()).train
    return str(train.content)


def test_a_changed_shard_has_another_content(tmp_path: Path) -> None:
    data = tars(tmp_path / "data", rows())
    task = ImageClassification(data=str(data), stream=True)
    contents = [content_of(task)]
    images = [{"png": image["image"], "cls": image["label"].encode()} for image in rows()[:7]]
    shards.tar(data / "0.tar", [images[1], images[0], *images[2:]])
    contents += map(content_of, (task, replace(task, eval_fraction=0.2)))
    assert len({*contents}) == 3
    opened, labels = open_source(str(data), Columns(), stream=True), np.array([0, 0])
    assert isinstance(opened, NumberedImages)
    some = (
        streamed_dataset(opened, np.array(rows), labels, Preprocessing(size=8))
        for rows in ([0, 2], [0, 4])
    )
    assert len({images.content for images in some}) == 2, "other images of the same classes"


def config(folder: Path, out: str, **changes: Any) -> RunConfig:
    options = {
        "data": str(folder / "data"),
        "stream": changes.pop("stream", True),
        "image_size": SIZE,
        "dropout": 0.1,
        "order": changes.pop("order", {"kind": "windows", "window_shards": 1}),
    }
    keys: dict[str, Any] = {
        "task": "image-classification",
        "task_options": options,
        "global_batch_size": 12,
        "device": "cpu",
        "lr": 1e-3,
        "max_steps": 12,
        "log_every": 1,
        "out": str(folder / out),
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
    }
    return RunConfig.model_validate(keys | changes)


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_a_run_that_streams_is_bit_equal_to_one_that_stores(tmp_path: Path) -> None:
    tars(tmp_path / "data", rows())
    for out, stream in (("stream", True), ("store", False)):
        train(config(tmp_path, out, stream=stream, order={"kind": "full"}))
    assert losses(tmp_path / "stream") == losses(tmp_path / "store")
    reports = [
        json.loads((tmp_path / out / "report.json").read_text()) for out in ("stream", "store")
    ]
    assert reports[0]["evaluation"]["loss"] == reports[1]["evaluation"]["loss"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_number_of_ranks_and_workers_and_a_resume_inside_an_epoch_train_alike(
    tmp_path: Path,
) -> None:
    tars(tmp_path / "data", rows())
    train(config(tmp_path, "one"))
    expected = losses(tmp_path / "one")
    for ranks, workers, others in ((1, 2, 2), (2, 0, 3), (3, 1, 1), (2, 2, 1)):
        out, run = f"{ranks}-{workers}", {"strategy": "ddp", "loader": {"workers": workers}}
        for steps, nproc, resume in ((5, ranks, None), (12, others, "auto")):
            changes: dict[str, Any] = {"max_steps": steps, "nproc": nproc, "resume": resume}
            changes |= {"resume_changed": "max_steps"} if resume else {}
            launch(train, config(tmp_path, out, **run, **changes), nproc=nproc)
        assert losses(tmp_path / out) == pytest.approx(expected, rel=2e-4), out
