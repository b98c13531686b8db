"""Build a model without values, for the hook that cuts it, and say where its values come from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from distcore.errors import SkeletonError
from distcore.plugin.strategy.contract import BuiltModel, ModelSource

log = logging.getLogger("distcore")


def build_in_parts(source: ModelSource, strategy: str, parts: Callable[[], tuple[nn.Module, Any]] | None) -> BuiltModel:
    """Return the model on the meta device, with its weights as state; else a whole one, without state.

    ``parts``, such as ``source.replayed``, returns that model, and what gives a rank its part of the weights. The model
    is whole where there is no ``parts``, and where it raises SkeletonError: then the log has the reason, and the name
    of the ``strategy``.
    """
    if parts is None:
        return BuiltModel(model=source.build())
    try:
        model, weights = parts()
    except SkeletonError as reason:
        log.info("%s: every rank builds the whole model: %s", strategy, reason)
        return BuiltModel(model=source.build())
    return BuiltModel(model=model, state=weights)
