"""Logits of the places that have a target alone: nothing reads those of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from distcore import Dataset, Datasets


@runtime_checkable
class TellsTargets(Dataset, Protocol):
    """A data set whose batches may say where their targets are."""

    def with_targets(self) -> Dataset:
        """Return the same rows; a batch then has ``targets``, int64 ``(targets,)``, ascending.

        They are places among what the layers give for it, flattened. Itself where all places are targets.
        """
        ...


def narrow(model: nn.Module, data: Datasets) -> Datasets:
    """Have the head of a transformers ``model`` read the places ``targets`` alone, where it is called with them.

    They come as one row, so that logits are ``(1, targets, vocabulary)``. Returns ``data`` with batches that have them.
    Source of the idea: ``logits_to_keep`` of transformers, which takes the same places from every sequence.
    """
    from transformers import PreTrainedModel

    whole: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    wanted: list[Tensor] = []

    def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        wanted[:] = [named["targets"]] if "targets" in named else []
        return given, {name: value for name, value in named.items() if name != "targets"}

    def leave(layers: nn.Module, given: tuple[Any, ...], found: Any) -> Any:
        if wanted:
            found.last_hidden_state = chosen(found.last_hidden_state, wanted.pop())
        return found

    whole.register_forward_pre_hook(enter, with_kwargs=True)
    whole.base_model.register_forward_hook(leave)
    return _told(data)


def chosen(hidden: Tensor, places: Tensor) -> Tensor:
    """Return of ``(n, longest, size)`` the ``places``, int64 ``(targets,)``, as ``(1, targets, size)``."""
    return hidden.flatten(0, 1).index_select(0, places)[None]


def _told(data: Datasets) -> Datasets:
    train, evaluation = _with_targets(data.train), _with_targets(data.evaluation)
    test = evaluation if data.test is data.evaluation else _with_targets(data.test)
    return replace(data, train=train, evaluation=evaluation, test=test)


def _with_targets(dataset: Dataset) -> Dataset:
    return dataset.with_targets() if isinstance(dataset, TellsTargets) else dataset
