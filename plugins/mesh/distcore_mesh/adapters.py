"""Split layers with an adapter of peft: the base by the plan, and one of the two small matrices.

The output of a layer is ``base(x) + lora_B(lora_A(x))``. A layer that computes some outputs has the
same ``lora_A`` on every rank, and its rows of ``lora_B``. A layer that takes some inputs has its
columns of ``lora_A``, whose results are summed over the ranks, and the same ``lora_B``. So both
matrices get the styles of plain layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from distcore import StrategyError
from distcore_mesh.mask_parts import WHOLE, Part, split_features

BASE = ".base_layer"
"""End of the name of a layer that has an adapter, by peft."""


def styles_inside(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return ``styles`` with those of base and matrices in the place of an adapted layer's.

    Raises StrategyError, one line, for an adapted embedding.
    """
    inside: dict[str, str] = {}
    for name, style in styles.items():
        layer: Any = None if style == "divided" else model.get_submodule(name)
        if not hasattr(layer, "base_layer"):
            inside[name] = style
            continue
        if style.startswith("embedding"):
            raise StrategyError(
                f"lora.targets: {name} has an adapter, which tp cannot split {style!r}; leave"
                " it out"
            )
        inside[f"{name}{BASE}"] = style
        if "colwise" not in style:
            inside |= {f"{name}.lora_A.{adapter}": style for adapter in layer.lora_A}
        if "rowwise" not in style:
            inside |= {f"{name}.lora_B.{adapter}": style for adapter in layer.lora_B}
    return inside


def follow_dropouts(model: nn.Module, styles: Mapping[str, str], part: Part) -> None:
    """Have dropout masks by row follow the inputs of adapters.

    In a layer that takes some inputs, a mask is of ``part`` of the features.
    """
    for name, style in styles.items():
        if not name.endswith(BASE):
            continue
        layer: Any = model.get_submodule(name.removesuffix(BASE))
        during, after = (part, WHOLE) if style == "rowwise" else (WHOLE, part)
        for dropout in layer.lora_dropout.values():
            if isinstance(dropout, nn.Dropout):
                dropout.register_forward_pre_hook(lambda *_, part=during: split_features(part))
                dropout.register_forward_hook(lambda *_, part=after: split_features(part))
