"""Running statistics of normalization: each batch counts once, and those of frozen layers stay.

A batch counts once also where it is recomputed. Both are properties of the layers themselves, so
they hold under every strategy, and in loops that users write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

_HELD = "_distcore_held"
"""Attribute of a layer with its buffers, while a recomputation has copies in their place."""


def tracking_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and layer of each batch or instance normalization with running statistics."""
    for path, layer in module.named_modules():
        if isinstance(layer, _NormBase) and layer.track_running_stats:
            yield path, layer


def iterating_layers(module: nn.Module) -> Iterator[str]:
    """Yield the path of each layer with torch's spectral norm, of either kind.

    A training pass of such a layer is a power iteration.
    """
    for path, layer in module.named_modules():
        # Of a weight with one dimension the norm is exact, and there is no number of iterations.
        if isinstance(layer, _SpectralNorm) and hasattr(layer, "n_power_iterations"):
            yield path.partition(".parametrizations")[0]
        if any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values()):
            yield path


def count_each_batch_once(module: nn.Module) -> None:
    """Let recomputation, in the backward pass, leave the running statistics of the forward pass.

    Normalization in training does not read them, so that the recomputed values stay the same.
    """
    for _, layer in tracking_layers(module):
        layer.register_forward_pre_hook(_hold_while_recomputing)
        # Also after an exception: torch ends a recomputation by one, as soon as it has
        # what it needs.
        layer.register_forward_hook(_release, always_call=True)


def _hold_while_recomputing(layer: nn.Module, _inputs: Any) -> None:
    """Put copies in the place of a layer's buffers before a recomputation writes to them."""
    if torch.compiler.is_compiling():  # a compiled graph writes buffers once
        return
    is_recomputing = torch._C._current_graph_task_id() != -1
    if is_recomputing and layer.training:
        vars(layer)[_HELD] = dict(layer._buffers)
        # Copies, not nothing: a recomputation must hand to autograd as many tensors as the
        # forward pass did.
        for name, buffer in list(layer._buffers.items()):
            if buffer is not None:
                layer._buffers[name] = buffer.clone()


def _release(layer: nn.Module, _inputs: Any, _output: Any) -> None:
    if (buffers := vars(layer).pop(_HELD, None)) is not None:
        layer._buffers.update(buffers)


class FrozenStatistics(nn.Module):
    """A layer that stays in evaluation mode: its statistics normalize, and do not change."""

    keeps_statistics = True
    """Tells others that rows are normalized apart from each other."""

    def train(self, mode: bool = True) -> Any:
        """Set evaluation mode, whatever ``mode`` the rest of the model gets."""
        return super().train(False)


def keep_frozen_statistics(module: nn.Module, *, goes_on_in_frozen_parts: bool = False) -> None:
    """Keep the running statistics of layers in frozen parts, as the weights there are kept.

    A layer without parameters belongs to the smallest part of the model around it that has some. A
    layer that the task has put into evaluation mode stays in it, too, also with
    ``goes_on_in_frozen_parts``.
    """
    for path, layer in list(tracking_layers(module)):
        # A model of from_pretrained() is in evaluation mode as a whole, which says nothing
        # of a layer.
        is_set_apart = module.training and not layer.training
        if is_set_apart or (_is_frozen(module, path) and not goes_on_in_frozen_parts):
            kind = type(layer)
            layer.__class__ = type(f"Frozen{kind.__name__}", (FrozenStatistics, kind), {})
            layer.eval()


def _is_frozen(module: nn.Module, path: str) -> bool:
    """Return True if the smallest part around ``path`` that has parameters trains none of them."""
    while True:
        part = module.get_submodule(path)
        needs_gradient = [parameter.requires_grad for parameter in part.parameters()]
        if needs_gradient or not path:
            return not any(needs_gradient)
        path = path.rpartition(".")[0]
