"""Compute logits at target positions only, because the loss reads no others.

Similar to ``logits_to_keep`` of transformers, which selects the same positions in every sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from distcore import Dataset, Datasets

if TYPE_CHECKING:
    from torch import Tensor, nn


class SelectsLogits:
    """The method ``select_logits`` of tasks with a transformers model.

    It needs datasets that implement ``TellsTargets``.
    """

    def select_logits(self, module: nn.Module, data: Datasets) -> Datasets:
        """Make the head read target positions only, and return datasets that have them."""
        return select_logits(module, data)


@runtime_checkable
class TellsTargets(Dataset, Protocol):
    """A dataset that can add target positions to its batches."""

    def with_targets(self) -> Dataset:
        """Return the same rows, with ``targets``, int64 ``(targets,)``, ascending, in each batch.

        ``targets`` are positions in the flattened output of the layers. Returns itself if every
        position is a target.
        """
        ...


def select_logits(model: nn.Module, data: Datasets) -> Datasets:
    """Make the head of a transformers ``model`` read only the positions ``targets`` of a call.

    Logits are then ``(1, targets, vocabulary)``; a call without ``targets`` is unchanged. Returns
    ``data`` with target positions in its batches.
    """
    from transformers import PreTrainedModel

    whole: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    # Holds the targets of a call from its start to the end of the layers.
    pending: list[Tensor] = []

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any]:
        pending.clear()
        kwargs = dict(kwargs)
        if "targets" in kwargs:
            pending.append(kwargs.pop("targets"))
        return args, kwargs

    def leave(layers: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        if pending:
            outputs.last_hidden_state = at_targets(outputs.last_hidden_state, pending.pop())
        return outputs

    whole.register_forward_pre_hook(enter, with_kwargs=True)
    whole.base_model.register_forward_hook(leave)
    return data.mapped(_mark_targets) or data


def at_targets(hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the positions ``targets``, int64 ``(targets,)``, of ``hidden``.

    ``hidden`` is ``(n, longest, size)``, the result ``(1, targets, size)``.
    """
    return hidden.flatten(0, 1).index_select(0, targets)[None]


def logits_of_tokens(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the logits of the tokens in ``mask``, row by row: ``(tokens, outputs)``.

    ``mask`` is ``(n, longest)``. ``logits`` are ``(n, longest, outputs)`` or, from layers that
    return tokens only, ``(1, tokens, outputs)``.
    """
    has_padding = logits.shape[:2] == mask.shape
    return logits[mask.bool()] if has_padding else logits[0]


def _mark_targets(dataset: Dataset) -> Dataset:
    """Return ``dataset`` with target positions in its batches, if it can have them."""
    return dataset.with_targets() if isinstance(dataset, TellsTargets) else dataset
