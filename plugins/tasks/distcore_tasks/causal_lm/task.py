"""Causal language modeling: predict each token of documents or answers from those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore import Causal, Dataset, Datasets, FileRows
from distcore.model import current_masks
from distcore_data import read_records
from distcore_tasks.causal_lm.embedded import EMBEDDED
from distcore_tasks.causal_lm.forms import given_column
from distcore_tasks.causal_lm.models import build_model
from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.causal_lm.router import balance, choices
from distcore_tasks.causal_lm.rows import CausalRows, Sequences
from distcore_tasks.causal_lm.sequence_packing import allow_no_mask
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.causal_lm.unlabeled import UnlabeledPrompts, unlabeled_prompts
from distcore_tasks.rows.dataset import empty_rows
from distcore_tasks.rows.prepare import prepare_rows
from distcore_tasks.shared.causal import causal
from distcore_tasks.shared.chunked_cross_entropy.head import Wanted, has_chunked_head
from distcore_tasks.shared.generation.rows import continue_prompts, texts_of
from distcore_tasks.shared.generation.settings import check_settings
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.pretrained import check_length
from distcore_tasks.shared.streams.preparing import check_stream
from distcore_tasks.shared.target_logits import SelectsLogits
from distcore_tasks.shared.token_metrics import token_report
from distcore_tasks.shared.tokenized import GENERATED, TokenizedDatasets, empty_datasets, tokenized

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from distcore import Ragged, RunConfig


@dataclass(frozen=True, kw_only=True)
class CausalLM(SelectsLogits, CausalOptions):
    """The next token of documents and answers, by a transformers model; implements
    ``distcore.plugin.task.task.Task``.

    Each target token is one item of the mean loss.
    """

    laws_hold: ClassVar = True
    embedded: ClassVar = tuple(EMBEDDED)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if it has them.

        Raises DataError, ModelError or ConfigError.
        """
        is_packed = self.packs(config)  # first, so that it is refused before any file is read
        self._check_lengths()
        if self.stream:
            own = "each document is a row of its own already; leave it out"
            check_stream(self, {"split_documents": self.split_documents and own})
        if is_packed:
            allow_no_mask()
        rows = CausalRows(self, is_packed=is_packed)
        data = prepare_rows(rows, config, TokenizedDatasets, dataset=Sequences)
        return self.with_cross_entropy(config, data, self._family)

    def _check_lengths(self) -> None:
        """Raise ModelError or ConfigError for rows or texts that the model cannot have."""
        if not self.from_scratch:
            check_length(self.model, self.model_folder(), self.max_seq_len + self.max_new_tokens)
        if self.max_new_tokens:
            self.check_generation()

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a model with a language modeling head."""
        data = tokenized(data)
        model = build_model(
            self,
            vocab_size=data.vocab_size,
            pad=data.pad,
            end=data.end,
            answer_ends=data.answer_ends,
        )
        return self.with_chunked_head(config, data, self._family, model)

    def check_generation(self) -> None:
        """Raise ModelError or ConfigError for a setting of generation that cannot be honored."""
        folder = None if self.from_scratch else self.model_folder()
        check_settings(self.model, folder, self.generation)

    @property
    def causal(self) -> Causal:
        """No output follows from a later token; the core measures it before the first step."""
        return causal(self)

    @property
    def _family(self) -> str:
        """Type of the built-in model; empty for another one."""
        return SHAPES[self.model].family if self.from_scratch else ""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over the targets of ``batch``: fp32, without
        dimensions.
        """
        if has_chunked_head(model):
            sum_of_losses, _, _ = _run_chunked_head(model, batch, "sum")
            return sum_of_losses.sum()  # without dimensions
        from torch.nn.functional import cross_entropy

        logits, labels, _, _ = _predict(model, batch)
        return cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return loss, number of targets and choices of the router for each row."""
        from torch.nn.functional import cross_entropy

        router = self.router()
        assert router is not None  # else ``whole_batch`` is false
        logits, labels, row, router_logits = _predict(model, batch, output_router_logits=True)
        rows = len(batch["lengths"])
        losses = cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
        is_target = labels != IGNORED
        columns = {"loss": losses, "targets": is_target.float()}
        sums = {}
        for name, value in columns.items():
            sums[name] = value.new_zeros(rows).index_add(0, row, value)
        # Rows that share sequences have no attention mask.
        is_packed = "token_mask" in batch
        mask = batch["token_mask"] if is_packed else batch["attention_mask"]
        row_of_token = batch["row"].flatten()
        return sums | choices(router, router_logits, row_of_token, mask.flatten(), rows)

    def batch_loss(
        self, embeddings: dict[str, Tensor], rows: Tensor, log: Callable[..., None]
    ) -> Tensor:
        """Return the mean loss over the targets of the global batch, with the load-balancing
        loss over its tokens.
        """
        uneven = balance(embeddings)
        log("router", uneven)
        targets = embeddings["targets"].sum().clamp(min=1)
        mean_loss = embeddings["loss"].sum() / targets
        return mean_loss + self.router_weight * uneven

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss``, summed over the targets of each row (fp32), ``tokens`` and ``right``,
        all ``(n,)``.

        ``tokens`` is the number of targets, ``right`` the number predicted correctly, both int64.
        Returns an empty dict for prompts without answers.
        """
        if "labels" not in batch:
            return {}
        losses, is_right, labels, row = _scores(model, batch)
        is_target = labels != IGNORED
        columns = {"loss": losses, "tokens": is_target.long(), "right": is_right.long()}
        rows = len(batch["lengths"])
        sums = {}
        for name, value in columns.items():
            sums[name] = value.new_zeros(rows).index_add_(0, row, value)
        return sums

    def generate(
        self, model: nn.Module, batch: dict[str, Tensor], in_step: bool
    ) -> dict[str, Tensor | Ragged]:
        """Return ``prompt``, the tokens of each prompt, and ``generated``, the new ones without
        the end, as Raggeds.

        A row without a prompt has an empty prompt, and generates nothing. Without prompts in the
        batch, returns an empty dict. If ``max_new_tokens`` is 0, prompts without answers generate
        up to ``GENERATED`` tokens. Tokens are chosen by the model's own generation config and the
        option ``generation``; a row gets those that it would get alone.
        """
        if "prompt_ids" not in batch:
            return {}
        from distcore import Ragged

        prompts, mask = batch["prompt_ids"], batch["prompt_mask"]
        max_tokens = self.max_new_tokens or GENERATED
        generated = continue_prompts(model, prompts, mask, max_tokens, self.generation, in_step)
        prompts_without_padding = Ragged(prompts[mask.bool()], mask.sum(1))
        return {"prompt": prompts_without_padding, "generated": generated}

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return ``loss``, the mean over targets, ``perplexity``, its exponential, and
        ``token_accuracy``.

        ``token_accuracy`` is the share of targets predicted correctly. All are ``None`` without
        rows.
        """
        return token_report(outputs)

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield ``index``, ``tokens`` and mean ``loss`` of each row; with generation also
        ``prompt`` and ``generated``.

        With ``generated`` comes ``completion``, the expected text: the answer, or the document's
        next ``max_new_tokens`` tokens. Prompts without answers have ``prompt`` and ``generated``
        alone.
        """
        data = tokenized(data)
        tokenizer = data.loaded_tokenizer if "generated" in outputs else None
        generated_texts: list[str] = []
        if tokenizer:
            generated_texts = texts_of(tokenizer, outputs["generated"], special=self.special_tokens)
        if isinstance(data.test, UnlabeledPrompts):
            for prompt, text in zip(data.test.texts, generated_texts, strict=True):
                yield {"prompt": prompt, "generated": text}
            return
        tokens_of_rows = outputs["tokens"].tolist() if outputs else []
        for index, tokens in enumerate(tokens_of_rows):
            mean_loss = outputs["loss"][index].item() / tokens if tokens else None
            line: dict[str, object] = {"index": index, "tokens": tokens, "loss": mean_loss}
            if tokenizer is not None and len(outputs["prompt"][index]):
                line["prompt"] = tokenizer.decode(outputs["prompt"][index])
                line["generated"] = generated_texts[index]
                if isinstance(data.test, Sequences):
                    targets = data.test.completion(index)
                    line["completion"] = self._expected_text(tokenizer, targets, data.end)
            yield line

    def _expected_text(self, tokenizer: Any, targets: np.ndarray, end: int | None) -> str:
        """Return the text that a row should have got: the answer, or as much of a
        document as was generated.
        """
        tokens = targets.tolist()
        if end in tokens:
            tokens = tokens[: tokens.index(end)]
        elif tokens and tokens[-1] not in tokenizer.all_special_ids:
            # Without an end these are tokens of a document that goes on, or of an answer that was
            # cut to the longest row.
            tokens = tokens[: self.max_new_tokens]
        return str(tokenizer.decode(tokens, skip_special_tokens=not self.special_tokens))

    def open_rows(self, source: Path, others: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        """Yield the input for generation in each row: a prompt, a text or messages.

        Raises DataError.
        """
        columns = {**given_column(source, self), **others}
        return read_records(source, columns)

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return prompts without answers.

        Raises DataError for one that is invalid, or leaves no room for an answer.
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
        empty = partial(empty_rows, CausalRows(self))
        return empty_datasets(TokenizedDatasets, folder, empty)


def _predict(
    model: nn.Module, batch: dict[str, Tensor], **model_options: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return fp32 logits ``(positions, vocabulary)``, the label and row of each, and the
    router's logits by layer.

    The positions are those of targets if the batch lists them, else all.
    """
    answer = model(**_inputs(batch), **model_options)
    logits = answer.logits.float().flatten(0, 1)
    labels, row = _at_targets(batch)
    # None without a router, or unless asked for.
    router_logits = getattr(answer, "router_logits", None) or ()
    return logits, labels, row, router_logits


def _scores(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss of each position, whether its target is predicted correctly, its
    label and its row.
    """
    if has_chunked_head(model):
        scores, labels, row = _run_chunked_head(model, batch, "rows")
        # Of each position: the loss as trained, the loss without label smoothing, and 1 if right.
        losses = scores[0, :, 0]
        is_right = scores[0, :, 2] > 0
        return losses, is_right, labels, row
    from torch.nn.functional import cross_entropy

    logits, labels, row, _ = _predict(model, batch)
    losses = cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
    is_target = labels != IGNORED
    is_right = is_target & (logits.argmax(-1) == labels)
    return losses, is_right, labels, row


def _run_chunked_head(
    model: nn.Module, batch: dict[str, Tensor], wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chunked head's results for the labels of ``batch``, and label and
    row of each position.
    """
    labels, row = _at_targets(batch)
    answer = model(**_inputs(batch), labels=labels, cross_entropy=wanted)
    results = answer.logits  # in whose place the head returns them
    return results, labels, row


def _inputs(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of the model; tell dropout where the tokens are in their rows."""
    masks = current_masks() if "place" in batch else None
    if masks:
        # Rows share or span sequences here, and dropout masks follow from the row.
        masks.set_places(batch["row"], batch["place"])
    names = ("input_ids", "attention_mask", "position_ids", "targets")
    inputs: dict[str, Any] = {name: batch[name] for name in names if name in batch}
    # With a cache, transformers would not derive the borders of rows from ``position_ids``.
    inputs["use_cache"] = False
    return inputs


def _at_targets(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the label and the row of each position: of targets if the batch lists
    them, else of all.
    """
    labels, row = batch["labels"].flatten(), batch["row"].flatten()
    if "targets" in batch:
        return labels[batch["targets"]], row[batch["targets"]]
    return labels, row
