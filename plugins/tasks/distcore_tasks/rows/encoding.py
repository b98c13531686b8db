"""Encode values by a pipeline, and say of which row what it does is wrong."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcore import DataError, DistcoreError, TaskError
from distcore_data import Record
from distcore_tasks.rows.own_code import own_classes
from distcore_tasks.rows.pipeline import Encoded, Refuse, RowPipeline, TokenizerInfo
from distcore_tasks.shared.schema import Schema


class EncodeError(TaskError):
    """What is wrong with ``encode`` of a pipeline."""

    place: int | None = None
    """The place of the value for which it is; ``None`` if it is of several values together."""


@dataclass(frozen=True)
class Encoder:
    """``RowPipeline.encode`` with a tokenizer, whose answer is checked."""

    pipeline: RowPipeline[Any]
    """What the task says of its rows."""
    tokenizer: Any
    """The tokenizer."""
    info: TokenizerInfo
    """What is known of it."""

    def __call__(self, values: Sequence[Any], refuse: Refuse) -> Encoded:
        """Return the rows of some values. Raises EncodeError, or what ``refuse`` raises."""
        try:
            return self._encoded(values, refuse)
        except EncodeError as error:
            raise self._of_one_value(values) or error from None

    def _encoded(self, values: Sequence[Any], refuse: Refuse) -> Encoded:
        name = f"{type(self.pipeline).__name__}.encode"
        try:
            encoded = self.pipeline.encode(self.tokenizer, self.info, values, refuse)
        except DistcoreError:
            raise
        except Exception as error:  # of a user's code, which may raise anything
            raise EncodeError(f"{name} {_raised(error, type(self.pipeline))}") from error
        if not isinstance(encoded, Encoded):
            answer = type(encoded).__name__
            raise EncodeError(f"{name} returned {answer}, expected Encoded.from_columns(…)")
        size = len(self.tokenizer) if own_classes(type(self.pipeline)) else None
        if problem := encoded.problem(self.pipeline, len(values), size):
            raise EncodeError(f"{name}: {problem}")
        return encoded

    def _of_one_value(self, values: Sequence[Any]) -> EncodeError | None:
        """Return the error of the first value that has one alone."""
        for place, value in enumerate(values):
            try:
                self._encoded([value], lambda place, what: None)
            except EncodeError as error:
                error.place = place
                return error
            except DistcoreError:  # refused as the values of a chunk are
                continue
        return None


@contextmanager
def naming_row(problem: Callable[[int, str], DataError]) -> Iterator[None]:
    """Turn an EncodeError of one value into that of its row, which ``problem`` returns."""
    try:
        yield
    except EncodeError as error:
        if error.place is None:
            raise
        raise problem(error.place, str(error)) from error.__cause__


def schema_of(pipeline: RowPipeline[Any]) -> Schema[Any]:
    """Return what is read of a row. What a user's ``check`` and ``value`` raise is its problem."""
    if not own_classes(type(pipeline)):
        return Schema(pipeline.columns, pipeline.checker(), pipeline.value)
    return Schema(pipeline.columns, _GuardedCheck(pipeline, pipeline.checker()), pipeline.value)


@dataclass(frozen=True)
class _GuardedCheck:
    """``check`` of a pipeline that a user wrote."""

    pipeline: RowPipeline[Any]
    check: Callable[[Record], str | None]

    def __call__(self, record: Record) -> str | None:
        """Return what is wrong with a record."""
        name, step = type(self.pipeline).__name__, "check"
        try:
            problem = self.check(record)
            if problem is None:
                step = "value"
                self.pipeline.value(record)
        except DistcoreError:
            raise
        except Exception as error:
            return f"{name}.{step} {_raised(error, type(self.pipeline))}"
        if problem is not None and not isinstance(problem, str):
            answer = type(problem).__name__
            return f"{name}.check returned {answer}, expected a text, or None for a row to use"
        return problem


def check_pipeline(pipeline: object, workers: int) -> None:
    """Raise TaskError for what is no pipeline, or cannot be sent to loader processes."""
    name = type(pipeline).__name__
    if not isinstance(pipeline, RowPipeline):
        raise TaskError(f"rows() of the task returned {name}, expected a RowPipeline")
    if not workers or not own_classes(type(pipeline)):
        return
    try:
        pickle.dumps(pipeline)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise TaskError(
            f"{name} cannot be sent to loader processes: {reason}; keep what cannot be pickled out"
            " of its fields, or set loader.workers=0"
        ) from None


def _raised(error: Exception, cls: type) -> str:
    """Return what was raised, and the line of the user's file where."""
    reason = next(iter(str(error).splitlines()), "")
    frames = traceback.extract_tb(error.__traceback__)
    files = {Path(frame.filename).resolve(): frame for frame in frames}
    own = [frame for file, frame in files.items() if f"{Path('distcore_tasks')}" not in file.parts]
    last = next((frame for frame in reversed(own) if "site-packages" not in frame.filename), None)
    at = f" ({Path(last.filename).name}:{last.lineno})" if last else ""
    return f"raised {type(error).__name__}: {reason}{at}"
