"""Masked language modeling: predict masked tokens from the tokens on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore import Datasets
from distcore_tasks.masked_lm.embedded import EMBEDDED
from distcore_tasks.masked_lm.models import build_model
from distcore_tasks.masked_lm.options import MaskedOptions
from distcore_tasks.masked_lm.rows import MaskedRows
from distcore_tasks.rows.dataset import empty_rows
from distcore_tasks.rows.prepare import prepare_rows
from distcore_tasks.shared.bert import check_encoder
from distcore_tasks.shared.chunked_cross_entropy.head import Wanted, has_chunked_head
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.pretrained import set_length
from distcore_tasks.shared.streams.preparing import check_stream
from distcore_tasks.shared.target_logits import SelectsLogits, logits_of_tokens
from distcore_tasks.shared.token_metrics import token_report
from distcore_tasks.shared.tokenized import TokenizedDatasets, empty_datasets, tokenized

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import RunConfig


@dataclass(frozen=True, kw_only=True)
class MaskedLM(SelectsLogits, MaskedOptions):
    """Hidden tokens of texts, by a transformers model; implements
    ``distcore.plugin.task.task.Task``.

    Each masked token is one item of the mean loss.
    """

    laws_hold: ClassVar = True
    embedded: ClassVar = tuple(EMBEDDED)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if it has them.

        Raises DataError, ModelError or ConfigError.
        """
        check_encoder(self, self.max_seq_len, "MASKED_LM", "does not find masked tokens")
        if self.stream:
            own = (
                "a text is one row, which is cut to max_seq_len: --set"
                " task_options.split_texts=false"
            )
            check_stream(self, {"split_texts": self.split_texts and own})
        data = prepare_rows(MaskedRows(self, config.seed), config, TokenizedDatasets)
        return self.with_cross_entropy(config, data, self.built_in_type)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a model with a head that predicts tokens."""
        data = tokenized(data)
        model = build_model(self, vocab_size=data.vocab_size, pad=data.pad)
        return self.with_chunked_head(config, data, self.built_in_type, model)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over masked tokens: fp32, without dimensions."""
        from torch.nn.functional import cross_entropy

        if has_chunked_head(model):
            return _ask(model, batch, "sum").sum()
        return cross_entropy(*_predict_hidden(model, batch), reduction="sum")

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss``, summed over the masked tokens of each row (fp32), ``tokens``
        and ``right``, all ``(n,)``.

        ``tokens`` is the number of masked tokens, ``right`` the number
        predicted correctly, both int64.
        """
        losses, right = _scores(model, batch)
        row = (batch["labels"] != IGNORED).nonzero()[:, 0]
        columns = {"loss": losses, "tokens": row.new_ones(len(row)), "right": right.long()}
        rows = len(batch["labels"])
        return {
            name: value.new_zeros(rows).index_add_(0, row, value) for name, value in columns.items()
        }

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return ``loss``, the mean over masked tokens, ``perplexity``,
        its exponential, and ``token_accuracy``.

        ``token_accuracy`` is the share of masked tokens predicted correctly. All
        are ``None`` without rows.
        """
        return token_report(outputs)

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield ``index``, ``tokens`` (masked), ``right`` (predicted correctly) and mean
        ``loss`` of each row.
        """
        for index, tokens in enumerate(outputs["tokens"].tolist() if outputs else []):
            loss = outputs["loss"][index].item() / tokens if tokens else None
            yield {
                "index": index,
                "tokens": tokens,
                "right": int(outputs["right"][index]),
                "loss": loss,
            }

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write the tokenizer to ``folder``, next to the weights. It
        truncates texts to ``max_seq_len``.
        """
        tokenized(data).save_files(folder)
        set_length(folder, self.max_seq_len)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, with the tokenizer that ``save`` wrote;
        ``None`` if there is none.
        """
        rows = MaskedRows(self, config.seed)
        return empty_datasets(TokenizedDatasets, folder, partial(empty_rows, rows))


def _scores(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of each masked token, and whether it is predicted correctly, both
    ``(tokens,)``, row by row.
    """
    if has_chunked_head(model):
        scores, wanted = _ask(model, batch, "rows")[0], batch["labels"] != IGNORED
        if "targets" not in batch:  # then there is a score for each position, or for each token
            positions = len(scores) == wanted.numel()
            scores = scores[
                wanted.flatten() if positions else wanted[batch["attention_mask"].bool()]
            ]
        return scores[:, 0], scores[:, 2] > 0
    from torch.nn.functional import cross_entropy

    logits, labels = _predict_hidden(model, batch)
    return cross_entropy(logits, labels, reduction="none"), logits.argmax(-1) == labels


def _ask(model: nn.Module, batch: dict[str, Tensor], wanted: Wanted) -> Tensor:
    """Return the chunked head's results for the labels of ``batch``."""
    inputs = {
        name: batch[name] for name in ("input_ids", "attention_mask", "targets") if name in batch
    }
    labels = batch["labels"]
    if "targets" in batch:
        labels = labels[labels != IGNORED]
    answer: Tensor = model(**inputs, labels=labels, cross_entropy=wanted).logits
    return answer


def _predict_hidden(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits at masked tokens, fp32 ``(tokens, vocabulary)``,
    and these tokens, ``(tokens,)``.
    """
    labels, mask = batch["labels"], batch["attention_mask"]
    wanted = labels != IGNORED
    targets = {"targets": batch["targets"]} if "targets" in batch else {}
    logits = model(input_ids=batch["input_ids"], attention_mask=mask, **targets).logits
    selected = logits[0] if targets else logits_of_tokens(logits, mask)[wanted[mask.bool()]]
    return selected.float(), labels[wanted]
