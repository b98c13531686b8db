"""What distcore raises. A message says what is wrong, where, with which value, and what to do next, in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DistcoreError(Exception):
    """Base of everything that distcore raises on purpose; ``exit_code`` is the process's exit status."""

    exit_code = 2


class ConfigError(DistcoreError):
    """A configuration value that cannot work, found before any rank starts."""


class DataError(DistcoreError):
    """A data file that cannot be used; the message names the file and, where there is one, the row."""


class ModelError(DistcoreError):
    """A model or tokenizer that cannot be loaded or built."""


class StrategyError(DistcoreError):
    """A strategy or extension that is missing, broken, blocked or breaks its contract."""


class CheckpointError(DistcoreError):
    """A checkpoint that is missing, damaged or belongs to another job."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is not what was written; the message names the file."""


class AgreementError(DistcoreError):
    """Ranks that must agree do not; the message names the ranks (law 8)."""

    exit_code = 3


class TrainingError(DistcoreError):
    """Training itself went wrong: a loss or a gradient that is not finite."""

    exit_code = 3


class StoppedError(DistcoreError):
    """SIGTERM ended the run, all ranks at the same step, after a committed checkpoint."""

    exit_code = 143


class RankError(DistcoreError):
    """A rank failed; ``str()`` names the rank, the cause and the file with its traceback."""

    exit_code = 3


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known word closest to ``word``, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""
