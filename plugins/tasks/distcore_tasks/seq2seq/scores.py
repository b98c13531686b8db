"""Scores of generated texts against their targets: exact match, and BLEU and chrF
as sacrebleu computes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from distcore import ConfigError
from distcore.registry import is_installed

NAMES = ("exact_match", "bleu", "chrf")
"""The metrics of ``scores``."""


def check_scores() -> None:
    """Raise ConfigError if sacrebleu is not installed, without importing it."""
    if not is_installed("sacrebleu"):
        raise ConfigError(
            "task_options.max_new_tokens: scoring needs the package sacrebleu, which is not"
            " installed. Install it with: pip install sacrebleu"
        )


def scores(written: Sequence[str], targets: Sequence[str]) -> dict[str, object]:
    """Return ``exact_match``, from 0 to 1, ``bleu`` and ``chrf``, from 0 to 100, over all
    rows; ``None`` without rows.

    An exact match ignores leading and trailing spaces. BLEU is computed over the corpus, with up to
    4 words in a row and sacrebleu's tokenizer 13a. chrF is the F2 score of character n-grams up to
    6.
    """
    if not targets:
        return dict.fromkeys(NAMES)
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    exact = 0
    for text, target in zip(written, targets, strict=True):
        exact += text.strip() == target.strip()
    hypotheses = list(written)
    # One reference for each.
    references = [list(targets)]
    return {
        "exact_match": exact / len(targets),
        "bleu": BLEU().corpus_score(hypotheses, references).score,
        "chrf": CHRF().corpus_score(hypotheses, references).score,
    }
