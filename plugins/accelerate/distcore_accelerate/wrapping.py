"""Layers that Accelerate's FSDP2 shards as units (accelerate/utils/fsdp_utils.py)."""

from __future__ import annotations

from accelerate import FullyShardedDataParallelPlugin
from torch import nn

from distcore import StrategyError


def choose_layers(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Name the layers to shard, but none around the input embedding.

    Accelerate shards that alone, and torch refuses to shard it twice. Layers are the model's own,
    unless the plugin names some. Raises StrategyError for a parameter of an embedding that a layer
    shares, because it would be in two units.
    """
    input_embedding = getattr(model, "get_input_embeddings", lambda: None)()
    output_embedding = getattr(model, "get_output_embeddings", lambda: None)()
    names_of_embeddings = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if module is input_embedding or module is output_embedding:
            names_of_embeddings.add(name)
    of_embeddings: set[int] = set()
    others: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, _ = name.rpartition(".")
        if owner in names_of_embeddings:
            of_embeddings.add(id(parameter))
        else:
            others[name] = parameter
    for name, parameter in others.items():
        if id(parameter) in of_embeddings:
            raise StrategyError(
                f"parameter {name!r} is one of an embedding, too, and Accelerate's FSDP2 shards"
                " embeddings by themselves: use --strategy fsdp"
            )
    names = plugin.transformer_cls_names_to_wrap
    if names is None:
        names = list(getattr(model, "_no_split_modules", None) or ())
    around_input = set()
    for layer in model.modules():
        if any(part is input_embedding for part in layer.modules()):
            around_input.add(type(layer).__name__)
    plugin.transformer_cls_names_to_wrap = [name for name in names if name not in around_input]
