"""The model of a run as lm-eval asks for it: likelihoods and texts, by the task's
own scores and generation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from distcore import ConfigError, ConstantColumn, Dataset, Datasets, Run, Task
from distcore.lab import BoundTask, Hooks, collect, strategies
from distcore_tasks.causal_lm.dataset import COUNTED, Arrays, SequenceDataset
from distcore_tasks.causal_lm.models import positions
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.causal_lm.unlabeled import UnlabeledPrompts
from distcore_tasks.preference.task import Preference
from distcore_tasks.shared.generation.rows import texts_of
from distcore_tasks.shared.tokenized import TokenizedDatasets

MOST_NEW = 256
"""Tokens that are generated unless a task of lm-eval says how many, as lm-eval's own models do."""


class RunModel(TemplateLM):  # type: ignore[misc]
    """Answers on every rank alike: rows are shared out by the strategy, and outputs gathered.

    To lm-eval each rank is alone, so all of them ask for the same rows in the same order.
    """

    def __init__(self, run: Run, task: Task, data: Datasets) -> None:
        """Take a run that trains a language model; raises ConfigError for another one."""
        super().__init__()
        bound = BoundTask.wrap(task).task
        if isinstance(bound, Preference):
            bound = CausalLM(**vars(bound.as_causal()))
        if not isinstance(bound, CausalLM) or not isinstance(data, TokenizedDatasets):
            raise ConfigError(
                "extension lm_eval: measures causal-lm and preference, not task"
                f" {run.config.task!r}"
            )
        bound.check_generation()
        strategy = strategies.load_strategy(run.config)
        # rows of lm-eval have nothing to ask a reference
        self._run = dataclasses.replace(run, consult=None)
        self._task, self._data = bound, data
        self.hooks = Hooks(strategy.name, strategy.plugin)
        self.tokenizer = data.loaded_tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def max_length(self) -> int:
        """Most tokens that the model reads."""
        return positions(self._task) or self._task.max_seq_len

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text, with special ones as the tokenizer adds
        them, unless told otherwise.
        """
        begins = string.startswith(self.tokenizer.decode(self.prefix_token_id))
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and begins:
            special = {"add_special_tokens": False}
        tokens: list[int] = self.tokenizer.encode(string, **special)
        return tokens

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        rows = [
            ((context + wanted)[-(self.max_length + 1) :], len(wanted))
            for _, context, wanted in requests
        ]
        if not rows:
            return []
        outputs = self._collect(self._task, scored_rows(rows, self._data.pad))
        greedy = outputs["right"] == outputs["tokens"]
        return list(zip((-outputs["loss"]).tolist(), greedy.tolist(), strict=True))

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of whole texts, each cut into windows that
        the model can read.
        """
        windows = [
            (number, make_disjoint_window(window))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]),
                self.prefix_token_id,
                self.max_length,
                context_len=1,
            )
        ]
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens([(None, *window) for _, window in windows])
        for (number, _), (score, _) in zip(windows, scores, strict=True):
            totals[number] += score
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each prompt, up to the first of its
        stop texts; raises ConfigError.
        """
        made: dict[int, str] = {}
        by_length: dict[int, list[tuple[int, list[int], list[str]]]] = {}
        for number, (context, given) in enumerate(request.args for request in requests):
            wanted = normalize_gen_kwargs(dict(given), MOST_NEW)
            if wanted.get("do_sample") or wanted.get("temperature"):
                raise ConfigError(
                    "extension lm_eval: a task draws its answers; the strategy generates greedily"
                )
            most = int(wanted["max_gen_toks"])
            if most >= self.max_length:
                raise ConfigError(
                    f"extension lm_eval: {most} new tokens leave no room in {self.max_length}"
                    " positions"
                )
            until = handle_stop_sequences(
                wanted.get("until"), eos=self.tokenizer.decode(self.eot_token_id)
            )
            prompt = self.tok_encode(context)[-(self.max_length - most) :]
            by_length.setdefault(most, []).append((number, prompt, until))
        for most, group in sorted(by_length.items()):
            prompts = _prompts([prompt for _, prompt, _ in group], self._data.pad)
            task = dataclasses.replace(self._task, max_new_tokens=most)
            outputs = self._collect(task, prompts, labeled=False)
            texts = texts_of(self.tokenizer, outputs["generated"], special=False)
            for (number, _, until), text in zip(group, texts, strict=True):
                made[number] = postprocess_generated_text(text, until, None)
        return [made[number] for number in range(len(requests))]

    def _collect(self, task: Task, rows: Dataset, labeled: bool = True) -> dict[str, Any]:
        """Evaluate rows once over all ranks; return outputs in their order."""
        evaluate = BoundTask.wrap(task).evaluation.of_run(self._run, labeled=labeled)
        return dict(collect(self._run, self.hooks, rows, evaluate).outputs)


def task_manager(folder: Path | None) -> Any:
    """Return lm-eval's tasks, and those of a folder."""
    return TaskManager(include_path=None if folder is None else str(folder.absolute()))


def scored_rows(rows: Sequence[tuple[list[int], int]], pad: int) -> SequenceDataset:
    """Return rows of tokens, the last of which are scored; each with the number of those."""
    lengths = np.asarray([len(tokens) for tokens, _ in rows], np.int64)
    flags = [np.arange(len(tokens)) >= len(tokens) - scored for tokens, scored in rows]
    arrays = Arrays(
        tokens=np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in rows]),
        flags=np.concatenate(flags).astype(np.uint8) * COUNTED,
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths - 1,  # the last token is a target alone
    )
    return SequenceDataset(arrays=arrays, items=arrays.items(), pad=pad, prompts=0, content="")


def _prompts(tokens: Sequence[list[int]], pad: int) -> UnlabeledPrompts:
    lengths = np.asarray([len(row) for row in tokens], np.int64)
    given = [np.asarray(row, np.int64) for row in tokens]
    ones = ConstantColumn(len(given), 1)
    return UnlabeledPrompts(
        texts=[""] * len(given), tokens=given, pad=pad, lengths=lengths, items=ones
    )
