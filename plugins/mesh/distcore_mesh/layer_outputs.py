"""Outputs of single layers, of which a stage of a pipeline has those of its own blocks alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

from torch import nn

from distcore import StrategyError

ELSEWHERE = "are on the ranks of other stages, too; use pp = 1"


class LastHiddenState(tuple[Any, ...]):
    """The hidden states of a model's output, of which the last stage has the last one."""

    def __getitem__(self, index: Any) -> Any:
        """Return the last hidden state. Raises StrategyError for another one."""
        return super().__getitem__(index) if index == -1 else self._refuse()

    def __iter__(self) -> Never:
        """Raise StrategyError."""
        self._refuse()

    def __len__(self) -> Never:
        """Raise StrategyError."""
        self._refuse()

    def _refuse(self) -> Never:
        raise StrategyError(
            f"strategy 'mesh': with pp hidden states but the last one, [-1], {ELSEWHERE}"
        )


def check_asked(model: nn.Module, named: Mapping[str, Any]) -> None:
    """Raise StrategyError if a call of ``model`` asks for attentions or a router's logits.

    The config of a model can ask, too. Then the loss that a model computes itself, from
    ``labels``, includes one over the router's logits of all layers.
    """
    for name in ("output_attentions", "output_router_logits"):
        if named.get(name):
            what = name.removeprefix("output_").replace("_", " ")
            raise StrategyError(f"strategy 'mesh': with pp {what} of a model {ELSEWHERE}")
    config = getattr(model, "config", None)
    asks = named.get("output_router_logits", getattr(config, "output_router_logits", False))
    if asks and named.get("labels") is not None:
        raise StrategyError(
            "strategy 'mesh': with pp the model's own loss lacks the router logits of other stages;"
            " set output_router_logits of its config to false, or use pp = 1"
        )


def without_other_layers(output: Any) -> Any:
    """Return a model's output without what it has of each layer but the last hidden state."""
    states = getattr(output, "hidden_states", None)
    if isinstance(states, tuple) and states:
        output.hidden_states = LastHiddenState(states)
    for name in ("attentions", "router_logits"):
        if isinstance(getattr(output, name, None), tuple):
            setattr(output, name, None)
    return output
