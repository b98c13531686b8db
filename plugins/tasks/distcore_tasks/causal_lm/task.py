"""Causal language modeling: predict each token of documents or answers from
the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore import Causal, Dataset, Datasets, FileRows
from distcore.model import current_masks
from distcore_data import read_records
from distcore_tasks.causal_lm.dataset import SequenceDataset, empty_dataset
from distcore_tasks.causal_lm.embedded import EMBEDDED
from distcore_tasks.causal_lm.models import build_model
from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.causal_lm.prepare import prepare_rows
from distcore_tasks.causal_lm.router import balance, choices
from distcore_tasks.causal_lm.rows import given_column
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.causal_lm.streamed import StreamedSequences
from distcore_tasks.causal_lm.unlabeled import UnlabeledPrompts, unlabeled_prompts
from distcore_tasks.shared.causal import causal
from distcore_tasks.shared.chunked_cross_entropy.head import Wanted, has_chunked_head
from distcore_tasks.shared.generation.rows import continue_prompts, texts_of
from distcore_tasks.shared.generation.settings import check_settings
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.target_logits import SelectsLogits
from distcore_tasks.shared.token_metrics import token_report
from distcore_tasks.shared.tokenized import GENERATED, TokenizedDatasets, empty_datasets, tokenized

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from distcore import Ragged, RunConfig


@dataclass(frozen=True, kw_only=True)
class CausalLM(SelectsLogits, CausalOptions):
    """The next token of documents and answers, by a transformers
    model; implements ``distcore.plugin.task.task.Task``.

    Each target token is one item of the mean loss.
    """

    laws_hold: ClassVar = True
    embedded: ClassVar = tuple(EMBEDDED)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if it has them.

        Raises DataError, ModelError or ConfigError.
        """
        return self.with_cross_entropy(config, prepare_rows(self, config), self._family)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a model with a language modeling head."""
        data = tokenized(data)
        model = build_model(self, vocab_size=data.vocab_size, pad=data.pad, end=data.end)
        return self.with_chunked_head(config, data, self._family, model)

    def check_generation(self) -> None:
        """Raise ModelError or ConfigError for a setting of generation that cannot be honored."""
        check_settings(
            self.model, None if self.from_scratch else self.model_folder(), self.generation
        )

    @property
    def causal(self) -> Causal:
        """No output follows from a later token; the core measures it before the first step."""
        return causal(self)

    @property
    def _family(self) -> str:
        """Type of the built-in model; empty for another one."""
        return SHAPES[self.model].family if self.from_scratch else ""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over the targets of
        ``batch``: fp32, without dimensions.
        """
        if has_chunked_head(model):
            return _ask(model, batch, "sum")[0].sum()
        from torch.nn.functional import cross_entropy

        logits, labels, _, _ = _predict(model, batch)
        return cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return loss, number of targets and choices of the router for each row."""
        from torch.nn.functional import cross_entropy

        router = self.router()
        assert router is not None  # else ``whole_batch`` is false
        logits, labels, row, layers = _predict(model, batch, output_router_logits=True)
        rows = len(batch["lengths"])
        losses = cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
        columns = {"loss": losses, "targets": (labels != IGNORED).float()}
        sums = {
            name: value.new_zeros(rows).index_add(0, row, value) for name, value in columns.items()
        }
        # of rows that share sequences
        counted = batch["token_mask" if "token_mask" in batch else "attention_mask"]
        return sums | choices(router, layers, batch["row"].flatten(), counted.flatten(), rows)

    def batch_loss(
        self, embeddings: dict[str, Tensor], rows: Tensor, log: Callable[..., None]
    ) -> Tensor:
        """Return the mean loss over the targets of the global batch, with the load-balancing
        loss over its tokens.
        """
        uneven = balance(embeddings)
        log("router", uneven)
        return (
            embeddings["loss"].sum() / embeddings["targets"].sum().clamp(min=1)
            + self.router_weight * uneven
        )

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss``, summed over the targets of each row (fp32), ``tokens``
        and ``right``, all ``(n,)``.

        ``tokens`` is the number of targets, ``right`` the number predicted correctly, both int64.
        Returns an empty dict for prompts without answers.
        """
        if "labels" not in batch:
            return {}
        losses, right, labels, row = _scores(model, batch)
        columns = {"loss": losses, "tokens": (labels != IGNORED).long(), "right": right.long()}
        rows = len(batch["lengths"])
        return {
            name: value.new_zeros(rows).index_add_(0, row, value) for name, value in columns.items()
        }

    def generate(
        self, model: nn.Module, batch: dict[str, Tensor], in_step: bool
    ) -> dict[str, Tensor | Ragged]:
        """Return ``prompt``, the tokens of each prompt, and ``generated``, the new ones without
        the end, as Raggeds.

        A row without a prompt has an empty prompt, and generates nothing. Without prompts in
        the batch, returns an empty dict. If ``max_new_tokens`` is 0, prompts without answers
        generate up to ``GENERATED`` tokens. A row gets
        the tokens that it gets alone: follows the model's own generation config
        and the option ``generation``.
        """
        if "prompt_ids" not in batch:
            return {}
        from distcore import Ragged

        prompts, mask = batch["prompt_ids"], batch["prompt_mask"]
        most = self.max_new_tokens or GENERATED
        generated = continue_prompts(model, prompts, mask, most, self.generation, in_step)
        return {"prompt": Ragged(prompts[mask.bool()], mask.sum(1)), "generated": generated}

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return ``loss``, the mean over targets, ``perplexity``, its
        exponential, and ``token_accuracy``.

        ``token_accuracy`` is the share of targets predicted correctly. All
        are ``None`` without rows.
        """
        return token_report(outputs)

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield ``index``, ``tokens`` and mean ``loss`` of each row; with generation
        also ``prompt`` and ``generated``.

        With ``generated`` comes ``completion``, the expected text: the answer, or the document's
        next ``max_new_tokens`` tokens. Prompts without answers have ``prompt`` and ``generated``
        alone.
        """
        data = tokenized(data)
        tokenizer = data.loaded_tokenizer if "generated" in outputs else None
        written = (
            texts_of(tokenizer, outputs["generated"], special=self.special_tokens)
            if tokenizer
            else []
        )
        if isinstance(data.test, UnlabeledPrompts):
            for prompt, text in zip(data.test.texts, written, strict=True):
                yield {"prompt": prompt, "generated": text}
            return
        for index, tokens in enumerate(outputs["tokens"].tolist() if outputs else []):
            line: dict[str, object] = {
                "index": index,
                "tokens": tokens,
                "loss": outputs["loss"][index].item() / tokens if tokens else None,
            }
            if tokenizer is not None and len(outputs["prompt"][index]):
                line["prompt"] = tokenizer.decode(outputs["prompt"][index])
                line["generated"] = written[index]
                if isinstance(data.test, SequenceDataset | StreamedSequences):
                    line["completion"] = self._expected_text(
                        tokenizer, data.test.completion(index), data.end
                    )
            yield line

    def _expected_text(self, tokenizer: Any, targets: np.ndarray, end: int | None) -> str:
        """Return the text that a row should have got: the answer, or as much of a
        document as was generated.
        """
        tokens = targets.tolist()
        if end in tokens:
            tokens = tokens[: tokens.index(end)]
        elif tokens and tokens[-1] not in tokenizer.all_special_ids:
            # a document goes on, or the answer was cut
            tokens = tokens[: self.max_new_tokens]
        return str(tokenizer.decode(tokens, skip_special_tokens=not self.special_tokens))

    def open_rows(self, source: Path, others: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        """Yield the input for generation in each row: a prompt, a text
        or messages. Raises DataError.
        """
        return read_records(source, {**given_column(source, self), **others})

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return prompts without answers. Raises DataError for one that is invalid, or leaves no
        room for an answer.
        """
        self.check_generation()
        return unlabeled_prompts(rows, self, tokenized(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write the tokenizer's files to ``folder``, next to the weights."""
        tokenized(data).save_files(folder)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, with the tokenizer that ``save`` wrote;
        ``None`` if there is none.
        """
        return empty_datasets(TokenizedDatasets, folder, empty_dataset)


def _predict(
    model: nn.Module, batch: dict[str, Tensor], **asked: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return fp32 logits ``(positions, vocabulary)``, the label and row of each, and the
    router's logits by layer.

    The positions are those of targets if the batch lists them, else all.
    """
    answer = model(**_inputs(batch), **asked)
    labels, row = _at_targets(batch)
    return (
        answer.logits.float().flatten(0, 1),
        labels,
        row,
        getattr(answer, "router_logits", None) or (),
    )


def _scores(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss of each position, whether its target is predicted correctly, its
    label and its row.
    """
    if has_chunked_head(model):
        scores, labels, row = _ask(model, batch, "rows")
        return scores[0, :, 0], scores[0, :, 2] > 0, labels, row
    from torch.nn.functional import cross_entropy

    logits, labels, row, _ = _predict(model, batch)
    losses = cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
    return losses, (labels != IGNORED) & (logits.argmax(-1) == labels), labels, row


def _ask(
    model: nn.Module, batch: dict[str, Tensor], wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chunked head's results for the labels of ``batch``, and label and
    row of each position.
    """
    labels, row = _at_targets(batch)
    return model(**_inputs(batch), labels=labels, cross_entropy=wanted).logits, labels, row


def _inputs(batch: dict[str, Tensor]) -> dict[str, Any]:
    if "place" in batch and (masks := current_masks()):
        # rows share sequences: dropout masks follow from the row
        masks.set_places(batch["row"], batch["place"])
    names = ("input_ids", "attention_mask", "position_ids", "targets")
    # With a cache, transformers would not derive the borders of rows from ``position_ids``.
    return {name: batch[name] for name in names if name in batch} | {"use_cache": False}


def _at_targets(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the label and the row of each position: of targets if the batch lists
    them, else of all.
    """
    labels, row = batch["labels"].flatten(), batch["row"].flatten()
    if "targets" in batch:
        return labels[batch["targets"]], row[batch["targets"]]
    return labels, row
