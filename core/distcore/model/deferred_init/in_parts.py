"""Hand a model without values from the hook that builds it to the one that cuts it, with where its values come from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from distcore.errors import SkeletonError
from distcore.plugin.strategy.contract import ModelSource

log = logging.getLogger("distcore")
_ATTRIBUTE = "distcore_weights"  # a model is all that the core hands from ``build_model`` to ``wrap_model``


def build_in_parts(source: ModelSource, strategy: str, parts: Callable[[], tuple[nn.Module, Any]] | None) -> nn.Module:
    """Return the model on the meta device, with its weights to be taken by ``take_weights``; else a whole one.

    ``parts``, such as ``source.replayed``, returns that model, and what gives a rank its part of the weights. The model
    is whole where there is no ``parts``, and where it raises SkeletonError: then the log has the reason, and the name
    of the ``strategy``.
    """
    if parts is None:
        return source.build()
    try:
        model, weights = parts()
    except SkeletonError as reason:
        log.info("%s: every rank builds the whole model: %s", strategy, reason)
        return source.build()
    vars(model)[_ATTRIBUTE] = weights
    return model


def take_weights(model: nn.Module) -> Any:
    """Return what ``build_in_parts`` was given for the weights of ``model``, once; ``None`` if the model has values."""
    return vars(model).pop(_ATTRIBUTE, None)
