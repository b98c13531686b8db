"""What a model that predicts tokens is measured by, and the baseline that knows only how frequent each token is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from distcore.plugin.task import Direction

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


def log_frequencies(targets: np.ndarray, size: int) -> np.ndarray:
    """Return the log probability of each token, float64 ``(size,)``, from how often it is a target, plus one."""
    counts = np.bincount(targets, minlength=size) + 1.0
    found: np.ndarray = np.log(counts / counts.sum())
    return found


def unigram_perplexity(targets: np.ndarray, common: np.ndarray) -> float:
    """Return the perplexity of predicting each target by the log probabilities ``common`` alone."""
    return round(math.exp(-common[targets].mean()), 1)
