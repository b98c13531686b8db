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
    """Learn to prefer the better of two answers, compared with a frozen reference.

    Implements ``distcore.plugin.task.task.Task``. Each pair of answers is one item of the mean
    loss.
    """

    laws_hold: ClassVar = True

    @property
    def causal(self) -> Causal:
        """No output follows from a later token; the core measures it before the first step."""
        return causal(self)

    @property
    def whole_batch(self) -> bool:
        """True for kto, whose divergence from the reference is over the global batch."""
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
            data = tokenized(data)
            return build_model(options, vocab_size=data.vocab_size, pad=data.pad, end=data.end)

        return {"reference": FrozenModel(build, options.model_folder())}

    def consult(
        self, frozen: Mapping[str, Callable[..., Any]], batch: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Add the answers' log likelihoods under the reference, fp32 ``(n, answers)``."""
        if "reference" in batch:
            return batch
        likelihoods = _log_likelihoods(frozen["reference"], batch)
        return batch | {"reference": likelihoods.view(-1, len(batch["rows"])).T}

    def row_loss(
        self, model: nn.Module, batch: dict[str, Tensor], log: Callable[..., None]
    ) -> Tensor:
        """Return the loss of each row, fp32 ``(n,)``.

        Logs how often, and by how much, the better answer is ahead.
        """
        chosen, rejected = _log_ratios(model, batch).chunk(2)
        self._log_margin(chosen, rejected, log)
        return row_losses(self, chosen, rejected, batch["answer"].sum(1))

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return log likelihood ratios of the model to its reference, for kto."""
        chosen, rejected, mismatched = _log_ratios(model, batch).chunk(3)
        return {"chosen": chosen, "rejected": rejected, "mismatched": mismatched.detach()}

    def batch_loss(
        self, embeddings: dict[str, Tensor], rows: Tensor, log: Callable[..., None]
    ) -> Tensor:
        """Return the mean loss of kto.

        Mismatched answers estimate the divergence of model and reference.
        """
        chosen, rejected = embeddings["chosen"], embeddings["rejected"]
        self._log_margin(chosen, rejected, log)
        divergence = embeddings["mismatched"].mean().clamp(min=0)
        return kto_losses(self.beta, chosen, rejected, divergence).mean()

    def _log_margin(self, chosen: Tensor, rejected: Tensor, log: Callable[..., None]) -> None:
        """Log how often, and by how much, the better answer is ahead."""
        margin = self.beta * (chosen - rejected).detach()
        log("accuracy", (margin > 0).sum(), len(margin))
        log("margin", margin.sum(), len(margin))

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return for each row, ``(n,)``: ``chosen`` and ``rejected``, the rewards of both answers.

        A reward is ``beta`` times the log likelihood ratio of the model to its reference. For kto
        also ``mismatched``, else the ``loss``.
        """
        log_ratios = _log_ratios(model, batch)
        rows = len(batch["rows"])
        chosen, rejected = log_ratios[:rows], log_ratios[rows : 2 * rows]
        mismatched = log_ratios[2 * rows :]
        rewards = {"chosen": self.beta * chosen, "rejected": self.beta * rejected}
        if self.loss != "kto":
            rewards["loss"] = row_losses(self, chosen, rejected, batch["answer"].sum(1))
        elif len(mismatched):  # rows that are only judged have none
            rewards["mismatched"] = self.beta * mismatched
        return rewards

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return the report of a task on pairs. The loss of kto is computed over all rows."""
        if outputs and self.loss == "kto":
            chosen, rejected = outputs["chosen"].double(), outputs["rejected"].double()
            divergence = outputs["mismatched"].double().mean().clamp(min=0)
            # Outputs are rewards, which contain ``beta`` already.
            outputs = outputs | {"loss": kto_losses(1.0, chosen, rejected, divergence)}
        return super().report(outputs, data)


def _log_ratios(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """Return each answer's log likelihood ratio of model to reference, fp32 ``(sequences,)``."""
    return _log_likelihoods(model, batch) - batch["reference"].T.flatten()


def _log_likelihoods(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """Return the logarithm of each answer's likelihood after its prompt, fp32 ``(sequences,)``."""
    from torch.nn.functional import cross_entropy

    tokens, mask = batch["input_ids"], batch["attention_mask"]
    with several_answers(batch):
        outputs = model(input_ids=tokens, attention_mask=mask, use_cache=False)
    # The output at a token predicts the next one.
    logits = outputs.logits[:, :-1].float()
    targets, is_answer = tokens[:, 1:], batch["answer"][:, 1:]
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    likelihoods: Tensor = -(losses.view_as(targets) * is_answer).sum(1)
    return likelihoods
