"""Rows, report, predictions and files of tasks on pairs of answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore import Dataset, Datasets, FileRows
from distcore_tasks.preference.embedded import EMBEDDED
from distcore_tasks.preference.options import PairOptions
from distcore_tasks.preference.rows import PreferenceRows
from distcore_tasks.rows.dataset import empty_rows
from distcore_tasks.rows.prepare import prepare_rows, rows_to_predict
from distcore_tasks.shared.pretrained import check_length
from distcore_tasks.shared.streams.preparing import check_stream
from distcore_tasks.shared.tokenized import TokenizedDatasets, empty_datasets, tokenized

if TYPE_CHECKING:
    from torch import Tensor

    from distcore import RunConfig


@dataclass(frozen=True, kw_only=True)
class PairTask(PairOptions):
    """A task that gives a reward to each of two answers.

    Its outputs are ``chosen``, ``rejected`` and ``loss``.
    """

    embedded: ClassVar = tuple(EMBEDDED)

    @property
    def logs(self) -> tuple[str, ...]:
        """Values of each log line in addition to the loss."""
        return ("accuracy", "margin")

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if it has them.

        Raises DataError, ModelError or ConfigError.
        """
        if not self.from_scratch:
            check_length(self.model, self.model_folder(), self.max_seq_len)
        if self.stream:
            check_stream(self, {})
        return prepare_rows(PreferenceRows(self), config, TokenizedDatasets)

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return ``loss``, ``accuracy`` and ``margin``; all are ``None`` without rows.

        ``accuracy`` is the share of rows whose better answer has the larger reward, ``margin`` the
        mean difference of both rewards.
        """
        if not outputs:
            return dict.fromkeys(self.metrics)
        margin = outputs["chosen"].double() - outputs["rejected"].double()
        return {
            "loss": outputs["loss"].double().mean().item(),
            "accuracy": (margin > 0).double().mean().item(),
            "margin": margin.mean().item(),
        }

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield ``index``, the rewards of both answers, and ``prefers``: which one is larger."""
        if not outputs:
            return
        rewards = zip(outputs["chosen"].tolist(), outputs["rejected"].tolist(), strict=True)
        for index, (chosen, rejected) in enumerate(rewards):
            yield {
                "index": index,
                "chosen_reward": chosen,
                "rejected_reward": rejected,
                "prefers": "chosen" if chosen > rejected else "rejected",
            }

    def row_columns(self) -> dict[str, str]:
        """Return the columns of rows to judge: the same three."""
        return dict(PreferenceRows(self).columns)

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return rows to judge. Raises DataError for an invalid one."""
        pipeline = PreferenceRows(self, is_judged=True)
        return rows_to_predict(pipeline, rows, tokenized(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write the tokenizer to ``folder``, next to the weights."""
        tokenized(data).save_files(folder)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, with the tokenizer of ``save``; ``None`` without it."""
        return empty_datasets(TokenizedDatasets, folder, partial(empty_rows, PreferenceRows(self)))


def several_answers(batch: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Return a context in which all answers of a row have the row's dropout masks."""
    import torch

    from distcore.model import current_masks

    masks = current_masks()
    if masks is None:
        return nullcontext()
    rows = len(batch["rows"])
    answers_per_row = len(batch["input_ids"]) // rows
    numbers = torch.arange(rows, device=batch["rows"].device)
    return masks.some_rows(numbers.repeat(answers_per_row))
