"""Refuse modules, before the first step, that a run cannot train or save."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from distcore.checkpoint.tensors import NAMES
from distcore.config import RunConfig
from distcore.errors import ModelError, TaskError
from distcore.model.running_statistics import iterating_layers, tracking_layers
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.plugin.strategy.extra_state import extra_state, tensors_of_state

SPARSE, COMPLEX, EMPTY = "sparse gradients", "complex parameters", "parameters without elements"
"""Kinds of parameters, as ``Capabilities.lacks`` names them."""
WAYS_OUT = {
    SPARSE: "build the layer with sparse=False",
    COMPLEX: "keep real and imaginary parts apart",
    EMPTY: "make it a buffer, or leave it out",
}
"""The remedy for a model with such a parameter."""


def check_module(config: RunConfig, capabilities: Capabilities, module: nn.Module) -> None:
    """Raise ModelError or TaskError, one line, for a model that cannot be trained or saved.

    It is built, and may be on the meta device.
    """
    _check_lazy(module)
    _check_savable(module)
    _check_renormalized(config, capabilities, module)
    _check_synchronized(config, module)
    _check_kinds(config, capabilities, module)
    if config.exact is not None:
        _check_exact(config, module)


def trained_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are trained."""
    return frozenset(
        name for name, parameter in module.named_parameters() if parameter.requires_grad
    )


def refuse_unfrozen(module: nn.Module, trained: frozenset[str], step: int) -> None:
    """Raise TaskError for a parameter that became trainable since the start: nobody steps it."""
    late = sorted(trained_names(module) - trained)
    if not late:
        return
    more = f" and {len(late) - 1} more" if len(late) > 1 else ""
    raise TaskError(
        f"after step {step} {late[0]!r}{more} is trainable, which was frozen at the start: the"
        " optimizer does not step it; leave it trainable from the start, with an lr_scale of its"
        " own in optimizer.groups, or train it in a second run whose --model is an export of"
        " this one"
    )


def refuse_grown(module: nn.Module, trained: frozenset[str]) -> None:
    """Raise TaskError for a parameter that the first forward pass has made: nobody steps it."""
    if grown := sorted(trained_names(module) - trained):
        raise TaskError(
            f"the first forward pass made the parameter {grown[0]!r}: the optimizer does not step"
            " it; make it in __init__, or run one pass in the function that builds the model"
        )


def _check_lazy(module: nn.Module) -> None:
    """Refuse parameters and buffers that get their shape in a first forward pass."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ModelError(
                f"the model's {name!r} has no shape before a first forward pass: give the layer its"
                " sizes, or run one pass in the function that builds the model"
            )


def _check_savable(module: nn.Module) -> None:
    """Refuse tensors and extra state that no checkpoint can have."""
    extra_state(module)  # raises for what no checkpoint can have
    for name, tensor in tensors_of_state(module).items():
        if tensor.dtype not in NAMES:
            kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in NAMES))
            raise ModelError(
                f"the model's {name!r} is of {tensor.dtype}, which no checkpoint can have (these"
                f" can: {kinds}); a buffer that need not be saved is registered with"
                " persistent=False"
            )
        if tensor.layout != torch.strided:
            raise ModelError(
                f"the model's {name!r} is sparse, which no checkpoint can have: keep it dense"
            )


def _check_renormalized(config: RunConfig, capabilities: Capabilities, module: nn.Module) -> None:
    """Refuse embeddings that write their weights in forward, where there are other copies of them.

    Other ranks may have some, or the optimizer.
    """
    owns_weights = capabilities.shards_parameters or "optimizer" in capabilities.owns
    if config.nproc == 1 and not owns_weights:
        return
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ModelError(
                f"strategy {config.strategy!r} on {config.nproc} rank{'s' * (config.nproc != 1)}:"
                f" the forward pass of {path!r} writes its weights (max_norm = {layer.max_norm}),"
                " which other copies of them miss; use --strategy single, or normalize the rows"
                " that forward reads without writing them"
            )


def _check_synchronized(config: RunConfig, module: nn.Module) -> None:
    """Refuse synchronized batch normalization on several ranks of a CPU."""
    if config.device != "cpu" or config.nproc == 1:
        return
    for path, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise ModelError(
                f"the model's {path!r} is a SyncBatchNorm, which torch has for GPUs only: on a"
                " CPU use BatchNorm"
            )


def _check_kinds(config: RunConfig, capabilities: Capabilities, module: nn.Module) -> None:
    """Refuse kinds of trained parameters that the strategy's backend cannot take."""
    for kind, name in _kinds(module):
        if kind in capabilities.lacks:
            raise ModelError(
                f"strategy {config.strategy!r} takes no {kind}, as the model's {name!r} has:"
                f" {WAYS_OUT[kind]}, or take another strategy, such as --strategy single"
            )


def _check_exact(config: RunConfig, module: nn.Module) -> None:
    """Refuse modules whose state, or whose gradients, follow from how ``exact`` deals the rows.

    Statistics of a layer that is frozen may stay; if they do not, the first step shows it.
    """
    is_whole = config.freeze is None and config.lora.rank is None
    with_state = [path for path, _ in tracking_layers(module)] if is_whole else []
    with_state += iterating_layers(module)
    for path in with_state:
        raise ModelError(
            f"exact = {config.exact}: the model's {path!r} keeps state of the rows that a rank has"
            " computed, such as running statistics; use a layer without it, such as GroupNorm or"
            " LayerNorm, or train without --exact"
        )
    for kind, name in _kinds(module):
        raise ModelError(
            f"exact = {config.exact}: takes no {kind}, as the model's {name!r} has:"
            f" {WAYS_OUT[kind]}"
        )
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"exact = {config.exact}: adds up gradients in fp32, and the model's {name!r} is of"
                f" {parameter.dtype}; build it in torch.float32, or freeze it"
            )
        if parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"exact = {config.exact}: the hook after the gradient of {name!r} would never run;"
                " use register_hook(), or train without --exact"
            )


def _kinds(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield kind and name of each trained parameter that is not dense and real, or is empty."""
    for path, layer in module.named_modules():
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            continue
        if layer.sparse and layer.weight.requires_grad:
            yield SPARSE, f"{path}.weight".lstrip(".")
    for name, parameter in module.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            yield COMPLEX, name
        if not parameter.numel() and parameter.requires_grad:
            yield EMPTY, name
