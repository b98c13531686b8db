"""Folders, Parquet files and arrays give the same rows, and what cannot be used gets one line."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import CLASSES, encoded, in_folders, in_parquet, pixels
from PIL import Image

from distcore.config import RunConfig
from distcore.errors import DataError, DistcoreError
from distcore_data.cache import cache_root
from distcore_tasks.image_classification.decoding import check_images, decode
from distcore_tasks.image_classification.options import Columns
from distcore_tasks.image_classification.prepare import ImageDatasets
from distcore_tasks.image_classification.sources import open_source
from distcore_tasks.image_classification.task import ImageClassification

BY_CLASS = [row for start in (0, 1) for row in range(start, 12, 2)]
"""The rows in the order of a folder's listing."""


def prepared(data: Path | str, **options: Any) -> ImageDatasets:
    datasets = ImageClassification(data=str(data), **options).prepare(RunConfig())
    assert isinstance(datasets, ImageDatasets)
    return datasets


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return in_folders(tmp_path / "photos", 12)


def written(path: Path, form: str) -> Path:
    """Write the 12 images, in the order of a folder's listing, in this form."""
    images, labels = [pixels(row) for row in BY_CLASS], [row % 2 for row in BY_CLASS]
    names = [CLASSES[label] for label in labels]
    if form == "folder":
        return in_folders(path / form, 12)
    if form == "npz":
        np.savez_compressed(path / "rows.npz", images=np.stack(images), labels=np.asarray(names))
        return path / "rows.npz"
    content = [encoded(image) for image in images]
    if form == "bytes":
        return in_parquet(path / "rows.parquet", content, names)
    structs = [{"bytes": image, "path": f"{row}.png"} for row, image in enumerate(content)]
    return in_parquet(path / "rows.parquet", structs, labels, CLASSES)


@pytest.mark.parametrize("form", ["folder", "npz", "bytes", "huggingface"])
def test_every_form_gives_the_same_images_and_classes(tmp_path: Path, form: str) -> None:
    data = prepared(written(tmp_path, form), image_size=12)
    assert data.labels == data.classes == CLASSES
    expected = prepared(in_folders(tmp_path / "photos", 12), image_size=12)
    rows = np.arange(len(expected.train))
    one, other = data.train.batch(rows), expected.train.batch(rows)
    assert one["pixel_values"].shape == (11, 3, 12, 12)
    assert all(bool((one[name] == other[name]).all()) for name in ("pixel_values", "labels"))


def test_a_folder_and_a_file_of_the_same_images_have_the_same_content(tmp_path: Path) -> None:
    one, other = (prepared(written(tmp_path, form)).train for form in ("folder", "huggingface"))
    assert one.content == other.content  # type: ignore[attr-defined]  # of Identified


def test_pixels_are_scaled_as_the_preprocessing_says(photos: Path) -> None:
    data = prepared(photos, image_size=12, eval_data=str(photos))
    values = data.evaluation.batch(np.asarray([0]))["pixel_values"][0].numpy().transpose(1, 2, 0)
    assert np.allclose(values, pixels(0) / 127.5 - 1, atol=1e-6)


def test_images_of_many_sizes_become_one(tmp_path: Path) -> None:
    in_folders(tmp_path / "photos", 4, size=9)
    (tmp_path / "photos/red/large.jpg").write_bytes(encoded(pixels(1, 40)[:30], "JPEG"))
    data = prepared(tmp_path / "photos")
    assert data.facts["image_size"] == 64
    assert data.train.batch(np.arange(len(data.train)))["pixel_values"].shape[1:] == (3, 64, 64)


def test_the_digits_need_no_pillow_and_no_resizing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    data = prepared("digits")
    assert (len(data.train), len(data.evaluation), len(data.classes)) == (1617, 180, 10)
    assert data.train.batch(np.arange(3))["pixel_values"].shape == (3, 3, 8, 8)
    assert data.labels == tuple(range(10))


def test_without_pillow_one_line_says_how_to_install_it(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "distcore_tasks.image_classification.decoding.is_installed", lambda name: False
    )
    install = re.escape("the package Pillow is not installed. Install it with: pip install pillow")
    for data in (photos, photos.parent / "rows.parquet"):
        data.touch()
        with pytest.raises(DataError, match=install):
            prepared(data)
    with pytest.raises(
        DataError, match=f"^dataset digits, from 8 x 8 pixels to 16 x 16: {install}"
    ):
        prepared("digits", image_size=16)


def test_arrays_are_resized_too(tmp_path: Path) -> None:
    images = np.stack([pixels(row)[:, :9] for row in range(4)])
    np.savez(tmp_path / "rows.npz", images=images, labels=[0, 1, 0, 1])
    data = prepared(tmp_path / "rows.npz")
    assert data.facts["image_size"] == 12
    assert data.train.batch(np.arange(3))["pixel_values"].shape == (3, 3, 12, 12)


MODES = {
    "gray": (Image.new("L", (2, 2), 7), (7, 7, 7)),
    "gray with transparency": (Image.new("LA", (2, 2), (7, 99)), (7, 7, 7)),
    "transparency": (Image.new("RGBA", (2, 2), (1, 2, 3, 0)), (1, 2, 3)),
    "palette": (Image.new("RGB", (2, 2), (250, 2, 3)).convert("P"), None),
    "black and white": (Image.new("1", (2, 2), 1), (255, 255, 255)),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_red_green_and_blue(mode: str, tmp_path: Path) -> None:
    image, expected = MODES[mode]
    image.save(tmp_path / "a.png")
    decoded = decode((tmp_path / "a.png").read_bytes())
    assert decoded.mode == "RGB"
    assert decoded.getpixel((0, 0)) == (expected or image.convert("RGB").getpixel((0, 0)))


def test_a_photo_that_lies_on_its_side_is_turned_upright(tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 2))
    exif = image.getexif()
    exif[0x0112] = 6  # orientation: turned by a quarter
    image.save(tmp_path / "a.jpg", exif=exif)
    assert decode((tmp_path / "a.jpg").read_bytes()).size == (2, 4)


def deep(path: Path) -> None:
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(path)


DAMAGED = {
    "text": (lambda path: path.write_text("no image"), "is no image that Pillow knows"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-60]), "cannot be decoded: .*"),
    "16 bits": (
        deep,
        r"has more than 8 bits per channel \(Pillow's mode I;16\): convert it to 8 bits",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_an_image_that_cannot_be_read_is_named(photos: Path, kind: str) -> None:
    damage, problem = DAMAGED[kind]
    damage(photos / "red/03.png")
    with pytest.raises(
        DataError, match=f"^image folder {photos}, red/03.png: {problem}$"
    ) as caught:
        prepared(photos)
    assert "\n" not in str(caught.value)


def test_images_that_cannot_be_read_are_counted(photos: Path) -> None:
    for row in (3, 5, 7):
        (photos / f"red/0{row}.png").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"red/03.png: is empty; 2 more cannot be used: red/05.png and red/07.png$"
    ):
        prepared(photos)


def test_images_are_decoded_once_and_again_when_one_has_changed(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(count: int, *given: Any, **named: Any) -> Any:
        calls.append(count)
        return check_images(count, *given, **named)

    monkeypatch.setattr("distcore_tasks.image_classification.folders.check_images", counted)
    first = prepared(photos, eval_data=str(photos)).train
    prepared(photos, eval_fraction=0.4, image_size=16)
    assert calls == [12]
    (photos / "red/03.png").write_bytes(encoded(pixels(99)))
    changed = prepared(photos, eval_data=str(photos)).train
    assert changed.content != first.content  # type: ignore[attr-defined]  # of Identified
    assert calls == [12, 12]


def test_an_image_that_vanishes_afterward_is_named(photos: Path) -> None:
    data = prepared(photos)
    for file in photos.glob("*/*.png"):
        file.unlink()
    with pytest.raises(
        DataError,
        match=r"image folder .*, blue/\d\d.png: changed since it was checked: .*No such file",
    ):
        data.train.batch(np.asarray([0]))


def test_a_file_that_is_no_image_is_left_out_with_a_warning(photos: Path) -> None:
    (photos / "red/notes.txt").write_text("x")
    (photos / "red/.DS_Store").write_text("x")
    (line,) = (line for line in prepared(photos).warnings if "left out" in line)
    assert line.endswith(
        "1 entries of class folders are no images (.png, .jpg, .jpeg, .bmp …) and are left out:"
        " red/notes.txt"
    )


def test_classes_that_are_rare_are_named_with_their_files(photos: Path) -> None:
    in_folders(photos, 1).joinpath("blue/00.png").rename(photos / "red/00.png")
    for file in sorted(photos.glob("blue/*"))[2:]:
        file.unlink()
    lines = prepared(photos).warnings
    assert any("'blue' (blue/02.png and blue/04.png)" in line for line in lines), lines


def folder_of(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            (tmp_path / "photos" / name).write_bytes(encoded(pixels(0)))
    (tmp_path / "photos").mkdir(exist_ok=True)
    return tmp_path / "photos"


FOLDERS = {
    "no classes": ((), "has no class folders; an image of class cat belongs into .*photos/cat"),
    "loose": (("1.png", "cat/1.png"), "1.png: lies in no class folder"),
    "empty class": (
        ("cat/1.png", "dog/x"),
        r"class folder .*photos/dog: has no images \(.png, .* …\); remove it",
    ),
    "one class": (
        ("cat/1.png", "cat/2.png"),
        "all 2 rows have the label 'cat': a classifier needs at least 2 classes",
    ),
    "nested": (
        ("train/cat/1.png", "test/cat/2.png"),
        "folders of its own: is .*photos/test the folder of all classes",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_of_another_form_gets_one_line(tmp_path: Path, case: str) -> None:
    names, problem = FOLDERS[case]
    with pytest.raises(DataError, match=problem) as caught:
        prepared(folder_of(tmp_path, *names))
    assert "\n" not in str(caught.value)


def test_a_class_that_training_lacks_is_named(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "held-out/green").mkdir(parents=True)
    (tmp_path / "held-out/green/1.png").write_bytes(encoded(pixels(0)))
    with pytest.raises(
        DataError,
        match=r"held-out, green/1.png: label 'green' is out of range.*training has: blue, red",
    ):
        prepared(photos, eval_data=str(tmp_path / "held-out"))


GOOD = encoded(pixels(0))
PARQUET: dict[str, tuple[list[Any], list[Any], str]] = {
    "null": (
        [GOOD, None],
        [0, 1],
        r"row 2: image is missing \(null\), expected the bytes of an encoded image",
    ),
    "path alone": (
        [{"bytes": None, "path": "a.png"}] * 2,
        [0, 1],
        "row 1: image is the path 'a.png' alone",
    ),
    "no image": ([GOOD, b"text"], [0, 1], "row 2: is no image that Pillow knows"),
    "text": (["a.png"] * 2, [0, 1], r"row 1: image is a string \('a.png'\)"),
    "label missing": ([GOOD] * 2, [0, None], r"row 2: label is missing \(null\)"),
    "label negative": ([GOOD] * 2, [0, -1], "row 2: label -1 is out of range"),
    "no rows": ([], [], "holds no rows"),
}


@pytest.mark.parametrize("case", PARQUET)
def test_a_row_of_a_file_that_cannot_be_used_is_named(tmp_path: Path, case: str) -> None:
    images, labels, problem = PARQUET[case]
    path = in_parquet(tmp_path / "rows.parquet", images, labels)
    with pytest.raises(DataError, match=f"^data file {path}.*{problem}") as caught:
        prepared(path)
    assert "\n" not in str(caught.value)


def test_a_label_beyond_the_names_of_the_file_is_out_of_range(tmp_path: Path) -> None:
    path = in_parquet(tmp_path / "rows.parquet", [GOOD] * 3, [0, 1, 2], CLASSES)
    with pytest.raises(
        DataError, match="row 3: label 2 is out of range: the dataset names 2 classes"
    ):
        prepared(path)


GRAY = np.zeros((4, 8, 8), np.uint8)
ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"images": GRAY}, r"has no array 'labels', expected images and labels"),
    "float": (
        {"images": GRAY / 255, "labels": [0, 1] * 2},
        "images are float64, expected uint8 from 0 to 255",
    ),
    "shape": (
        {"images": GRAY[None, None], "labels": [0]},
        r"images have the shape \(1, 1, 4, 8, 8\), expected",
    ),
    "channels first": (
        {"images": GRAY[:, None], "labels": [0, 1] * 2},
        r"shape \(4, 1, 8, 8\), .* channels behind",
    ),
    "too few labels": (
        {"images": GRAY, "labels": [0, 1]},
        r"labels have the shape \(2,\), .* one per image: \(4,\)",
    ),
    "label float": ({"images": GRAY, "labels": [0.5, 1, 1, 1]}, r"row 1: label is a float \(0.5\)"),
    "objects": (
        {"images": GRAY, "labels": np.asarray([0, "a", 0, 0], object)},
        "not a readable .npz file",
    ),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_of_another_form_get_one_line(tmp_path: Path, case: str) -> None:
    arrays, problem = ARRAYS[case]
    np.savez(tmp_path / "rows.npz", **arrays)
    with pytest.raises(DataError, match=f"^data file {tmp_path}/rows.npz.*{problem}") as caught:
        prepared(tmp_path / "rows.npz")
    assert "\n" not in str(caught.value)


OTHERS = {
    "digitz": "data 'digitz': neither a file nor an embedded dataset.*did you mean 'digits'",
    "nowhere/old/photos": "data nowhere/old/photos: no such folder or file",
    "rows.csv": (
        "unknown extension '.csv' .expected a folder of images, .parquet, .arrow, .tar, .npz, or a"
    ),
    "damaged.npz": "damaged.npz: not a readable .npz file",
    "damaged.parquet": "damaged.parquet: not a readable Parquet file",
}


@pytest.mark.parametrize("source", OTHERS)
def test_a_source_of_another_kind_gets_one_line(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.csv", "damaged.npz", "damaged.parquet"):
        Path(name).write_text("text,label\n")
    with pytest.raises(DistcoreError, match=OTHERS[source]) as caught:
        open_source(source, Columns())
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(photos: Path) -> None:
    (photos / "red/03.png").chmod(0)
    with pytest.raises(DataError, match=r"red/03.png: Permission denied"):
        prepared(photos)


def test_a_cache_entry_of_a_folder_holds_no_images(photos: Path) -> None:
    prepared(photos)
    assert sum(file.stat().st_size for file in cache_root().rglob("*") if file.is_file()) < 5_000
