"""The interface of an adapter, an entry point of the group ``distcore.adapters``: trained parts in a frozen model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from distcore.config import RunConfig


class Adapter(Protocol):
    """What the entry point names: a module, or an object, with these functions."""

    def resolve(self, config: RunConfig) -> Mapping[str, Any]:
        """Return, by dotted key, values for each 'auto' of the adapter; raises ConfigError for one that cannot be."""
        ...

    def inject(self, config: RunConfig, module: nn.Module, folder: Path | None) -> Mapping[str, str]:
        """Put the adapter into ``module``, in place, and freeze the other parameters.

        ``module`` is whole or a meta model; the adapter has values in both. ``folder`` has the model's weights, if any.
        Returns a map from each base parameter's new name to its old one; a trained copy maps to what it was copied
        from. Raises ConfigError if the model has nothing to adapt.
        """
        ...

    def recipe(self, config: RunConfig) -> str:
        """Return how the frozen layers are made of the model's weights, in a few words; '' if they are the same."""
        ...

    def widen(self, module: nn.Module) -> None:
        """Turn the frozen layers of ``module``, in place, into plain ones in fp32, as others read them."""
        ...

    def take_out(self, module: nn.Module, merge: bool) -> nn.Module:
        """Remove the adapter from ``module``, in place, or merge it into plain layers; return the module."""
        ...

    def off(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which ``module`` answers as its base does."""
        ...
