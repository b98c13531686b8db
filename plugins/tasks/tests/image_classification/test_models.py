"""Models for images: built in, from local folders, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_cases import in_folders
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from distcore.config import RunConfig
from distcore.errors import ConfigError, ModelError
from distcore_tasks.image_classification.models import build_model, patch_size
from distcore_tasks.image_classification.options import ImageOptions
from distcore_tasks.image_classification.preprocessing import Preprocessing, read_preprocessing
from distcore_tasks.image_classification.shapes import SHAPES
from distcore_tasks.image_classification.task import ImageClassification

CLASSES = ("blue", "red", "green")
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16,
    "patch_size": 8, "num_labels": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with two classes, for images of 16 x 16 pixels."""
    ViTForImageClassification(ViTConfig(**SMALL)).save_pretrained(tmp_path / "model")
    Preprocessing(16, resample=3, mean=(0.1, 0.2, 0.3)).save(tmp_path / "model")
    return tmp_path / "model"


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_built_in_models_have_their_sizes() -> None:
    with torch.device("meta"):
        sizes = {name: parameters(build_model(ImageOptions(model=name), ["a", "b"], 224)) for name in SHAPES}
    assert sizes["conv-tiny"] < 100_000
    assert sizes["vit-tiny"] < sizes["vit-mini"] < sizes["vit-base"]
    assert sizes["vit-base"] == 85_800_194  # as the published one, with a head for two classes
    assert (sizes["resnet-18"], sizes["resnet-50"]) == (11_177_538, 23_512_130)  # so are these


@pytest.mark.parametrize("name", ["conv-tiny", "resnet-tiny", "vit-tiny"])
@pytest.mark.parametrize("size", [8, 9, 28])
def test_built_in_models_take_any_size(name: str, size: int) -> None:
    model = build_model(ImageOptions(model=name), CLASSES, size)
    assert model(pixel_values=torch.zeros(2, 3, size, size)).logits.shape == (2, 3)


def test_patches_are_of_2_to_16_pixels_and_mostly_seven_or_more_along_a_side() -> None:
    assert [patch_size(size) for size in (8, 28, 32, 64, 224, 384)] == [2, 4, 4, 8, 16, 16]


def test_dropout_reaches_every_model() -> None:
    for name in ("conv-tiny", "vit-tiny"):
        model = build_model(ImageOptions(model=name, dropout=0.25), CLASSES, 8)
        assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}


def test_a_pretrained_model_keeps_its_weights_and_gets_a_head_for_the_classes(folder: Path) -> None:
    saved = ViTForImageClassification.from_pretrained(folder)
    model: Any = build_model(ImageOptions(model=str(folder)), CLASSES, 16)
    assert torch.equal(model.vit.embeddings.cls_token, saved.vit.embeddings.cls_token)
    assert model.config.id2label == dict(enumerate(CLASSES))
    assert model.classifier.out_features == 3
    assert ImageOptions(model=str(folder)).suggest(RunConfig()) == {"lr": 5e-5}


def test_a_pretrained_model_gets_images_as_its_preprocessor_says(folder: Path, tmp_path: Path) -> None:
    photos = in_folders(tmp_path / "photos", 8)
    data = ImageClassification(model=str(folder), data=str(photos)).prepare(RunConfig())
    assert data.facts["image_size"] == 16
    assert data.train.batch(np.arange(2))["pixel_values"].shape == (2, 3, 16, 16)
    assert read_preprocessing("x", folder) == Preprocessing(16, resample=3, mean=(0.1, 0.2, 0.3))


def test_another_size_than_the_model_has_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"image_size = 32: model .* takes images of 16 x 16 pixels; leave it out"):
        ImageClassification(model=str(folder), image_size=32).prepare(RunConfig())


def test_a_folder_may_have_batch_normalization(folder: Path) -> None:
    shape = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    ResNetForImageClassification(shape).save_pretrained(folder)
    model = build_model(ImageOptions(model=str(folder)), CLASSES, 16)
    assert any(isinstance(layer, torch.nn.BatchNorm2d) for layer in model.modules())


def test_without_dropout_no_layer_is_left_out_either(folder: Path) -> None:
    shape = ConvNextConfig(hidden_sizes=[8, 8], depths=[1, 1], num_stages=2, drop_path_rate=0.5, image_size=16)
    ConvNextForImageClassification(shape).save_pretrained(folder)
    for dropout, expected in ((None, 0.5), (0.0, 0.0)):
        model: Any = build_model(ImageOptions(model=str(folder), dropout=dropout), CLASSES, 16)
        assert model.config.drop_path_rate == expected


PREPROCESSORS: dict[str, tuple[dict[str, Any], str]] = {
    "no mean": ({"size": 16}, "preprocessor_config.json has no 'image_mean'"),
    "oblong": ({"size": {"height": 16, "width": 8}}, "size .* is not square"),
    "other order": ({"size": 16, "do_flip_channel_order": True}, "do_flip_channel_order is not supported"),
    "filter": ({"size": 16, "resample": 9}, "resample = 9 is none of Pillow's filters"),
}


@pytest.mark.parametrize("case", PREPROCESSORS)
def test_a_preprocessor_that_cannot_be_followed_gets_one_line(folder: Path, case: str) -> None:
    tree, problem = PREPROCESSORS[case]
    (folder / "preprocessor_config.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=rf"^model x: preprocessor_config.json.*{problem}|{problem}") as caught:
        read_preprocessing("x", folder)
    assert "\n" not in str(caught.value)


def test_the_size_is_what_is_cut_out_of_the_middle(folder: Path) -> None:
    tree = {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True}
    tree |= {"do_normalize": False, "do_rescale": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(tree))
    read = read_preprocessing("x", folder)
    assert (read.size, read.scale, read.mean, read.std) == (224, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_a_folder_without_a_preprocessor_is_refused_and_one_without_a_tokenizer_is_not(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"the folder has no preprocessor \(any of preprocessor_config.json\)"):
        ImageClassification(model=str(folder)).prepare(RunConfig())


def test_a_name_that_is_not_built_in_lists_those_that_are() -> None:
    with pytest.raises(
        ModelError, match=r"'vit-tinny': not built in \(conv-tiny, resnet-tiny, .*did you mean 'vit-tiny'"
    ):
        ImageClassification(model="vit-tinny").prepare(RunConfig())
