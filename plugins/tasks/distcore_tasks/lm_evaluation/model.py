"""The model of a run for lm-eval: likelihoods and texts, by the task's scores and generation."""

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
from distcore_tasks.causal_lm.models import positions
from distcore_tasks.causal_lm.rows import CausalRows, sequence_table
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.causal_lm.unlabeled import UnlabeledPrompts
from distcore_tasks.causal_lm.windows import COUNTED
from distcore_tasks.preference.task import Preference
from distcore_tasks.rows.dataset import row_dataset
from distcore_tasks.rows.pipeline import TokenizerInfo
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
        # Rows of lm-eval have no answers that a reference model would be asked about.
        self._run = dataclasses.replace(run, consult=None)
        self._task = bound
        self._data = data
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
        """The largest number of tokens that the model reads."""
        return positions(self._task) or self._task.max_seq_len

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text; ``None``: special ones as the tokenizer adds them."""
        options = {}
        if add_special_tokens is not None:
            options["add_special_tokens"] = add_special_tokens
        elif string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            # A text from a chat template begins so already, and would have that token twice.
            options["add_special_tokens"] = False
        tokens: list[int] = self.tokenizer.encode(string, **options)
        return tokens

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        rows = []
        for _, context, continuation in requests:
            # One more than the model reads: the last token is a target alone.
            tokens = (context + continuation)[-(self.max_length + 1) :]
            rows.append((tokens, len(continuation)))
        if not rows:
            return []
        # A row is one window, however long, and no text is generated for it.
        task = dataclasses.replace(self._task, max_seq_len=self.max_length, max_new_tokens=0)
        scored = scored_rows(rows, CausalRows(task), self._data.pad)
        outputs = self._collect(self._task, scored)
        log_likelihoods = (-outputs["loss"]).tolist()
        is_greedy = (outputs["right"] == outputs["tokens"]).tolist()
        return list(zip(log_likelihoods, is_greedy, strict=True))

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of whole texts, cut into windows that the model can read."""
        windows = []
        text_of_window = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            overlapping = get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, context_len=1
            )
            for window in overlapping:
                context, continuation = make_disjoint_window(window)
                windows.append((None, context, continuation))
                text_of_window.append(number)
        totals = [0.0] * len(requests)
        # All windows at once, so that ranks share them evenly.
        scores = self._loglikelihood_tokens(windows)
        for number, (log_likelihood, _) in zip(text_of_window, scores, strict=True):
            totals[number] += log_likelihood
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each prompt, up to the first of its stop texts.

        Raises ConfigError for sampling, and for answers that leave no room for a prompt.
        """
        # The number of new tokens is an option of the task: rows with one number go together.
        groups: dict[int, list[_Prompt]] = {}
        for number, request in enumerate(requests):
            context, options = request.args
            settings = normalize_gen_kwargs(dict(options), MOST_NEW)
            if settings.get("do_sample") or settings.get("temperature"):
                raise ConfigError(
                    "extension lm_eval: a task draws its answers; the strategy generates greedily"
                )
            new_tokens = int(settings["max_gen_toks"])
            if new_tokens >= self.max_length:
                raise ConfigError(
                    f"extension lm_eval: {new_tokens} new tokens leave no room in {self.max_length}"
                    " positions"
                )
            end = self.tokenizer.decode(self.eot_token_id)
            stop_texts = handle_stop_sequences(settings.get("until"), eos=end)
            # The end of a long prompt, which has the question.
            tokens = self.tok_encode(context)[-(self.max_length - new_tokens) :]
            groups.setdefault(new_tokens, []).append(_Prompt(number, tokens, stop_texts))
        answers: dict[int, str] = {}
        # In one order on all ranks, as each group is a collective evaluation.
        for new_tokens, group in sorted(groups.items()):
            rows = _unlabeled_prompts([prompt.tokens for prompt in group], self._data.pad)
            task = dataclasses.replace(self._task, max_new_tokens=new_tokens)
            outputs = self._collect(task, rows, labeled=False)
            texts = texts_of(self.tokenizer, outputs["generated"], special=False)
            for prompt, text in zip(group, texts, strict=True):
                answers[prompt.number] = postprocess_generated_text(text, prompt.stop_texts, None)
        return [answers[number] for number in range(len(requests))]

    def _collect(self, task: Task, rows: Dataset, labeled: bool = True) -> dict[str, Any]:
        """Evaluate rows once over all ranks; return outputs in their order."""
        evaluate = BoundTask.wrap(task).evaluation.of_run(self._run, labeled=labeled)
        return dict(collect(self._run, self.hooks, rows, evaluate).outputs)


def task_manager(folder: Path | None) -> Any:
    """Return lm-eval's tasks, and those of a folder."""
    return TaskManager(include_path=None if folder is None else str(folder.absolute()))


def scored_rows(rows: Sequence[tuple[list[int], int]], pipeline: CausalRows, pad: int) -> Dataset:
    """Return a dataset of ``rows``: tokens, and how many of the last ones are scored."""
    tokens_of_rows = []
    flags_of_rows = []
    for tokens, scored in rows:
        is_scored = np.arange(len(tokens)) >= len(tokens) - scored
        tokens_of_rows.append(np.asarray(tokens, np.int32))
        flags_of_rows.append(is_scored.astype(np.uint8) * np.uint8(COUNTED))
    return row_dataset(pipeline, sequence_table(tokens_of_rows, flags_of_rows), TokenizerInfo(pad))


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """One request for a text."""

    number: int
    """Its position among the requests."""
    tokens: list[int]
    """The tokens of the prompt."""
    stop_texts: list[str]
    """Texts at the first of which the answer ends."""


def _unlabeled_prompts(tokens_of_rows: Sequence[list[int]], pad: int) -> UnlabeledPrompts:
    """Return a dataset of prompts, one item each, whose texts nobody reads."""
    count = len(tokens_of_rows)
    return UnlabeledPrompts(
        texts=[""] * count,
        tokens=[np.asarray(tokens, np.int64) for tokens in tokens_of_rows],
        pad=pad,
        lengths=np.asarray([len(tokens) for tokens in tokens_of_rows], np.int64),
        items=ConstantColumn(count, 1),
    )
