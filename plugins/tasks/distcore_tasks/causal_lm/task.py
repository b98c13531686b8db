"""Causal language modelling: each token is predicted from those before it, in documents or in answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore import Dataset, Datasets, FileRows
from distcore.data import read_records
from distcore_tasks.causal_lm.dataset import no_sequences
from distcore_tasks.causal_lm.embedded import EMBEDDED
from distcore_tasks.causal_lm.models import build_model
from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.causal_lm.prepare import prepare_rows
from distcore_tasks.causal_lm.rows import given_column
from distcore_tasks.causal_lm.unlabeled import UnlabeledPrompts, unlabeled_prompts
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.target_logits import SelectsLogits
from distcore_tasks.shared.token_metrics import token_report
from distcore_tasks.shared.tokenized import GENERATED, TokenizedDatasets, tokenized, without_rows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import Ragged, RunConfig


@dataclass(frozen=True, kw_only=True)
class CausalLM(SelectsLogits, CausalOptions):
    """The next token of documents and answers, by a transformers model; implements ``distcore.plugin.task.task.Task``.

    An item of the mean loss is a token that is predicted.
    """

    embedded: ClassVar = tuple(EMBEDDED)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if they were prepared before.

        Raises DataError, ModelError or ConfigError.
        """
        return prepare_rows(self, config)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a model with a language-modelling head."""
        data = tokenized(data)
        return build_model(self, vocab_size=data.vocab_size, pad=data.pad, end=data.end)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over the targets of ``batch``: fp32, without dimensions."""
        from torch.nn.functional import cross_entropy

        logits, labels, _ = _predict(model, batch)
        return cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return for each row, shape ``(n,)``: ``loss``, summed over its targets (fp32), ``tokens`` and ``right``.

        ``tokens`` is the number of targets, ``right`` of those that the model finds likeliest, both int64. Nothing of
        prompts without answers.
        """
        if "labels" not in batch:
            return {}
        from torch.nn.functional import cross_entropy

        logits, labels, row = _predict(model, batch)
        losses = cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
        counted = labels != IGNORED
        right = counted & (logits.argmax(-1) == labels)
        columns = {"loss": losses, "tokens": counted.long(), "right": right.long()}
        rows = len(batch["lengths"])
        return {name: value.new_zeros(rows).index_add_(0, row, value) for name, value in columns.items()}

    def generate(self, model: nn.Module, batch: dict[str, Tensor], in_step: bool) -> dict[str, Tensor | Ragged]:
        """Return what each row's prompt was, a Ragged, and ``generated``, int64 ``(n, max_new_tokens)``, both tokens.

        Rows without a prompt generate nothing: their prompt has no tokens.
        Nothing if ``max_new_tokens`` is 0, which for prompts without answers becomes ``GENERATED``. After the end of an
        answer ``generated`` is padded.
        """
        if "prompt_ids" not in batch:
            return {}
        from distcore import Ragged

        prompts, mask = batch["prompt_ids"], batch["prompt_mask"]
        caller: Any = model
        pad = int(caller.config.pad_token_id)  # build_model has set it
        length = self.max_new_tokens or GENERATED

        def go_on(given: Tensor, given_mask: Tensor, tokens: int) -> Tensor:
            made: Tensor = caller.generate(
                given,
                attention_mask=given_mask,
                max_new_tokens=tokens,
                do_sample=False,
                synced_gpus=in_step,
                pad_token_id=pad,
            )
            return made[:, given.shape[1] :]

        generated, sampled = prompts.new_full((len(prompts), length), pad), mask.any(1)
        if sampled.any():
            made = go_on(prompts[sampled], mask[sampled], length)
            generated[sampled, : made.shape[1]] = made
        elif in_step:  # other ranks may have a prompt, and need this one's part of the weights to go on from it
            one = prompts.new_full((1, 1), pad)
            go_on(one, one.new_ones(1, 1), 1)
        return {"prompt": Ragged(prompts[mask.bool()], mask.sum(1)), "generated": generated}

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return ``loss``, the mean over targets, ``perplexity``, its exponential, and ``token_accuracy``.

        ``token_accuracy`` is the share of targets that the model finds likeliest. All are ``None`` without rows.
        """
        return token_report(outputs)

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield ``index``, ``tokens`` and mean ``loss`` of each row, ``prompt`` and ``generated`` if it generates.

        Of prompts without answers, the latter two alone.
        """
        data = tokenized(data)
        tokenizer = data.loaded_tokenizer if "generated" in outputs else None
        if tokenizer is not None and isinstance(data.test, UnlabeledPrompts):
            for prompt, generated in zip(data.test.texts, outputs["generated"], strict=True):
                yield {"prompt": prompt, "generated": tokenizer.decode(_answer(generated, data.end))}
            return
        for index, tokens in enumerate(outputs["tokens"].tolist() if outputs else []):
            line: dict[str, object] = {
                "index": index,
                "tokens": tokens,
                "loss": outputs["loss"][index].item() / tokens if tokens else None,
            }
            if tokenizer is not None and len(outputs["prompt"][index]):
                line["prompt"] = tokenizer.decode(outputs["prompt"][index])
                line["generated"] = tokenizer.decode(_answer(outputs["generated"][index], data.end))
            yield line

    def open_rows(self, source: Path, others: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        """Yield what the model goes on from in each row: a prompt, a text or messages; raises DataError."""
        return read_records(source, {**given_column(source, self), **others})

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return prompts without answers; raises DataError for one that cannot be used, or leaves no room to go on."""
        return unlabeled_prompts(rows, self, tokenized(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write to ``folder`` what the model needs in addition to its weights: the tokenizer's files."""
        tokenized(data).save_tokenizer(folder)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, with the tokenizer that ``save`` wrote; ``None`` if it did not."""
        return without_rows(TokenizedDatasets, folder, no_sequences)


def _predict(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits in fp32, ``(places, vocabulary)``, with the label and the row of each place, ``(places,)``.

    The places are those of all rows, or of targets where the batch says where they are.
    """
    names = ("input_ids", "attention_mask", "position_ids", "targets")
    # With a cache, transformers would not look in ``position_ids`` for where rows begin.
    answer = model(**{name: batch[name] for name in names if name in batch}, use_cache=False)
    labels, row = batch["labels"].flatten(), batch["row"].flatten()
    if "targets" in batch:
        labels, row = labels[batch["targets"]], row[batch["targets"]]
    return answer.logits.float().flatten(0, 1), labels, row


def _answer(tokens: Tensor, end: int | None) -> list[int]:
    """Return the tokens before the one that ends the answer."""
    answer: list[int] = tokens.tolist()
    return answer[: answer.index(end)] if end in answer else answer
