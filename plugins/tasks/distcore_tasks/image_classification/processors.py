"""Image processors of transformers: which this task has, what a file may leave out, and who owns each setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BILINEAR, BICUBIC = 2, 3
"""Pillow's numbers of filters."""


def _defaults(size: int, resample: int, mean: Any = HALF, std: Any = HALF, **more: Any) -> dict[str, Any]:
    return {"size": size, "resample": resample, "image_mean": mean, "image_std": std, "do_normalize": True} | more


def _crop(size: int, crop: int, resample: int, mean: Any = HALF, std: Any = HALF, **more: Any) -> dict[str, Any]:
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
    "MobileViTImageProcessor": _crop(224, 256, BICUBIC, do_normalize=None, do_flip_channel_order=True),
    "PerceiverImageProcessor": _crop(224, 256, BICUBIC, IMAGENET_MEAN, IMAGENET_STD),
    "PoolFormerImageProcessor": _crop(224, 224, BICUBIC, IMAGENET_MEAN, IMAGENET_STD, crop_pct=0.9),
    "PvtImageProcessor": _defaults(224, BICUBIC, IMAGENET_MEAN, IMAGENET_STD),
    "SegformerImageProcessor": _defaults(512, BILINEAR, IMAGENET_MEAN, IMAGENET_STD),
    "SiglipImageProcessor": _defaults(224, BICUBIC),
    "TextNetImageProcessor": _defaults(
        640, BILINEAR, IMAGENET_MEAN, IMAGENET_STD, do_center_crop=False, crop_size=224, size_divisor=32
    ),
    "ViTImageProcessor": _defaults(224, BILINEAR),
}
"""By name: the settings of a file that leaves them out. Those of other classes compute otherwise, and are refused."""
READ = frozenset(
    {
        "size",
        "crop_size",
        "do_center_crop",
        "resample",
        "do_rescale",
        "rescale_factor",
        "do_normalize",
        "image_mean",
        "image_std",
        "include_top",
    }
)
"""Settings that ``read_preprocessing`` follows."""
GEOMETRY = frozenset({"do_resize", "crop_pct", "default_to_square", "use_square_size", "size_divisor"})
"""Which part of an oblong image is seen: here the whole, made square. That is in the documentation."""
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
REFUSED = frozenset({"do_flip_channel_order", "rescale_offset", "do_pad", "pad_size", "do_color_quantize"})
"""Settings that change values, and that this task does not have."""


def with_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file, with those of its class that it leaves out.

    Raises ValueError for a class or a setting that this task does not have.
    """
    name = _class_of(tree)
    if name is not None and name not in PROCESSORS:
        raise ValueError(
            f"{name} is not one of the processors that this task has; if it only resizes, rescales and normalizes, "
            "make image_processor_type ViTImageProcessor"
        )
    whole = (PROCESSORS[name] if name else {}) | {key: value for key, value in tree.items() if value is not None}
    known = READ | GEOMETRY | WITHOUT_EFFECT
    for key, value in whole.items():
        if key not in known and value not in (None, False):
            raise ValueError(f"{key} is not supported")
    return whole


def _class_of(tree: Mapping[str, Any]) -> str | None:
    """Return the class of a file, without the part of its name that says how it computes; ``None`` if it has none."""
    name = tree.get("image_processor_type") or tree.get("feature_extractor_type")
    if name is None:
        return None
    return str(name).removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
