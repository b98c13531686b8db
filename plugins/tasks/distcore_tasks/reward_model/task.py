"""Reward models: a language model with one output learns to give the better of two
answers the larger number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from distcore import Datasets
from distcore_tasks.preference.pairs import PairTask, several_answers
from distcore_tasks.reward_model.models import build_reward_model
from distcore_tasks.reward_model.options import RewardOptions
from distcore_tasks.shared.tokenized import tokenized

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import RunConfig


@dataclass(frozen=True, kw_only=True)
class RewardModel(RewardOptions, PairTask):
    """Rewards of answers by Bradley and Terry's model; implements
    ``distcore.plugin.task.task.Task``.

    Each pair of answers is one item of the mean loss.
    """

    laws_hold: ClassVar = True

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a model with one output for a sequence."""
        data = tokenized(data)
        return build_reward_model(self, vocab_size=data.vocab_size, pad=data.pad, end=data.end)

    def row_loss(
        self, model: nn.Module, batch: dict[str, Tensor], log: Callable[..., None]
    ) -> Tensor:
        """Return the loss of each row, fp32 ``(n,)``; log how often, and by how much, the
        better answer is ahead.
        """
        chosen, rejected = _rewards(model, batch)
        margin = (chosen - rejected).detach()
        log("accuracy", (margin > 0).sum(), len(margin))
        log("margin", margin.sum(), len(margin))
        return self._losses(chosen, rejected)

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return for each row, ``(n,)``: ``chosen`` and ``rejected``, the rewards of both
        answers, and the ``loss``.
        """
        chosen, rejected = _rewards(model, batch)
        return {"chosen": chosen, "rejected": rejected, "loss": self._losses(chosen, rejected)}

    def _losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid

        return -logsigmoid(chosen - rejected) + self.center * (chosen + rejected).square()


def _rewards(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the rewards of the chosen and of the rejected answers, fp32 ``(n,)`` each."""
    with several_answers(batch):
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        ).logits
    chosen, rejected = logits[:, 0].float().chunk(2)
    return chosen, rejected
