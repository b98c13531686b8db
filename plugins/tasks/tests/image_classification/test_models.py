"""Models for images: built in, from local folders, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from image_cases import in_folders
from PIL import Image
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.auto import image_processing_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from distcore.config import RunConfig
from distcore.errors import ConfigError, ModelError
from distcore_tasks.image_classification.models import build_model, patch_size
from distcore_tasks.image_classification.options import ImageOptions
from distcore_tasks.image_classification.preprocessing import Preprocessing, read_preprocessing
from distcore_tasks.image_classification.processors import (
    OTHER_CUTS,
    PROCESSORS,
    READ,
    REFUSED,
    SHORTER_SIDE,
    WITHOUT_EFFECT,
)
from distcore_tasks.image_classification.shapes import SHAPES
from distcore_tasks.image_classification.task import ImageClassification

CLASSES = ("blue", "red", "green")
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 2,
}


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
        sizes = {
            name: parameters(build_model(ImageOptions(model=name), ["a", "b"], 224))
            for name in SHAPES
        }
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
        assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {
            0.25
        }


def test_a_pretrained_model_keeps_its_weights_and_gets_a_head_for_the_classes(folder: Path) -> None:
    saved = ViTForImageClassification.from_pretrained(folder)
    model: Any = build_model(ImageOptions(model=str(folder)), CLASSES, 16)
    assert torch.equal(model.vit.embeddings.cls_token, saved.vit.embeddings.cls_token)
    assert model.config.id2label == dict(enumerate(CLASSES))
    assert model.classifier.out_features == 3
    assert ImageOptions(model=str(folder)).suggest(RunConfig()) == {"lr": 5e-5}


def test_a_pretrained_model_gets_images_as_its_preprocessor_says(
    folder: Path, tmp_path: Path
) -> None:
    photos = in_folders(tmp_path / "photos", 8)
    data = ImageClassification(model=str(folder), data=str(photos)).prepare(RunConfig())
    assert data.facts["image_size"] == 16
    assert data.train.batch(np.arange(2))["pixel_values"].shape == (2, 3, 16, 16)
    assert read_preprocessing("x", folder) == Preprocessing(16, resample=3, mean=(0.1, 0.2, 0.3))


def test_an_image_size_other_than_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"image_size = 32: model .* takes images of 16 x 16 pixels; leave it out"
    ):
        ImageClassification(model=str(folder), image_size=32).prepare(RunConfig())


def test_a_folder_may_have_batch_normalization(folder: Path) -> None:
    shape = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    ResNetForImageClassification(shape).save_pretrained(folder)
    model = build_model(ImageOptions(model=str(folder)), CLASSES, 16)
    assert any(isinstance(layer, torch.nn.BatchNorm2d) for layer in model.modules())


def test_without_dropout_no_layer_is_left_out_either(folder: Path) -> None:
    shape = ConvNextConfig(
        hidden_sizes=[8, 8], depths=[1, 1], num_stages=2, drop_path_rate=0.5, image_size=16
    )
    ConvNextForImageClassification(shape).save_pretrained(folder)
    for dropout, expected in ((None, 0.5), (0.0, 0.0)):
        model: Any = build_model(ImageOptions(model=str(folder), dropout=dropout), CLASSES, 16)
        assert model.config.drop_path_rate == expected


PREPROCESSORS: dict[str, tuple[dict[str, Any], str]] = {
    "no mean": ({"size": 16}, "preprocessor_config.json has no 'image_mean'"),
    "oblong": ({"size": {"height": 16, "width": 8}}, "size .* is not square"),
    "other order": (
        {"size": 16, "do_flip_channel_order": True},
        "do_flip_channel_order is not supported",
    ),
    "other class": (
        {"image_processor_type": "ImageGPTImageProcessor"},
        "ImageGPTImageProcessor is not one of the",
    ),
    "square": ({"size": 16, "use_square_size": True}, "use_square_size is not supported"),
    "setting": ({"size": 16, "do_align_long_axis": True}, "do_align_long_axis is not supported"),
    "offset": (
        {"image_processor_type": "EfficientNetImageProcessor", "rescale_offset": True},
        "rescale_offset is not supported",
    ),
    "one channel": (
        {"size": 16, "image_mean": [0.5], "image_std": [0.5]},
        "image_mean has 1 values, and images have",
    ),
    "no resize": (
        {"size": 16, "do_resize": False},
        "do_resize = false is not supported: images of any size are",
    ),
    "filter": ({"size": 16, "resample": 9}, "resample = 9 is none of Pillow's filters"),
}


@pytest.mark.parametrize("case", PREPROCESSORS)
def test_a_preprocessor_that_cannot_be_followed_gets_one_line(folder: Path, case: str) -> None:
    tree, problem = PREPROCESSORS[case]
    (folder / "preprocessor_config.json").write_text(json.dumps(tree))
    with pytest.raises(
        ModelError, match=rf"^model x: preprocessor_config.json.*{problem}|{problem}"
    ) as caught:
        read_preprocessing("x", folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_setting_of_a_processor_is_owned_and_the_values_are_its_own(
    name: str, tmp_path: Path
) -> None:
    """Of a file that leaves all of them out, and of one that has them all with other values."""
    make: Any = getattr(transformers, f"{name}Pil")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    names = {key for key, value in make().to_dict().items() if value is not None}
    assert names - READ - WITHOUT_EFFECT - REFUSED == set()
    sides = {"height": 16, "width": 16}
    colors = {"image_mean": [0.1, 0.2, 0.3], "image_std": 0.4}
    for others in (
        {},
        colors,
        {"do_normalize": False},
        {"do_rescale": False},
        {"rescale_factor": 1 / 200},
    ):
        given = {"size": sides, "do_center_crop": False, "do_flip_channel_order": False, **others}
        theirs = make(**given)
        (tmp_path / "preprocessor_config.json").write_text(
            json.dumps({"image_processor_type": name, **given})
        )
        ours = read_preprocessing("x", tmp_path)
        expected = theirs(list(pixels), return_tensors="pt", do_resize=False)[
            "pixel_values"
        ].float()
        assert torch.allclose(ours.values(pixels), expected, atol=1e-5), others
        ours.save(tmp_path)
        assert read_preprocessing("x", tmp_path).mean == ours.mean
        again: Any = transformers.ViTImageProcessorPil.from_pretrained(tmp_path)
        written = again(list(pixels), return_tensors="pt", do_resize=False)["pixel_values"]
        assert torch.allclose(written, expected, atol=1e-5), others


SIDES = {"height": 12, "width": 12}
CUTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"size": 16, "crop_size": 12, "do_center_crop": True}) for name in PROCESSORS),
    *(
        (name, {"size": {"height": 15, "width": 15}, "crop_size": SIDES, "do_center_crop": True})
        for name in PROCESSORS
    ),
    ("CLIPImageProcessor", {"size": {"shortest_edge": 9}, "crop_size": SIDES}),  # black around it
    ("BitImageProcessor", {"size": {"shortest_edge": 12}, "crop_size": SIDES, "resample": 2}),
    ("DeiTImageProcessor", {"size": {"height": 7, "width": 7}, "crop_size": SIDES}),
    (
        "PoolFormerImageProcessor",
        {"size": {"shortest_edge": 13}, "crop_size": SIDES, "crop_pct": 0.8},
    ),
    ("ConvNextImageProcessor", {"size": {"shortest_edge": 12}, "crop_pct": 0.7}),
    ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}, "crop_pct": 0.7}),
    ("ViTImageProcessor", {"size": 12}),
]


@pytest.mark.parametrize(
    ("name", "said"), CUTS, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CUTS)]
)
def test_the_part_of_an_oblong_image_is_the_one_that_its_class_sees(
    name: str, said: dict[str, Any], tmp_path: Path
) -> None:
    """Here, and in an export."""
    file = tmp_path / "preprocessor_config.json"
    said = {
        "do_flip_channel_order": False,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.5] * 3,
    } | said
    file.write_text(json.dumps({"image_processor_type": name, **said}))
    if name in OTHER_CUTS and said.get("do_center_crop"):
        with pytest.raises(
            ModelError, match=r"preprocessor_config.json cannot be used: do_center_crop = true of"
        ):
            read_preprocessing("x", tmp_path)
        return
    random = np.random.default_rng(0)
    images = [
        random.integers(0, 256, (*shape, 3), dtype=np.uint8)
        for shape in ((20, 31), (33, 20), (16, 16))
    ]
    theirs: Any = getattr(transformers, f"{name}Pil").from_pretrained(tmp_path)
    expected = [theirs(image, return_tensors="pt")["pixel_values"][0].float() for image in images]
    for _ in range(2):
        ours = read_preprocessing("x", tmp_path)
        pixels = np.stack([ours.resizing.pixels(Image.fromarray(image)) for image in images])
        for given, other in zip(ours.values(pixels), expected, strict=True):
            assert torch.allclose(given, other, atol=1e-5)
        ours.save(tmp_path)
    kind = json.loads(file.read_text())["image_processor_type"]
    again: Any = getattr(transformers, f"{kind}Pil").from_pretrained(tmp_path)
    for image, other in zip(images, expected, strict=True):
        assert torch.allclose(
            again(image, return_tensors="pt")["pixel_values"][0].float(), other, atol=1e-5
        )


def test_an_image_size_of_ones_own_cuts_out_the_same_part() -> None:
    cut = Preprocessing(224, cut_from=256, keeps_sides=True)
    assert cut.at(112) == Preprocessing(112, cut_from=128, keeps_sides=True)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_size_of_one_number_is_of_the_sides_that_its_class_means(name: str) -> None:
    theirs = getattr(transformers, f"{name}Pil")
    assert (name in SHORTER_SIDE) is not getattr(theirs, "default_to_square", True)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_key_that_a_preprocessor_file_leaves_out_has_the_default_of_its_class(name: str) -> None:
    theirs = getattr(transformers, f"{name}Pil")().to_dict()
    for key, value in PROCESSORS[name].items():
        expected = theirs.get(key)
        if isinstance(expected, dict):
            (expected,) = set(expected.values())
        assert value == expected, key
    left_out = {key for key, value in theirs.items() if value is not None} - PROCESSORS[name].keys()
    assert left_out <= {"do_resize", "do_rescale", "rescale_factor"} | WITHOUT_EFFECT


def test_every_processor_of_image_classification_is_accepted_or_refused_by_name() -> None:
    processors: dict[str, dict[str, str]] = vars(image_processing_auto)[
        "IMAGE_PROCESSOR_MAPPING_NAMES"
    ]
    classes = {
        names["pil"].removesuffix("Pil")
        for kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
        if (names := processors.get(kind)) and "pil" in names
    }
    refused = {
        "DonutImageProcessor",  # cuts and pads by the longer side
        "Gemma3ImageProcessor",  # of a model that reads texts, too
        "ImageGPTImageProcessor",  # makes tokens
        "Siglip2ImageProcessor",  # makes patches
        "TimmWrapperImageProcessor",  # reads its settings from a config of timm
    }
    assert classes - refused == set(PROCESSORS)


@pytest.mark.parametrize("key", ["num_channels", "stem_num_channels"])
def test_a_model_of_one_channel_is_refused(folder: Path, key: str) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_channels": 3, key: 1}))
    if key == "stem_num_channels":
        file.write_text(
            json.dumps(
                {k: v for k, v in json.loads(file.read_text()).items() if k != "num_channels"}
            )
        )
    with pytest.raises(
        ModelError,
        match=r"reads images of 1 channel, and every image has three here; take a model of",
    ):
        ImageClassification(model=str(folder)).prepare(RunConfig())


def test_the_size_is_what_is_cut_out_of_the_middle(folder: Path) -> None:
    tree = {
        "size": {"shortest_edge": 256},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
    }
    tree |= {"do_normalize": False, "do_rescale": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(tree))
    read = read_preprocessing("x", folder)
    assert (read.size, read.scale, read.mean, read.std) == (
        224,
        1.0,
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
    )


def test_a_folder_without_a_preprocessor_is_refused_and_one_without_a_tokenizer_is_not(
    folder: Path,
) -> None:
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(
        ModelError, match=r"the folder has no preprocessor \(any of preprocessor_config.json\)"
    ):
        ImageClassification(model=str(folder)).prepare(RunConfig())


def test_a_name_that_is_not_built_in_lists_those_that_are() -> None:
    with pytest.raises(
        ModelError,
        match=r"'vit-tinny': not built in \(conv-tiny, resnet-tiny, .*did you mean 'vit-tiny'",
    ):
        ImageClassification(model="vit-tinny").prepare(RunConfig())
