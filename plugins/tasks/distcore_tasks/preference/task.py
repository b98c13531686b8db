"""Preference tuning: a language model learns which of two answers to a prompt is the better one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from distcore import Causal, Datasets
from distcore_tasks.causal_lm.models import build_model
from distcore_tasks.preference.losses import kto_losses, row_losses
from distcore_tasks.preference.options import PreferenceOptions
from distcore_tasks.preference.pairs import PairTask, several_answers
from distcore_tasks.shared.causal import causal
from distcore_tasks.shared.tokenized import tokenized

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import FrozenModel, RunConfig


@dataclass(frozen=True, kw_only=True)
class Preference(PreferenceOptions, PairTask):
    """Better and worse answers, beside a frozen reference; implements
    ``distcore.plugin.task.task.Task``.

    Each pair of answers is one item of the mean loss.
    """

    laws_hold: ClassVar = True

    @property
    def causal(self) -> Causal:
        """No output follows from a later token; the core measures it before the first step."""
        return causal(self)

    @property
    def whole_batch(self) -> bool:
        """True for kto, which measures the divergence of model and reference
        over the global batch.
        """
        return self.loss == "kto"

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets. Raises DataError, ModelError or ConfigError."""
        return self.with_answers(super().prepare(config))

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a model with a language modeling head."""
        data = tokenized(data)
        return build_model(self.as_causal(), vocab_size=data.vocab_size, pad=data.pad, end=data.end)

    def frozen(
        self, config: RunConfig, data: Datasets
    ) -> dict[str, FrozenModel | Literal["initial"]]:
        """Return the reference: a model of a folder, or the trained model as it began."""
        from distcore import INITIAL, FrozenModel

        if self.reference is None:
            return {"reference": INITIAL}
        options = self.as_causal(self.reference)

        def build(config: RunConfig, data: Datasets) -> nn.Module:
            known = tokenized(data)
            return build_model(options, vocab_size=known.vocab_size, pad=known.pad, end=known.end)

        return {"reference": FrozenModel(build, options.model_folder())}

    def consult(
        self, frozen: Mapping[str, Callable[..., Any]], batch: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Add the log likelihood of each row's answers under the
        reference, fp32 ``(n, answers)``.
        """
        if "reference" in batch:
            return batch
        return batch | {
            "reference": _log_likelihoods(frozen["reference"], batch).view(-1, len(batch["rows"])).T
        }

    def row_loss(
        self, model: nn.Module, batch: dict[str, Tensor], log: Callable[..., None]
    ) -> Tensor:
        """Return the loss of each row, fp32 ``(n,)``; log how often, and by how much, the
        better answer is ahead.
        """
        chosen, rejected = _gains(model, batch).chunk(2)
        margin = self.beta * (chosen - rejected).detach()
        log("accuracy", (margin > 0).sum(), len(margin))
        log("margin", margin.sum(), len(margin))
        return row_losses(self, chosen, rejected, batch["answer"].sum(1))

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return log likelihood ratios of the model to its reference, for kto."""
        chosen, rejected, mismatched = _gains(model, batch).chunk(3)
        return {"chosen": chosen, "rejected": rejected, "mismatched": mismatched.detach()}

    def batch_loss(
        self, embeddings: dict[str, Tensor], rows: Tensor, log: Callable[..., None]
    ) -> Tensor:
        """Return the mean loss of kto; mismatched answers estimate the divergence
        of model and reference.
        """
        chosen, rejected = embeddings["chosen"], embeddings["rejected"]
        margin = self.beta * (chosen - rejected).detach()
        log("accuracy", (margin > 0).sum(), len(margin))
        log("margin", margin.sum(), len(margin))
        return kto_losses(
            self.beta, chosen, rejected, embeddings["mismatched"].mean().clamp(min=0)
        ).mean()

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return for each row, ``(n,)``: ``chosen`` and ``rejected``, the rewards of both answers.

        A reward is ``beta`` times the log likelihood ratio of the model to its reference. For kto
        also ``mismatched``, else the ``loss``.
        """
        gains = _gains(model, batch)
        rows = len(batch["rows"])
        chosen, rejected = gains[:rows], gains[rows : 2 * rows]
        rewards = {"chosen": self.beta * chosen, "rejected": self.beta * rejected}
        if self.loss == "kto":
            return rewards | (
                {"mismatched": self.beta * gains[2 * rows :]} if len(gains) > 2 * rows else {}
            )
        return rewards | {"loss": row_losses(self, chosen, rejected, batch["answer"].sum(1))}

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return the report of a task on pairs. The loss of kto is computed over all rows."""
        if outputs and self.loss == "kto":
            chosen, rejected = outputs["chosen"].double(), outputs["rejected"].double()
            losses = kto_losses(
                1.0, chosen, rejected, outputs["mismatched"].double().mean().clamp(min=0)
            )
            outputs = outputs | {"loss": losses}
        return super().report(outputs, data)


def _gains(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """Return the logarithm of each answer's likelihood ratio of the model to
    its reference, fp32 ``(sequences,)``.
    """
    return _log_likelihoods(model, batch) - batch["reference"].T.flatten()


def _log_likelihoods(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """Return the logarithm of each answer's likelihood after its prompt, fp32 ``(sequences,)``."""
    from torch.nn.functional import cross_entropy

    tokens, answer = batch["input_ids"], batch["answer"]
    with several_answers(batch):
        logits = model(
            input_ids=tokens, attention_mask=batch["attention_mask"], use_cache=False
        ).logits[:, :-1]
    losses = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    likelihoods: Tensor = -(losses.view_as(tokens[:, 1:]) * answer[:, 1:]).sum(1)
    return likelihoods
