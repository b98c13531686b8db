"""Sequence to sequence: a model reads a text, its source, and writes another, the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore import Dataset, Datasets, FileRows, silence_transformers
from distcore_tasks.seq2seq.dataset import no_pairs
from distcore_tasks.seq2seq.embedded import EMBEDDED
from distcore_tasks.seq2seq.models import build_model
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.seq2seq.prepare import prepare_pairs
from distcore_tasks.seq2seq.scores import scores
from distcore_tasks.seq2seq.unlabeled import UnlabeledSources, unlabeled_sources
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.pretrained import check_length, set_length
from distcore_tasks.shared.token_metrics import token_report
from distcore_tasks.shared.tokenized import GENERATED, TokenizedDatasets, tokenized, without_rows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import Ragged, RunConfig


@dataclass(frozen=True, kw_only=True)
class Seq2Seq(Seq2SeqOptions):
    """A target for each source, by an encoder and a decoder; implements ``distcore.plugin.task.task.Task``.

    An item of the mean loss is a token of a target.
    """

    embedded: ClassVar = tuple(EMBEDDED)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if they were prepared before.

        Raises DataError, ModelError or ConfigError.
        """
        return prepare_pairs(self, config.seed)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return an encoder and a decoder with a language-modelling head."""
        data = tokenized(data)
        return build_model(self, vocab_size=data.vocab_size, pad=data.pad, end=data.end)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy, smoothed, summed over the target tokens of ``batch``: fp32, without dimensions."""
        return _cross_entropy(_logits(model, batch), batch["labels"], "sum", self.label_smoothing)

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor | Ragged]:
        """Return for each row, shape ``(n,)``: ``loss``, summed over its target (fp32), ``tokens`` and ``right``.

        ``tokens`` is the length of the target, ``right`` how many of its tokens the model finds likeliest, both int64.
        With label smoothing ``surprise`` is the same as ``loss`` without it. ``source`` and ``target`` are the texts of
        a row for evaluation, as bytes. Nothing of rows without targets.
        """
        if "labels" not in batch:
            return {}
        from distcore import Ragged

        logits, labels = _logits(model, batch), batch["labels"]
        counted = labels != IGNORED
        outputs: dict[str, Tensor | Ragged] = {
            "loss": _cross_entropy(logits, labels, "none", self.label_smoothing).view_as(labels).sum(1),
            "tokens": counted.sum(1),
            "right": (counted & (logits.argmax(-1).view_as(labels) == labels)).sum(1),
        }
        if self.label_smoothing:
            outputs["surprise"] = _cross_entropy(logits, labels, "none", 0.0).view_as(labels).sum(1)
        for name in ("source", "target"):
            if f"{name}_text" in batch:
                outputs[name] = Ragged(batch[f"{name}_text"], batch[f"{name}_bytes"])
        return outputs

    def generate(self, model: nn.Module, batch: dict[str, Tensor], in_step: bool) -> dict[str, Tensor]:
        """Return ``generated``, int64 ``(n, max_new_tokens)``, padded behind its end; nothing if that is 0.

        For rows without targets 0 becomes ``GENERATED``. The model's own generation config says how, sampling aside.
        """
        length = self.max_new_tokens or (0 if "labels" in batch else GENERATED)
        if not length:
            return {}
        from transformers.modeling_outputs import BaseModelOutput

        caller: Any = model
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        # The encoder by a call of the whole model: generate() would call it alone, which sharded weights do not allow.
        # Any token will do for the decoder, whose answer nobody reads.
        any_token = batch["input_ids"].new_zeros(len(batch["input_ids"]), 1)
        read = caller(**inputs, decoder_input_ids=any_token, use_cache=False).encoder_last_hidden_state
        with silence_transformers():
            sequences = caller.generate(
                encoder_outputs=BaseModelOutput(last_hidden_state=read),
                attention_mask=batch["attention_mask"],
                max_new_tokens=length,
                do_sample=False,
                synced_gpus=in_step,
            )
        made = sequences[:, 1:]  # behind the token that every answer begins with
        generated = made.new_full((len(made), length), caller.config.pad_token_id)
        generated[:, : made.shape[1]] = made
        return {"generated": generated}

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return ``loss``, the mean over target tokens, ``perplexity`` and ``token_accuracy``.

        ``loss`` is smoothed as in training, ``perplexity`` the exponential of the loss without that. Where the model
        writes, also ``exact_match`` and ``chrf``. All are ``None`` without rows.
        """
        metrics = token_report(outputs)
        if self.max_new_tokens:
            written, targets = (_written(outputs, data), _texts(outputs["target"])) if outputs else ([], [])
            metrics |= scores(written, targets)
        return metrics

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield ``index``, ``source``, ``target`` and mean ``loss`` of each row, and what was ``generated`` for it.

        Without targets ``source`` and ``generated`` alone.
        """
        if isinstance(data.test, UnlabeledSources):
            for source, generated in zip(data.test.sources, _written(outputs, data), strict=True):
                yield {"source": source, "generated": generated}
            return
        if not outputs:
            return
        columns = {"source": _texts(outputs["source"]), "target": _texts(outputs["target"])}
        if "generated" in outputs:
            columns["generated"] = _written(outputs, data)
        means = (outputs["loss"].double() / outputs["tokens"]).tolist()
        for index, loss in enumerate(means):
            yield {"index": index, **{name: texts[index] for name, texts in columns.items()}, "loss": loss}

    def row_columns(self) -> dict[str, str]:
        """Return the column of rows without targets: the source."""
        return {"columns.source": self.columns.source}

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return sources that are tokenized when they are read; raises DataError for one that cannot be used.

        Raises ConfigError for more new tokens than the model has positions for.
        """
        if not self.from_scratch:
            check_length(self.model, self.model_folder(), self.max_new_tokens or GENERATED, "max_new_tokens")
        return unlabeled_sources(rows, self, tokenized(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write to ``folder`` what the model needs beside its weights: the tokenizer, which cuts as training did."""
        tokenized(data).save_tokenizer(folder)
        set_length(folder, self.max_seq_len)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, with the tokenizer that ``save`` wrote; ``None`` if it did not."""
        return without_rows(TokenizedDatasets, folder, no_pairs)


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits in fp32, shape ``(n, longest target, vocabulary)``."""
    names = ("input_ids", "attention_mask", "labels")
    # Given the labels, the model shifts them as it was trained, and computes a mean loss that nobody asks for.
    logits: Tensor = model(**{name: batch[name] for name in names}, use_cache=False).logits
    return logits.float()


def _cross_entropy(logits: Tensor, labels: Tensor, reduction: str, smoothing: float) -> Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction=reduction, ignore_index=IGNORED, label_smoothing=smoothing
    )


def _texts(column: Ragged) -> list[str]:
    return [text.numpy().tobytes().decode() for text in column]


def _written(outputs: dict[str, Any], data: Datasets) -> list[str]:
    """Return what the model wrote for each row."""
    data = tokenized(data)
    tokenizer = data.loaded_tokenizer
    rows = outputs["generated"].tolist()
    ended = [row[: row.index(data.end)] if data.end in row else row for row in rows]
    return [tokenizer.decode(row, skip_special_tokens=True) for row in ended]
