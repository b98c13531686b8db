"""The load-balancing loss of a mixture of experts, over the router's choices for all tokens.

It is the one of transformers for Mixtral and Qwen-MoE (Fedus et al. 2021, equations 4 to 6), over
the global batch. It is a product of two means, so a sum over rows cannot compute it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from distcore import ModelError
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.shared.options import TaskOptions

if TYPE_CHECKING:
    from torch import Tensor

EXPERTS = ("num_local_experts", "num_experts")
"""Names of the number of experts in configs of transformers."""
COEFFICIENT = 0.02
"""Weight of the load-balancing loss in a built-in mixture of experts."""


class Router(NamedTuple):
    """The router's settings in a config."""

    experts: int
    """Number of experts."""
    chosen: int
    """Experts for each token."""
    weight: float
    """Weight of the load-balancing loss if the model asks for it, else 0."""


@dataclass(frozen=True, kw_only=True)
class RouterOptions(TaskOptions):
    """Options of a task that can train a mixture of experts."""

    router_loss: Annotated[float, Field(ge=0)] | None = None
    """Weight of the load-balancing loss of a mixture of experts; null: the model's own.

    That is ``router_aux_loss_coef`` if the config has ``output_router_logits``, 0.02 for a
    built-in model, else 0.
    """

    def router(self) -> Router | None:
        """Return the router of the configured model; ``None`` if it is no mixture of experts."""
        if (shape := SHAPES.get(self.model)) is not None:
            return Router(shape.experts, 2, COEFFICIENT) if shape.experts else None
        return _router_of(self.model_folder())

    @property
    def router_weight(self) -> float:
        """The weight of the load-balancing loss; raises ModelError if the model has no router."""
        if self.router_loss == 0:
            return 0.0
        router = self.router()
        if router is None and self.router_loss:
            raise ModelError(
                f"task_options.router_loss = {self.router_loss}: transformers has no load-balancing"
                f" loss for model {self.model}; leave the option out"
            )
        return (self.router_loss or router.weight) if router else 0.0

    @property
    def whole_batch(self) -> bool:
        """True if the loss includes the load-balancing loss, which is over the global batch."""
        return self.router_weight > 0

    @property
    def logs(self) -> tuple[str, ...]:
        """The name under which the load-balancing loss is logged."""
        return ("router",) if self.whole_batch else ()


@cache
def _router_of(folder: Path) -> Router | None:
    """Return the router of the model in ``folder``; ``None`` if it is no mixture of experts."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    # The key has another name in each family of models.
    keys = [name for name in EXPERTS if hasattr(config, name)]
    if not keys or not hasattr(config, "router_aux_loss_coef"):
        return None
    experts = getattr(config, keys[0])
    if experts is None:
        return None
    has_loss = getattr(config, "output_router_logits", False)
    return Router(
        experts=int(experts),
        chosen=int(config.num_experts_per_tok),
        weight=float(config.router_aux_loss_coef) if has_loss else 0.0,
    )


def choices(
    router: Router, layers: tuple[Tensor, ...], row: Tensor, counted: Tensor, rows: int
) -> dict[str, Tensor]:
    """Return the router's choices for the tokens of each row, summed over layers.

    ``layers`` has the router's logits, ``(positions, experts)`` each; ``row`` is the row of each
    position, and ``counted`` is False for padding, both ``(positions,)``. ``chosen`` and
    ``probability`` are ``(rows, experts)``; ``routed``, ``(rows,)``, is the number of tokens times
    the number of layers.
    """
    import torch

    weight = counted.float()[:, None]
    chosen = torch.zeros(rows, router.experts, device=row.device)
    probability = torch.zeros_like(chosen)
    for logits in layers:
        probabilities = logits.float().softmax(-1)
        experts = probabilities.topk(router.chosen, dim=-1).indices
        is_chosen = torch.zeros_like(probabilities).scatter_(1, experts, 1.0)
        chosen = chosen.index_add(0, row, is_chosen * weight)
        probability = probability.index_add(0, row, probabilities * weight)
    choices_of_token = weight[:, 0] * len(layers)
    routed = torch.zeros(rows, device=row.device).index_add(0, row, choices_of_token)
    return {"chosen": chosen.detach(), "probability": probability, "routed": routed}


def balance(embeddings: dict[str, Tensor]) -> Tensor:
    """Return the load-balancing loss of a global batch.

    With k experts per token, it is k if all are chosen equally often.
    """
    tokens = embeddings["routed"].sum().clamp(min=1)
    chosen = embeddings["chosen"].sum(0) / tokens
    probability = embeddings["probability"].sum(0) / tokens
    return (chosen * probability).sum() * len(chosen)
