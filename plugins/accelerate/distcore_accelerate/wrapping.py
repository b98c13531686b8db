"""Layers that Accelerate's FSDP2 shards as units (accelerate/utils/fsdp_utils.py)."""

from __future__ import annotations

from accelerate import FullyShardedDataParallelPlugin
from torch import nn

from distcore import StrategyError


def choose_layers(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Name no layer around the input embedding: Accelerate shards that alone, and torch
    refuses to shard it twice.

    Layers are the model's own, unless the plugin names some. Raises StrategyError for a parameter
    of an embedding that a layer shares, because it would be in two units.
    """
    embeddings = [
        getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")
    ]
    modules = model.named_modules(remove_duplicate=False)
    units = {
        name for name, module in modules if any(module is embedding for embedding in embeddings)
    }
    parameters = list(model.named_parameters(remove_duplicate=False))
    own = {id(parameter) for name, parameter in parameters if name.rpartition(".")[0] in units}
    for name, parameter in parameters:
        if id(parameter) in own and name.rpartition(".")[0] not in units:
            raise StrategyError(
                f"parameter {name!r} is one of an embedding, too, and Accelerate's FSDP2 shards"
                " embeddings by themselves: use --strategy fsdp"
            )
    names = plugin.transformer_cls_names_to_wrap
    if names is None:
        names = list(getattr(model, "_no_split_modules", None) or ())
    inner = embeddings[0]
    around = {
        type(layer).__name__
        for layer in model.modules()
        if any(part is inner for part in layer.modules())
    }
    plugin.transformer_cls_names_to_wrap = [name for name in names if name not in around]
