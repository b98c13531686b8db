"""The exceptions of distcore. A message is one line: what is wrong, where, with which value, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DistcoreError(Exception):
    """Base class of every error that distcore raises on purpose."""

    exit_code = 2
    """Exit status of a process that ends with this error."""


class ConfigError(DistcoreError):
    """A configuration value that cannot work; found before any rank starts."""


class DataError(DistcoreError):
    """A data file that cannot be used; the message names the file and, where there is one, the row."""


class ModelError(DistcoreError):
    """A model or tokenizer that cannot be loaded or built."""


class SkeletonError(ModelError):
    """A model that cannot be built on the meta device, without storage, but can be built whole."""


class TaskError(DistcoreError):
    """A task that breaks its contract; the message names the method and what it returned."""


class StrategyError(DistcoreError):
    """A strategy or extension that is missing, blocked, does not import, or breaks the contract of a hook."""


class CheckpointError(DistcoreError):
    """A checkpoint that is missing, damaged or belongs to another job."""


class DamagedError(CheckpointError):
    """A file of a checkpoint differs from what was written; the message names the file."""


class AgreementError(DistcoreError):
    """Ranks differ in a value on which they must agree (law 8); the message names the ranks."""

    exit_code = 3


class TrainingError(DistcoreError):
    """Training cannot continue: a loss or a gradient is not finite."""

    exit_code = 3


class StoppedError(DistcoreError):
    """SIGTERM ended the run: all ranks stopped at the same step and committed a checkpoint."""

    exit_code = 143


class RankError(DistcoreError):
    """A rank failed; ``str()`` names the rank, the cause and the file with its traceback."""

    exit_code = 3


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known word closest to ``word``, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""
