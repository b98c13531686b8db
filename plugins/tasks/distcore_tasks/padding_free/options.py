"""Methods of a task by which the core enables padding-free computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from distcore_tasks.padding_free.supported_models import (
    HEADS,
    Head,
    HeadName,
    skipped_fraction,
    why_not,
)
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import read_config

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class PaddingFreeOptions(TaskOptions):
    """Base class for the options of a task with padding-free models. It adds no option.

    A task names its head as a class argument:
    ``class TagOptions(PaddingFreeOptions, head="token classifier")``.
    """

    head: ClassVar[Head]
    """The head on the layers of the task's models."""

    def __init_subclass__(cls, head: HeadName | None = None) -> None:
        """Look up the head. Further subclasses inherit it."""
        super().__init_subclass__()
        if head is not None:
            cls.head = HEADS[head]

    def why_not_padding_free(self) -> str | None:
        """Return the reason why the model needs padding; ``None`` if it does not."""
        return why_not(self._config(), self.head.types)

    def skipped_fraction(self) -> float:
        """Return the fraction of the layers' computation that the head does not read.

        This part is skipped.
        """
        return skipped_fraction(self._config()) if self.head.reads == "first" else 0.0

    def enable_padding_free(self, module: nn.Module) -> Callable[[], None]:
        """Make the model's layers compute without padding. Return a function that undoes it."""
        from distcore_tasks.padding_free.layer_hooks import enable_padding_free

        return enable_padding_free(module, read=self.head.reads)

    def _config(self) -> Mapping[str, Any]:
        """Return the model's config.json; for a built-in model only the fields needed here."""
        if not self.from_scratch:
            return read_config(self.model, self.model_folder())
        layers = getattr(self.built_in[self.model], "layers", 12)
        return {"model_type": self.built_in_type, "num_hidden_layers": layers}
