"""Images without labels, in a folder, a file or a split: in order, and named if
they cannot be read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_cases import encoded, pixels

from distcore.errors import DataError
from distcore.plugin.task.task import FileRows
from distcore_tasks.image_classification.prepare import empty_datasets
from distcore_tasks.image_classification.preprocessing import Preprocessing
from distcore_tasks.image_classification.task import ImageClassification

TASK, DATA = ImageClassification(), empty_datasets(("blue", "red"), Preprocessing(size=12))
IMAGES = [pixels(row) for row in range(5)]


def written(folder: Path, form: str) -> Path:
    """Write the images in this form."""
    path = folder / f"new.{form}"
    if form == "split":
        rows = [
            {"key": key, "image": encoded(image)}
            for key, image in zip("abcde", IMAGES, strict=True)
        ]
        datasets.DatasetDict(test=datasets.Dataset.from_list(rows)).save_to_disk(path)
        return Path(f"{path}@test")
    if form == "npz":
        np.savez_compressed(path, images=np.stack(IMAGES))
    elif form == "parquet":
        pq.write_table(
            pa.table({"key": list("abcde"), "image": [encoded(image) for image in IMAGES]}), path
        )
    else:
        for row, image in enumerate(IMAGES):
            file = path / ("deeper" if row > 2 else "") / f"{row}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(image))
        (path / "notes.txt").touch()
        (path / ".hidden.png").touch()
    return path


def opened(path: Path, **others: str) -> list[Any]:
    return list(TASK.open_rows(path, others))


@pytest.mark.parametrize("form", ["folder", "parquet", "npz", "split"])
def test_every_form_gives_the_same_images_and_says_where_they_are(
    form: str, tmp_path: Path
) -> None:
    path = written(tmp_path, form)
    rows: Any = TASK.unlabeled(FileRows(file=str(path), start=2, records=opened(path)[1:]), DATA)
    expected = DATA.preprocessing.values(np.stack([IMAGES[3], IMAGES[1]]))
    assert torch.equal(rows.batch(np.asarray([2, 0]))["pixel_values"], expected)
    names = ["1.png", "2.png", "deeper/3.png", "deeper/4.png"]
    where = [{"file": f"{path}/{name}"} for name in names]
    in_file = [{"file": str(path), "row": row} for row in (2, 3, 4, 5)]
    assert list(rows.origins()) == (where if form == "folder" else in_file)


@pytest.mark.parametrize("form", ["parquet", "split"])
def test_a_column_names_images(form: str, tmp_path: Path) -> None:
    assert [name for _, name in opened(written(tmp_path, form), **{"columns.id": "key"})] == list(
        "abcde"
    )


def test_an_array_has_no_column_that_names_images(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"new.npz: has no columns that could name an image; leave out --id-column"
    ):
        opened(written(tmp_path, "npz"), **{"columns.id": "key"})


def test_an_image_that_cannot_be_read_is_named_before_any_is_predicted(tmp_path: Path) -> None:
    path = written(tmp_path, "folder")
    (path / "deeper/9.jpg").write_bytes(b"no image")
    with pytest.raises(
        DataError, match=r"^image folder .*new.folder, deeper/9.jpg: is no image that Pillow knows$"
    ):
        opened(path)


def test_an_image_that_changes_while_it_waits_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "folder")
    rows: Any = TASK.unlabeled(FileRows(file=str(path), start=1, records=opened(path)), DATA)
    (path / "2.png").unlink()
    with pytest.raises(DataError, match=r"new.folder, 2.png: changed since it was checked: "):
        rows.batch(np.arange(3))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("empty", r"has no images (.png, .jpg, .jpeg, .bmp …)"),
        ("missing", "no such folder or file"),
        ("new.txt", "unknown extension '.txt'"),
    ],
)
def test_a_folder_without_images_is_one_line(name: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "new.txt").touch()
    with pytest.raises(DataError, match=f"{name}: {re.escape(problem)}"):
        opened(tmp_path / name)
