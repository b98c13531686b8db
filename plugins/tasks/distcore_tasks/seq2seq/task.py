"""Sequence to sequence: a model reads a source text, and writes a target text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore import Dataset, Datasets, FileRows, silence_transformers
from distcore_tasks.seq2seq.dataset import empty_dataset
from distcore_tasks.seq2seq.embedded import EMBEDDED
from distcore_tasks.seq2seq.models import build_model
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.seq2seq.prepare import prepare_pairs
from distcore_tasks.seq2seq.scores import scores
from distcore_tasks.seq2seq.unlabeled import UnlabeledSources, unlabeled_sources
from distcore_tasks.shared.chunked_cross_entropy.head import Wanted, has_chunked_head
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.pretrained import check_length, set_length
from distcore_tasks.shared.token_metrics import token_report
from distcore_tasks.shared.tokenized import GENERATED, TokenizedDatasets, empty_datasets, tokenized

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import Ragged, RunConfig


@dataclass(frozen=True, kw_only=True)
class Seq2Seq(Seq2SeqOptions):
    """A target for each source, by an encoder and a decoder; implements ``distcore.plugin.task.task.Task``.

    Each target token is one item of the mean loss.
    """

    laws_hold: ClassVar = True
    embedded: ClassVar = tuple(EMBEDDED)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if it has them.

        Raises DataError, ModelError or ConfigError.
        """
        return self.with_cross_entropy(config, prepare_pairs(self, config), self.built_in_type)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return an encoder-decoder with a language modeling head."""
        data = tokenized(data)
        model = build_model(self, vocab_size=data.vocab_size, pad=data.pad, end=data.end)
        return self.with_chunked_head(config, data, self.built_in_type, model, self.label_smoothing)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy, smoothed, summed over the target tokens of ``batch``: fp32, without dimensions."""
        if has_chunked_head(model):
            return _ask(model, batch, "sum").sum()
        return _cross_entropy(_logits(model, batch), batch["labels"], "sum", self.label_smoothing)

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor | Ragged]:
        """Return ``loss``, summed over the target of each row (fp32), ``tokens`` and ``right``, all ``(n,)``.

        ``tokens`` is the length of the target, ``right`` the number of tokens predicted correctly, both int64. With
        label smoothing, ``surprise`` is the loss without smoothing. Evaluation rows also have their texts, ``source``
        and ``target``, as bytes. Returns an empty dict for rows without targets.
        """
        if "labels" not in batch:
            return {}
        from distcore import Ragged

        outputs: dict[str, Tensor | Ragged] = dict(self._scores(model, batch))
        if not self.label_smoothing:
            del outputs["surprise"]
        for name in ("source", "target"):
            if f"{name}_text" in batch:
                outputs[name] = Ragged(batch[f"{name}_text"], batch[f"{name}_bytes"])
        return outputs

    def _scores(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss``, ``surprise``, ``tokens`` and ``right`` of each row, as ``outputs`` does."""
        labels = batch["labels"]
        counted = labels != IGNORED
        if has_chunked_head(model):
            loss, surprise, right = _ask(model, batch, "rows").view(*labels.shape, 3).unbind(-1)
        else:
            logits = _logits(model, batch)
            loss = _cross_entropy(logits, labels, "none", self.label_smoothing).view_as(labels)
            surprise = _cross_entropy(logits, labels, "none", 0.0).view_as(labels) if self.label_smoothing else loss
            right = counted & (logits.argmax(-1) == labels)
        sums = {"loss": loss.sum(1), "surprise": surprise.sum(1)}
        return sums | {"tokens": counted.sum(1), "right": (right > 0).sum(1)}

    def generate(self, model: nn.Module, batch: dict[str, Tensor], in_step: bool) -> dict[str, Tensor]:
        """Return ``generated``, int64 ``(n, max_new_tokens)``, padded after the end; an empty dict if that is 0.

        Rows without targets get ``GENERATED`` tokens instead of 0. Follows the model's own generation config, except
        for sampling.
        """
        length = self.max_new_tokens or (0 if "labels" in batch else GENERATED)
        if not length:
            return {}
        from transformers.modeling_outputs import BaseModelOutput

        caller: Any = model
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        # Runs the encoder by a call of the whole model: generate() would call the encoder alone, whose weights may be
        # sharded. The decoder gets any token, because its result is not used.
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
        made = sequences[:, 1:]  # without the start token
        generated = made.new_full((len(made), length), caller.config.pad_token_id)
        generated[:, : made.shape[1]] = made
        return {"generated": generated}

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return ``loss``, the mean over target tokens, ``perplexity`` and ``token_accuracy``.

        ``loss`` is smoothed as in training, ``perplexity`` is the exponential of the loss without smoothing. With
        generation there are also ``exact_match``, ``bleu`` and ``chrf``. All are ``None`` without rows.
        """
        metrics = token_report(outputs)
        if self.max_new_tokens:
            written, targets = (_written(outputs, data), _texts(outputs["target"])) if outputs else ([], [])
            metrics |= scores(written, targets)
        return metrics

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield ``index``, ``source``, ``target``, mean ``loss`` and, with generation, ``generated`` of each row.

        Without targets, yields only ``source`` and ``generated``.
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
        """Return the only column of rows without targets, the source."""
        return {"columns.source": self.columns.source}

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return sources, which are tokenized batch by batch. Raises DataError for an invalid one.

        Raises ConfigError for more new tokens than the model has positions.
        """
        if not self.from_scratch:
            check_length(self.model, self.model_folder(), self.max_new_tokens or GENERATED, "max_new_tokens")
        return unlabeled_sources(rows, self, tokenized(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write the tokenizer to ``folder``, next to the weights. It truncates as in training."""
        tokenized(data).save_files(folder)
        set_length(folder, self.max_seq_len)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, with the tokenizer that ``save`` wrote; ``None`` if there is none."""
        return empty_datasets(TokenizedDatasets, folder, empty_dataset)


def _ask(model: nn.Module, batch: dict[str, Tensor], wanted: Wanted) -> Tensor:
    """Return the chunked head's results for the labels of ``batch``."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    answer: Tensor = model(**inputs, cross_entropy=wanted, use_cache=False).logits
    return answer


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits in fp32, shape ``(n, longest target, vocabulary)``."""
    names = ("input_ids", "attention_mask", "labels")
    # The model shifts the labels into decoder inputs. It also computes a mean loss, which is not used.
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
    """Return the generated text of each row."""
    data = tokenized(data)
    tokenizer = data.loaded_tokenizer
    rows = outputs["generated"].tolist()
    ended = [row[: row.index(data.end)] if data.end in row else row for row in rows]
    return [tokenizer.decode(row, skip_special_tokens=True) for row in ended]
