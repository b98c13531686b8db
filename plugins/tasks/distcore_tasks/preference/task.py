"""Preference tuning: a language model learns which of two answers to a prompt is the better one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore import Dataset, Datasets, FileRows
from distcore_tasks.causal_lm.models import build_model
from distcore_tasks.preference.dataset import empty_dataset
from distcore_tasks.preference.embedded import EMBEDDED
from distcore_tasks.preference.losses import kto_losses, row_losses
from distcore_tasks.preference.options import PreferenceOptions
from distcore_tasks.preference.prepare import prepare_preferences
from distcore_tasks.preference.unlabeled import unlabeled_preferences
from distcore_tasks.shared.tokenized import TokenizedDatasets, empty_datasets, tokenized

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import FrozenModel, Initial, RunConfig


@dataclass(frozen=True, kw_only=True)
class Preference(PreferenceOptions):
    """Better and worse answers, beside a frozen reference; implements ``distcore.plugin.task.task.Task``.

    Each pair of answers is one item of the mean loss.
    """

    embedded: ClassVar = tuple(EMBEDDED)

    @property
    def whole_batch(self) -> bool:
        """True for kto, which measures the divergence of model and reference over the global batch."""
        return self.loss == "kto"

    @property
    def logs(self) -> tuple[str, ...]:
        """Values of each log line in addition to the loss."""
        return ("accuracy", "margin")

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if it has them.

        Raises DataError, ModelError or ConfigError.
        """
        return prepare_preferences(self, config.seed)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a model with a language modeling head."""
        data = tokenized(data)
        return build_model(self.as_causal(), vocab_size=data.vocab_size, pad=data.pad, end=data.end)

    def frozen(self, config: RunConfig, data: Datasets) -> dict[str, FrozenModel | Initial]:
        """Return the reference: a model of a folder, or the trained model as it began."""
        from distcore import INITIAL, FrozenModel

        if self.reference is None:
            return {"reference": INITIAL}
        options = self.as_causal(self.reference)

        def build(config: RunConfig, data: Datasets) -> nn.Module:
            known = tokenized(data)
            return build_model(options, vocab_size=known.vocab_size, pad=known.pad, end=known.end)

        return {"reference": FrozenModel(build, options.model_folder())}

    def consult(self, frozen: Mapping[str, Callable[..., Any]], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the log likelihood of each answer under the reference."""
        return batch | {"reference": _log_likelihoods(frozen["reference"], batch)}

    def row_loss(self, model: nn.Module, batch: dict[str, Tensor], log: Callable[..., None]) -> Tensor:
        """Return the loss of each row, fp32 ``(n,)``; log how often, and by how much, the better answer is ahead."""
        gains = _log_likelihoods(model, batch) - batch["reference"]
        chosen, rejected = gains.chunk(2)
        margin = self.beta * (chosen - rejected).detach()
        log("accuracy", (margin > 0).sum(), len(margin))
        log("margin", margin.sum(), len(margin))
        return row_losses(self, chosen, rejected, batch["answer"].sum(1))

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return log likelihood ratios of the model to its reference, for kto."""
        chosen, rejected, mismatched = (_log_likelihoods(model, batch) - batch["reference"]).chunk(3)
        return {"chosen": chosen, "rejected": rejected, "mismatched": mismatched.detach()}

    def batch_loss(self, embeddings: dict[str, Tensor], rows: Tensor, log: Callable[..., None]) -> Tensor:
        """Return the mean loss of kto; mismatched answers estimate the divergence of model and reference."""
        chosen, rejected = embeddings["chosen"], embeddings["rejected"]
        margin = self.beta * (chosen - rejected).detach()
        log("accuracy", (margin > 0).sum(), len(margin))
        log("margin", margin.sum(), len(margin))
        return kto_losses(self.beta, chosen, rejected, embeddings["mismatched"].mean().clamp(min=0)).mean()

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return for each row, ``(n,)``: ``chosen`` and ``rejected``, the rewards of both answers.

        A reward is ``beta`` times the log likelihood ratio of the model to its reference. For kto also ``mismatched``,
        else the ``loss``.
        """
        gains = _log_likelihoods(model, batch) - batch["reference"]
        rows = len(batch["rows"])
        chosen, rejected = gains[:rows], gains[rows : 2 * rows]
        rewards = {"chosen": self.beta * chosen, "rejected": self.beta * rejected}
        if self.loss == "kto":
            return rewards | ({"mismatched": self.beta * gains[2 * rows :]} if len(gains) > 2 * rows else {})
        return rewards | {"loss": row_losses(self, chosen, rejected, batch["answer"].sum(1))}

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return ``loss``, ``accuracy``, the share of rows whose better answer has the larger reward, and ``margin``.

        ``margin`` is the mean difference of both rewards. All are ``None`` without rows.
        """
        if not outputs:
            return dict.fromkeys(self.metrics)
        chosen, rejected = outputs["chosen"].double(), outputs["rejected"].double()
        if self.loss == "kto":
            losses = kto_losses(1.0, chosen, rejected, outputs["mismatched"].double().mean().clamp(min=0))
        else:
            losses = outputs["loss"].double()
        margin = chosen - rejected
        accuracy = (margin > 0).double().mean().item()
        return {"loss": losses.mean().item(), "accuracy": accuracy, "margin": margin.mean().item()}

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield ``index``, the rewards of both answers, and ``prefers``, the answer with the larger one."""
        pairs = zip(outputs["chosen"].tolist(), outputs["rejected"].tolist(), strict=True) if outputs else ()
        for index, (chosen, rejected) in enumerate(pairs):
            prefers = "chosen" if chosen > rejected else "rejected"
            yield {"index": index, "chosen_reward": chosen, "rejected_reward": rejected, "prefers": prefers}

    def row_columns(self) -> dict[str, str]:
        """Return the columns of rows to judge: the same three."""
        columns = self.columns
        return {
            "columns.prompt": columns.prompt,
            "columns.chosen": columns.chosen,
            "columns.rejected": columns.rejected,
        }

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return rows to judge. Raises DataError for an invalid one."""
        return unlabeled_preferences(rows, self, tokenized(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write the tokenizer to ``folder``, next to the weights."""
        tokenized(data).save_tokenizer(folder)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, with the tokenizer that ``save`` wrote; ``None`` if there is none."""
        return empty_datasets(TokenizedDatasets, folder, empty_dataset)


def _log_likelihoods(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """Return the logarithm of each answer's likelihood after its prompt, fp32 ``(sequences,)``."""
    from torch.nn.functional import cross_entropy

    tokens, answer = batch["input_ids"], batch["answer"]
    logits = model(input_ids=tokens, attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    losses = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    likelihoods: Tensor = -(losses.view_as(tokens[:, 1:]) * answer[:, 1:]).sum(1)
    return likelihoods
