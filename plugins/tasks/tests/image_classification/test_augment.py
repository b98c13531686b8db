"""Training images are moved and mirrored by seed, epoch and row alone;
those of evaluation never are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from image_cases import in_folders, pixels

from distcore import row_random
from distcore.config import RunConfig
from distcore.plugin.task.datasets import varies
from distcore_tasks.image_classification.options import Augment
from distcore_tasks.image_classification.rows import AugmentedImages, augmented
from distcore_tasks.image_classification.task import ImageClassification


@pytest.fixture
def photos(tmp_path: Path) -> str:
    return str(in_folders(tmp_path / "photos", 12))


def train_set(photos: str, seed: int = 0) -> AugmentedImages:
    task = ImageClassification(data=photos, image_size=12, augment=Augment(shift=0.25, flip=True))
    rows = task.prepare(RunConfig(seed=seed)).train
    assert isinstance(rows, AugmentedImages)
    return rows


def shown(rows: AugmentedImages, epoch: int, order: list[int]) -> torch.Tensor:
    pixels_shown: torch.Tensor = rows.at(epoch).batch(np.asarray(order))["pixel_values"]
    return pixels_shown


def test_an_image_changes_with_the_epoch_and_the_seed(photos: str) -> None:
    rows, order = train_set(photos), list(range(11))
    first = shown(rows, 0, order)
    assert not torch.equal(first, shown(rows, 1, order))
    assert not torch.equal(first, shown(train_set(photos, seed=1), 0, order))


def test_an_augmented_image_is_the_same_with_other_rows_and_in_another_process(photos: str) -> None:
    first = shown(train_set(photos), 3, [4, 7, 2])
    rows = train_set(photos)
    shown(rows, 0, [1])
    assert torch.equal(first[1], shown(rows, 3, [7])[0])


def test_evaluation_and_a_run_without_augmentation_show_images_as_they_are(photos: str) -> None:
    task = ImageClassification(
        data=photos, image_size=12, eval_data=photos, augment=Augment(flip=True)
    )
    data = task.prepare(RunConfig())
    assert not varies(data.evaluation)
    assert not varies(data.test)
    plain = ImageClassification(data=photos, image_size=12, augment=Augment(shift=0)).prepare(
        RunConfig()
    )
    assert not varies(plain.train)
    first_row = data.evaluation.batch(np.asarray([0]))["pixel_values"][0, 0]
    assert np.allclose(first_row, pixels(0)[..., 0] / 127.5 - 1, atol=1e-6)


def test_an_image_is_moved_by_so_many_pixels_at_most_and_its_edge_fills_the_rest() -> None:
    image, seen = pixels(0, 8), set()
    for row in range(200):
        moved = augmented(image, Augment(shift=0.25), row_random(0, 0, row))
        matches = [
            (down, right)
            for down in range(-2, 3)
            for right in range(-2, 3)
            if np.array_equal(
                moved,
                np.pad(image, ((2, 2), (2, 2), (0, 0)), "edge")[2 - down :, 2 - right :][:8, :8],
            )
        ]
        assert len(matches) == 1
        seen |= set(matches)
    assert len(seen) == 25


def test_about_half_of_the_images_are_mirrored_and_none_without_flip() -> None:
    image = pixels(0, 8)
    for flip in (True, False):
        changed = [
            augmented(image, Augment(shift=0, flip=flip), row_random(0, 0, row))
            for row in range(200)
        ]
        mirrored = sum(np.array_equal(shown_image, image[:, ::-1]) for shown_image in changed)
        assert sum(np.array_equal(shown_image, image) for shown_image in changed) == 200 - mirrored
        assert (70 < mirrored < 130) if flip else mirrored == 0
