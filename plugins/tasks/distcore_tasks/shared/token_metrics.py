"""The metrics of a model that predicts tokens, and the baseline that knows only how frequent each token is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from distcore import Direction

if TYPE_CHECKING:
    from torch import Tensor

METRICS: dict[str, Direction] = {"loss": "min", "perplexity": "min", "token_accuracy": "max"}
"""The metrics of ``token_report``, with what is better."""
MOST = 700.0
"""Loss above which the perplexity is that of this one: the next would be no number."""


def token_report(outputs: Mapping[str, Tensor]) -> dict[str, object]:
    """Return ``loss``, the mean over targets, ``perplexity`` and ``token_accuracy``; all are ``None`` without rows.

    ``outputs`` has for each row, shape ``(n,)``: ``loss``, summed over its targets, ``tokens``, their number, and
    ``right``, how many of them the model finds likeliest; where ``loss`` is not the negative log likelihood, that as
    ``surprise``, of which the perplexity is the exponential.
    """
    tokens = int(outputs["tokens"].sum()) if outputs else 0
    if not tokens:
        return dict.fromkeys(METRICS)
    loss, surprise = (
        outputs[name].double().sum().item() / tokens
        for name in ("loss", "surprise" if "surprise" in outputs else "loss")
    )
    right = int(outputs["right"].sum()) / tokens
    return {"loss": loss, "perplexity": math.exp(min(surprise, MOST)), "token_accuracy": right}


def count_each(targets: Iterable[np.ndarray], size: int) -> np.ndarray:
    """Return how often each token is a target, int64 ``(size,)``; ``targets`` are arrays of tokens, block by block."""
    counts = np.zeros(size, np.int64)
    for block in targets:
        counts += np.bincount(block, minlength=size)
    return counts


def log_frequencies(*, counts: np.ndarray) -> np.ndarray:
    """Return the log probability of each token, float64 ``(size,)``, from how often it is a target, plus one."""
    logs: np.ndarray = np.log((counts + 1.0) / (counts + 1.0).sum())
    return logs


def unigram_perplexity(*, counts: np.ndarray, common: np.ndarray) -> float:
    """Return the perplexity of predicting each target by the log probabilities ``common`` alone.

    ``counts``: how often each token is a target.
    """
    return round(math.exp(-float(counts @ common) / int(counts.sum())), 1)
