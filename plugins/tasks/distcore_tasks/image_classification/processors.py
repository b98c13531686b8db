"""Image processors of transformers: which this task has, what a file may leave out, and
who owns each setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BILINEAR, BICUBIC = 2, 3
"""Pillow's numbers of filters."""


def _defaults(
    size: int, resample: int, mean: Any = HALF, std: Any = HALF, **more: Any
) -> dict[str, Any]:
    return {
        "size": size,
        "resample": resample,
        "image_mean": mean,
        "image_std": std,
        "do_normalize": True,
    } | more


def _crop(
    size: int, crop: int, resample: int, mean: Any = HALF, std: Any = HALF, **more: Any
) -> dict[str, Any]:
    return _defaults(size, resample, mean, std, do_center_crop=True, crop_size=crop, **more)


PROCESSORS: dict[str, dict[str, Any]] = {
    "BeitImageProcessor": _defaults(224, BICUBIC, do_center_crop=False, crop_size=224),
    "BitImageProcessor": _crop(224, 224, BICUBIC, CLIP_MEAN, CLIP_STD),
    "CLIPImageProcessor": _crop(224, 224, BICUBIC, CLIP_MEAN, CLIP_STD),
    "ConvNextImageProcessor": _defaults(384, BICUBIC, crop_pct=0.875),
    "DeiTImageProcessor": _crop(256, 224, BICUBIC),
    "EfficientNetImageProcessor": _defaults(
        346, BICUBIC, do_center_crop=False, crop_size=289, rescale_offset=False, include_top=True
    ),
    "LevitImageProcessor": _crop(224, 224, BICUBIC, IMAGENET_MEAN, IMAGENET_STD),
    "MobileNetV1ImageProcessor": _crop(256, 224, BILINEAR),
    "MobileNetV2ImageProcessor": _crop(256, 224, BILINEAR),
    "MobileViTImageProcessor": _crop(
        224, 256, BICUBIC, do_normalize=None, do_flip_channel_order=True
    ),
    "PerceiverImageProcessor": _crop(224, 256, BICUBIC, IMAGENET_MEAN, IMAGENET_STD),
    "PoolFormerImageProcessor": _crop(224, 224, BICUBIC, IMAGENET_MEAN, IMAGENET_STD, crop_pct=0.9),
    "PvtImageProcessor": _defaults(224, BICUBIC, IMAGENET_MEAN, IMAGENET_STD),
    "SegformerImageProcessor": _defaults(512, BILINEAR, IMAGENET_MEAN, IMAGENET_STD),
    "SiglipImageProcessor": _defaults(224, BICUBIC),
    "TextNetImageProcessor": _defaults(
        640,
        BILINEAR,
        IMAGENET_MEAN,
        IMAGENET_STD,
        do_center_crop=False,
        crop_size=224,
        size_divisor=32,
    ),
    "ViTImageProcessor": _defaults(224, BILINEAR),
}
"""By name: the settings of a file that leaves them out. Those of other classes compute
otherwise, and are refused.
"""
SHORTER_SIDE = frozenset(
    {
        "BitImageProcessor",
        "CLIPImageProcessor",
        "ConvNextImageProcessor",
        "LevitImageProcessor",
        "MobileNetV1ImageProcessor",
        "MobileNetV2ImageProcessor",
        "MobileViTImageProcessor",
        "PoolFormerImageProcessor",
        "SiglipImageProcessor",
        "TextNetImageProcessor",
    }
)
"""Classes for which one number as ``size`` is the length of the shorter side; for the others it
is that of both.
"""
OTHER_CUTS = frozenset(
    ("ConvNextImageProcessor", "PerceiverImageProcessor", "TextNetImageProcessor")
)
"""Classes that cut before they resize, twice, or from sides that are rounded up."""
WHOLE_CONVNEXT = 384
"""From this size on ConvNeXt's class cuts nothing."""
READ = frozenset(
    {
        "size",
        "default_to_square",
        "do_resize",
        "size_divisor",
        "crop_size",
        "do_center_crop",
        "crop_pct",
        "resample",
        "do_rescale",
        "rescale_factor",
        "do_normalize",
        "image_mean",
        "image_std",
        "include_top",
    }
)
"""Settings that ``read_preprocessing`` and ``sides_of`` follow."""
WITHOUT_EFFECT = frozenset(
    {
        "image_processor_type",
        "feature_extractor_type",
        "processor_class",
        "_valid_processor_keys",
        "_processor_class",
        "auto_map",
        "do_convert_rgb",  # every image is made RGB
        "do_reduce_labels",  # of maps of labels
        "reduce_labels",
        "return_tensors",
        "data_format",
        "input_data_format",
        "device",
        "disable_grouping",
        "num_channels",
    }
)
"""Settings that change no values of an image's class."""
REFUSED = frozenset(
    {
        "use_square_size",
        "do_flip_channel_order",
        "rescale_offset",
        "do_pad",
        "pad_size",
        "do_color_quantize",
    }
)
"""Settings that change values, and that this task does not have."""


def with_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file, with those of its class that it leaves out.

    Raises ValueError for a class or a setting that this task does not have.
    """
    name = _class_of(tree)
    if name is not None and name not in PROCESSORS:
        raise ValueError(
            f"{name} is not one of the processors that this task has; if it only resizes, rescales"
            " and normalizes, make image_processor_type ViTImageProcessor"
        )
    whole = (PROCESSORS[name] if name else {}) | {
        key: value for key, value in tree.items() if value is not None
    }
    known_keys = READ | WITHOUT_EFFECT
    for key, value in whole.items():
        if key not in known_keys and value not in (None, False):
            raise ValueError(f"{key} is not supported")
    return whole


def sides_of(tree: Mapping[str, Any]) -> tuple[int, int | None, bool]:
    """Return the side of model inputs, the length before they are cut, and whose length it is.

    The last is True for that of the shorter side. The length is ``None`` where nothing is cut.
    ``tree``: settings with defaults. Raises ValueError for sizes that this task does not have.
    """
    name = _class_of(tree)
    # which does not read it
    cuts = bool(tree.get("do_center_crop")) and name != "SegformerImageProcessor"
    if cuts and name in OTHER_CUTS:
        raise ValueError(
            f"do_center_crop = true of {name} is not supported; false takes the whole image"
        )
    if not tree.get("do_resize", True):
        raise ValueError(
            "do_resize = false is not supported: images of any size are resized here; make it true"
        )
    size, is_shorter = tree["size"], False
    if isinstance(size, int):
        is_shorter = not tree.get("default_to_square", name not in SHORTER_SIDE)
    elif "shortest_edge" in size:
        is_shorter = True
    length = _square("size", size)
    if name == "ConvNextImageProcessor":
        crops = is_shorter and length < WHOLE_CONVNEXT
        return (length, int(length / tree["crop_pct"]), True) if crops else (length, None, False)
    if name == "LevitImageProcessor" and is_shorter:
        length = int((256 / 224) * length)
    if name == "PoolFormerImageProcessor" and tree.get("crop_pct"):
        length, is_shorter = int(length / tree["crop_pct"]), True
    if cuts:
        return _square("crop_size", tree.get("crop_size", length)), length, is_shorter
    # An oblong image is made square then: batches of transformers take square images only.
    divisor = int(tree.get("size_divisor", 1))
    return -(-length // divisor) * divisor, None, False


def _square(key: str, size: Any) -> int:
    """Return the one length that a size consists of."""
    lengths = set(size.values()) if isinstance(size, dict) else {size}
    if len(lengths) != 1:
        raise ValueError(f"{key} {size} is not square")
    return int(lengths.pop())


def _class_of(tree: Mapping[str, Any]) -> str | None:
    """Return the class of a file, without the part of its name that says how it computes; ``None``
    if it has none.
    """
    name = tree.get("image_processor_type") or tree.get("feature_extractor_type")
    if name is None:
        return None
    return (
        str(name)
        .removesuffix("Fast")
        .removesuffix("Pil")
        .replace("FeatureExtractor", "ImageProcessor")
    )
