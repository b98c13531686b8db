"""Sequence to sequence: a model reads a source text, and writes a target text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore import Dataset, Datasets, FileRows
from distcore_tasks.rows.dataset import RowsToPredict, empty_rows
from distcore_tasks.rows.prepare import prepare_rows, rows_to_predict
from distcore_tasks.seq2seq.embedded import EMBEDDED
from distcore_tasks.seq2seq.languages import is_multilingual, special_tokens_of
from distcore_tasks.seq2seq.models import build_model, check_capacity, check_model
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.seq2seq.rows import PairRows
from distcore_tasks.seq2seq.scores import check_scores, scores
from distcore_tasks.shared.chunked_cross_entropy.head import Wanted, has_chunked_head
from distcore_tasks.shared.generation.rows import answer_sources, texts_of
from distcore_tasks.shared.generation.settings import check_settings
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.pretrained import check_length, set_length
from distcore_tasks.shared.streams.preparing import check_stream
from distcore_tasks.shared.token_metrics import token_report
from distcore_tasks.shared.tokenized import GENERATED, TokenizedDatasets, empty_datasets, tokenized

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import Ragged, RunConfig


@dataclass(frozen=True, kw_only=True)
class Seq2Seq(Seq2SeqOptions):
    """A target for each source, by an encoder and a decoder;
    implements ``distcore.plugin.task.task.Task``.

    Each target token is one item of the mean loss.
    """

    laws_hold: ClassVar = True
    embedded: ClassVar = tuple(EMBEDDED)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if it has them.

        Raises DataError, ModelError or ConfigError.
        """
        if self.max_new_tokens:
            check_scores()
            self._check_generation()
        check_model(self)
        if self.stream:
            check_stream(self, {})
        check_capacity(self, config.global_batch_size)
        data = prepare_rows(PairRows(self), config, TokenizedDatasets)
        return self.with_cross_entropy(config, data, self.built_in_type)

    def _check_generation(self) -> None:
        """Raise ConfigError for settings of generation that the model cannot have."""
        folder = None if self.from_scratch else self.model_folder()
        check_settings(self.model, folder, self.generation)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return an encoder-decoder with a language modeling head."""
        data = tokenized(data)
        model = build_model(
            self, vocab_size=data.vocab_size, pad=data.pad, end=data.end, tokenizer=data.tokenizer
        )
        return self.with_chunked_head(config, data, self.built_in_type, model, self.label_smoothing)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy, smoothed, summed over the target tokens of
        ``batch``: fp32, without dimensions.
        """
        if has_chunked_head(model):
            return _run_chunked_head(model, batch, "sum").sum()
        return _cross_entropy(
            self._logits(model, batch), batch["labels"], "sum", self.label_smoothing
        )

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor | Ragged]:
        """Return ``loss``, summed over the target of each row (fp32), ``tokens``
        and ``right``, all ``(n,)``.

        ``tokens`` is the length of the target, ``right`` the number of tokens predicted correctly,
        both int64. With label smoothing, ``surprise`` is the loss without smoothing. Evaluation
        rows also have their texts, ``source`` and ``target``, as bytes. Returns an empty dict for
        rows without targets.
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

    def _logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits in fp32, shape ``(n, longest target, vocabulary)``."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        if (pad := self.own_decoder_padding) is not None:
            inputs["decoder_input_ids"] = wrap_labels(batch["labels"], pad)
        # The model shifts the labels into decoder inputs. It also computes a mean loss, which
        # is not used.
        logits: Tensor = model(**inputs, use_cache=False).logits
        return logits.float()

    def _scores(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss``, ``surprise``, ``tokens`` and ``right`` of each row, ``(n,)``."""
        labels = batch["labels"]
        is_target = labels != IGNORED
        if has_chunked_head(model):
            scores = _run_chunked_head(model, batch, "rows").view(*labels.shape, 3)
            loss, surprise, is_right = scores.unbind(-1)
        else:
            logits = self._logits(model, batch)
            loss = _cross_entropy(logits, labels, "none", self.label_smoothing).view_as(labels)
            surprise = loss
            if self.label_smoothing:
                # A smoothed loss is never near zero, and no perplexity follows from it.
                surprise = _cross_entropy(logits, labels, "none", 0.0).view_as(labels)
            is_right = is_target & (logits.argmax(-1) == labels)
        return {
            "loss": loss.sum(1),
            "surprise": surprise.sum(1),
            "tokens": is_target.sum(1),
            "right": (is_right > 0).sum(1),
        }

    def generate(
        self, model: nn.Module, batch: dict[str, Tensor], in_step: bool
    ) -> dict[str, Tensor | Ragged]:
        """Return ``generated``, the new tokens of each row without the end, as a Ragged; nothing if
        none are asked for.

        Rows without targets get ``GENERATED`` tokens where ``max_new_tokens`` is 0. A row gets the
        tokens that it gets
        alone: follows the model's own generation config, except for sampling,
        and the option ``generation``.
        """
        most = self.max_new_tokens or (0 if "labels" in batch else GENERATED)
        if not most:
            return {}
        sources, mask = batch["input_ids"], batch["attention_mask"]
        return {"generated": answer_sources(model, sources, mask, most, self.generation, in_step)}

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return ``loss``, the mean over target tokens, ``perplexity`` and ``token_accuracy``.

        ``loss`` is smoothed as in training, ``perplexity`` is the exponential of the loss without
        smoothing. With generation there are also ``exact_match``, ``bleu`` and ``chrf``. All are
        ``None`` without rows.
        """
        metrics = token_report(outputs)
        if self.max_new_tokens:
            generated: list[str] = []
            targets: list[str] = []
            if outputs:
                generated = self._written(outputs, data)
                targets = _texts(outputs["target"])
            metrics |= scores(generated, targets)
        return metrics

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield ``index``, ``source``, ``target``, mean ``loss`` and, with generation,
        ``generated`` of each row.

        Without targets, yields only ``source`` and ``generated``.
        """
        if isinstance(data.test, RowsToPredict):
            written = self._written(outputs, data)
            for (source,), generated in zip(data.test.values, written, strict=True):
                yield {"source": source, "generated": generated}
            return
        if not outputs:
            return
        columns = {"source": _texts(outputs["source"]), "target": _texts(outputs["target"])}
        if "generated" in outputs:
            columns["generated"] = self._written(outputs, data)
        means = (outputs["loss"].double() / outputs["tokens"]).tolist()
        for index, loss in enumerate(means):
            texts_of_row = {name: texts[index] for name, texts in columns.items()}
            yield {"index": index, **texts_of_row, "loss": loss}

    def _written(self, outputs: dict[str, Any], data: Datasets) -> list[str]:
        """Return the generated text of each row."""
        tokenizer = tokenized(data).loaded_tokenizer
        # M2M100's tokenizer in transformers 5 takes its languages for words.
        around = special_tokens_of(tokenizer, targets=True) if is_multilingual(tokenizer) else ()
        return texts_of(tokenizer, outputs["generated"], special=self.special_tokens, also=around)

    def row_columns(self) -> dict[str, str]:
        """Return the only column of rows without targets, the source."""
        return {"columns.source": self.columns.source}

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return sources, which are tokenized batch by batch. Raises DataError for an invalid one.

        Raises ConfigError for more new tokens than the model has positions.
        """
        if not self.from_scratch:
            check_length(
                self.model, self.model_folder(), self.max_new_tokens or GENERATED, "max_new_tokens"
            )
        self._check_generation()
        return rows_to_predict(PairRows(self, has_targets=False), rows, tokenized(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write the tokenizer to ``folder``, next to the weights. It truncates as in training."""
        tokenized(data).save_files(folder)
        set_length(folder, self.max_seq_len)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, with the tokenizer that ``save`` wrote;
        ``None`` if there is none.
        """
        return empty_datasets(TokenizedDatasets, folder, partial(empty_rows, PairRows(self)))


def _run_chunked_head(model: nn.Module, batch: dict[str, Tensor], wanted: Wanted) -> Tensor:
    """Return the chunked head's results for the labels of ``batch``."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    results: Tensor = model(**inputs, cross_entropy=wanted, use_cache=False).logits
    return results


def _cross_entropy(logits: Tensor, labels: Tensor, reduction: str, smoothing: float) -> Tensor:
    """Return the loss of all positions, ``(n * length,)`` or without dimensions if summed."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(
        logits.flatten(0, 1),
        labels.flatten(),
        reduction=reduction,
        ignore_index=IGNORED,
        label_smoothing=smoothing,
    )


def _texts(column: Ragged) -> list[str]:
    """Return the texts of a column of UTF-8 bytes."""
    return [text.numpy().tobytes().decode() for text in column]


def wrap_labels(labels: Tensor, pad: int) -> Tensor:
    """Return the decoder's inputs: labels one position later, the last token of each first.

    mBART's last token is the language, by which its decoder begins.
    """
    is_target = labels != IGNORED
    tokens = labels.masked_fill(~is_target, pad)
    last_position = is_target.sum(1, keepdim=True) - 1
    # Clamped: a row without targets has no last token.
    last_token = tokens.gather(1, last_position.clamp(min=0))
    shifted: Tensor = last_token.new_empty(tokens.shape)
    shifted[:, :1] = last_token
    shifted[:, 1:] = tokens[:, :-1]
    return shifted
