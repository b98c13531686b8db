"""Metrics of token prediction, and the baseline of token frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from distcore import Direction

if TYPE_CHECKING:
    from torch import Tensor

METRICS: dict[str, Direction] = {"loss": "min", "perplexity": "min", "token_accuracy": "max"}
"""Metrics of ``token_report``, with the better direction."""
MOST = 700.0
"""Upper bound of the loss in the perplexity, whose exponential would overflow."""


def token_report(outputs: Mapping[str, Tensor]) -> dict[str, object]:
    """Return ``loss``, the mean over targets, ``perplexity`` and ``token_accuracy``.

    All are ``None`` without rows. ``outputs`` has for each row, shape ``(n,)``: ``loss``, summed
    over its targets, ``tokens``, the number of targets, and ``right``, the number predicted
    correctly. If ``loss`` is not the negative log likelihood, ``surprise`` is. The perplexity is
    the exponential of the mean negative log likelihood.
    """
    tokens = int(outputs["tokens"].sum()) if outputs else 0
    if not tokens:
        return dict.fromkeys(METRICS)
    log_likelihoods = outputs.get("surprise", outputs["loss"])
    surprise = log_likelihoods.double().sum().item() / tokens
    return {
        "loss": outputs["loss"].double().sum().item() / tokens,
        "perplexity": math.exp(min(surprise, MOST)),
        "token_accuracy": int(outputs["right"].sum()) / tokens,
    }


def count_each(targets: Iterable[np.ndarray], size: int) -> np.ndarray:
    """Return the count of each token in ``targets``, arrays of tokens: int64 ``(size,)``."""
    counts = np.zeros(size, np.int64)
    for block in targets:
        counts += np.bincount(block, minlength=size)
    return counts


def log_frequencies(*, counts: np.ndarray) -> np.ndarray:
    """Return the log probability of each token, float64 ``(size,)``, from its count plus one."""
    smoothed = counts + 1.0
    logs: np.ndarray = np.log(smoothed / smoothed.sum())
    return logs


def unigram_perplexity(*, counts: np.ndarray, common: np.ndarray) -> float:
    """Return the perplexity of predicting targets by the log probabilities ``common``.

    ``counts``: count of each token among the targets.
    """
    mean_log_probability = float(counts @ common) / int(counts.sum())
    return round(math.exp(-mean_log_probability), 1)
