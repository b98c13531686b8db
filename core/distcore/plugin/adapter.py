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
    """The parameter of the base from which a parameter of an adapted model begins.

    Frozen parameters have an origin, and so have trained copies of them. The base is the model
    without the adapter.
    """

    name: str
    """Name of the base's parameter."""
    make: Callable[[Tensor], Tensor] | None = None
    """Computes rows of the adapted model's parameter from the same rows of the base's; ``None`` if
    both are equal.
    """


class Adapter(Protocol):
    """What the entry point names: a module, or an object, with these functions."""

    def resolve(self, config: RunConfig) -> Mapping[str, Any]:
        """Return, by dotted key, the values of the adapter's keys that may be 'auto'.

        Raises ConfigError for keys of the adapter with which it cannot be used.
        """

    def inject(
        self, config: RunConfig, module: nn.Module, folder: Path | None
    ) -> Mapping[str, Origin]:
        """Put the adapter into ``module``, in place, and freeze the other parameters.

        ``module`` is a whole model or a meta model; the adapter's own parameters get values in
        both. ``folder`` has the model's weights; ``None`` if there are none. Returns the origin of
        each frozen parameter and of each trained copy, by its name in the adapted model. Raises
        ConfigError if the model has nothing to adapt.
        """

    def recipe(self, config: RunConfig) -> str:
        """Return in a few words how the frozen layers are computed from the model's weights; ''
        if they are those weights.
        """

    def widen(self, module: nn.Module) -> None:
        """Replace the frozen layers of ``module``, in place, by plain ones in fp32, the form that
        other programs read.
        """

    def take_out(self, module: nn.Module, merge: bool) -> nn.Module:
        """Remove the adapter from ``module``, in place; with ``merge`` its layers become plain
        ones with the adapter's changes in them. Return the module.
        """

    def adapted_kinds(self, module: nn.Module) -> str:
        """Return one line that names the kinds of modules that have an adapter, those that are
        trained whole, and those that are left as they are.
        """

    def off(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which ``module`` answers as its base does."""
