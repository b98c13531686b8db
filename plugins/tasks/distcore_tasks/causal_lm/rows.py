"""Read and check rows of the three forms: documents, prompts with completions, conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from distcore import DataError
from distcore_data import Record, Source, check_source, describe_value, read_records, skipping, source_name
from distcore_tasks.causal_lm.options import CausalOptions, Columns, Form
from distcore_tasks.causal_lm.vocabulary import ROLES
from distcore_tasks.shared import source_rows as shared_rows
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.source_rows import Rows, stream_rows
from distcore_tasks.shared.sources import text_problem

COLUMNS: dict[Form, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompts": ("prompt", "completion"),
    "documents": ("text",),
}
"""The columns of each form, in the order of detection."""

GIVEN: dict[Form, tuple[str, ...]] = {form: columns[:1] for form, columns in COLUMNS.items()}
"""The column of each form with the input for generation."""


@dataclass(frozen=True)
class TextRows(Rows[Any]):
    """Rows in file order. The value of each is a text, a pair (prompt, completion), or a list of messages."""

    form: Form
    """Form of every row."""


def texts_of(values: Iterable[Any]) -> Iterator[str]:
    """Yield all texts in the values of rows, to train a vocabulary."""
    for value in values:
        if isinstance(value, str):
            yield value
        else:
            yield from (part if isinstance(part, str) else part["content"] for part in value)


def read_rows(source: Source, options: CausalOptions) -> TextRows:
    """Read a data file or split. Raises DataError with the row, counted from 1, its problem and the remedy."""
    check_source(source)
    form = _detect_form(source, options) if options.form == "auto" else options.form
    schema = schema_of(form, options.columns)
    most = options.skip_bad_rows
    rows = stream_rows(source, schema, most) if options.stream else shared_rows.read_rows(source, schema)
    return TextRows(rows.name, rows.values, form)


def schema_of(form: Form, columns: Columns) -> Schema[Any]:
    """Return what is read of a row."""
    return Schema(_column_names(COLUMNS[form], columns), partial(_problem, form), partial(_value, form))


def given_column(source: Source, options: CausalOptions) -> dict[str, str]:
    """Return the column with the input for generation, by the option that names it. Raises DataError."""
    check_source(source)
    form = _detect_form(source, options, GIVEN) if options.form == "auto" else options.form
    return _column_names(GIVEN[form], options.columns)


def check_rows(name: str, form: Form, records: Iterable[tuple[object, ...]]) -> TextRows:
    """Return checked records. Raises DataError with a message that starts with ``name``."""
    return TextRows(name, list(shared_rows.checked(name, records, schema_of(form, Columns()))), form)


def _value(form: Form, record: Record) -> Any:
    return record if form == "prompts" else _without_nulls(record[0]) if form == "messages" else record[0]


def _without_nulls(messages: Any) -> list[dict[str, object]]:
    """Drop keys with null values: in Parquet and Arrow every message has the keys of all messages."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _column_names(wanted: tuple[str, ...], columns: Columns) -> dict[str, str]:
    names = asdict(columns)
    return {f"columns.{column}": names[column] for column in wanted}


def _detect_form(source: Source, options: CausalOptions, forms: dict[Form, tuple[str, ...]] = COLUMNS) -> Form:
    """Return the first form whose columns are in the source's first rows. Raises DataError if there is none."""
    columns = options.columns
    for form, wanted in forms.items():
        first = _first_row(source, _column_names(wanted, columns), options.skip_bad_rows)
        if first is None or (forms is GIVEN and form == "messages" and all(isinstance(given, str) for given in first)):
            continue  # a row that is a bare string fits every form: take it as a prompt
        return form
    known = ", ".join(
        f"{' and '.join(_column_names(wanted, columns).values())} ({form})" for form, wanted in forms.items()
    )
    raise DataError(f"{source_name(source)}: has none of the columns {known}; name yours with --set columns.text=NAME")


def _first_row(source: Source, columns: dict[str, str], most_bad_rows: int) -> Record | None:
    """Return the first row that can be read; ``None`` if it or one before lacks a column. Raises DataError for others.

    The rows that are passed over count elsewhere.
    """
    with skipping(most_bad_rows) as bad:
        try:
            first = next(iter(read_records(source, columns)), ())
        except DataError as error:
            bad.problems[str(error)] = None
            first = None
    if any("no column" in problem or "expected [" in problem for problem in bad.problems):
        return None
    if first is None:  # the source is unreadable
        raise DataError([*bad.problems][-1])
    return first


def _problem(form: Form, record: tuple[object, ...]) -> str | None:
    if form == "messages":
        return _conversation_problem(record[0])
    names = COLUMNS[form]
    return next(filter(None, map(text_problem, record, names)), None)


def _conversation_problem(messages: object) -> str | None:
    if problem := messages_problem(messages):
        return problem
    if isinstance(messages, list) and not any(message["role"] == "assistant" for message in messages):
        return "no message is the assistant's, so there is nothing to learn: add its answer or remove the row"
    return None


def messages_problem(messages: object) -> str | None:
    """Return the problem of a conversation, with or without an answer; ``None`` if it has none."""
    if not isinstance(messages, list):
        return f'messages is {describe_value(messages)}, expected a list of {{"role": …, "content": …}}'
    if not messages:
        return "messages is empty: fill it in or remove the row"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f"message {number} is {describe_value(message)}, expected an object with role and content"
        if message["role"] not in ROLES:
            return f"message {number} has the role {message['role']!r}, expected one of {', '.join(ROLES)}"
        if problem := text_problem(message["content"], f"the content of message {number}"):
            return problem
    return None
