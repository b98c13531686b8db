"""The interface of an adapter, an entry point of ``distcore.adapters``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore.config import RunConfig


class Origin(NamedTuple):
    """Where a frozen parameter of an adapted model, or a trained copy, has
    its first values from.
    """

    name: str
    """The parameter of the model without the adapter."""
    make: Callable[[Tensor], Tensor] | None = None
    """Makes rows of the parameter of the same rows of that one; ``None``: they are equal."""


class Adapter(Protocol):
    """What the entry point names: a module, or an object, with these functions."""

    def resolve(self, config: RunConfig) -> Mapping[str, Any]:
        """Return, by dotted key, values for each 'auto' of the adapter; raises ConfigError for
        one that cannot be.
        """

    def inject(
        self, config: RunConfig, module: nn.Module, folder: Path | None
    ) -> Mapping[str, Origin]:
        """Put the adapter into ``module``, in place, and freeze the other parameters.

        ``module`` is whole or a meta model; the adapter has values in both. ``folder`` has the
        model's weights, if any. Returns, by the new name, where each of them has its values from,
        and each copy that is trained. Raises ConfigError if the model has nothing to adapt.
        """

    def recipe(self, config: RunConfig) -> str:
        """Return how the frozen layers are made of the model's weights, in a few words; '' if
        they are the same.
        """

    def widen(self, module: nn.Module) -> None:
        """Turn the frozen layers of ``module``, in place, into plain ones in fp32,
        as others read them.
        """

    def take_out(self, module: nn.Module, merge: bool) -> nn.Module:
        """Remove the adapter from ``module``, in place, or merge it into plain
        layers; return the module.
        """

    def adapted_kinds(self, module: nn.Module) -> str:
        """Return, in one line, which kinds of modules have an adapter, are trained whole, and are
        left as they are.
        """

    def off(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which ``module`` answers as its base does."""
