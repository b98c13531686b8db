"""Read and check rows of the three forms: documents, prompts with completions, conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from distcore import DataError
from distcore_data import Source, check_source, describe_value, read_records, row_error, source_name
from distcore_tasks.causal_lm.options import CausalOptions, Columns, Form
from distcore_tasks.causal_lm.vocabulary import ROLES
from distcore_tasks.shared.lazy_rows import Values, read_values
from distcore_tasks.shared.sources import text_problem

COLUMNS: dict[Form, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompts": ("prompt", "completion"),
    "documents": ("text",),
}
"""The columns of each form, in the order of detection."""

GIVEN: dict[Form, tuple[str, ...]] = {form: columns[:1] for form, columns in COLUMNS.items()}
"""The column of each form with the input for generation."""


@dataclass(frozen=True, slots=True)
class TextRows:
    """Rows in file order."""

    name: str
    """Name of these rows in error messages, such as ``data file chats.jsonl``."""
    form: Form
    """Form of every row."""
    values: Values[Any]
    """For each row a text, a pair (prompt, completion), or a list of messages."""

    def __len__(self) -> int:
        return len(self.values)


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
    name = source_name(source)
    form = _detect_form(source, options.columns) if options.form == "auto" else options.form
    asked = _column_names(COLUMNS[form], options.columns)
    return _require_rows(
        TextRows(name, form, read_values(source, lambda: _checked(name, form, read_records(source, asked))))
    )


def given_column(source: Source, options: CausalOptions) -> dict[str, str]:
    """Return the column with the input for generation, by the option that names it. Raises DataError."""
    check_source(source)
    form = _detect_form(source, options.columns, GIVEN) if options.form == "auto" else options.form
    return _column_names(GIVEN[form], options.columns)


def check_rows(name: str, form: Form, records: Iterable[tuple[object, ...]]) -> TextRows:
    """Return checked records. Raises DataError with a message that starts with ``name``."""
    return _require_rows(TextRows(name, form, list(_checked(name, form, records))))


def _require_rows(rows: TextRows) -> TextRows:
    if not len(rows):
        raise DataError(f"{rows.name}: holds no rows")
    return rows


def _checked(name: str, form: Form, records: Iterable[tuple[object, ...]]) -> Iterator[Any]:
    for number, record in enumerate(records, 1):
        if problem := _problem(form, record):
            raise row_error(name, number, problem)
        yield record if form == "prompts" else _without_nulls(record[0]) if form == "messages" else record[0]


def _without_nulls(messages: Any) -> list[dict[str, object]]:
    """Drop keys with null values: in Parquet and Arrow every message has the keys of all messages."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _column_names(wanted: tuple[str, ...], columns: Columns) -> dict[str, str]:
    names = asdict(columns)
    return {f"columns.{column}": names[column] for column in wanted}


def _detect_form(source: Source, columns: Columns, forms: dict[Form, tuple[str, ...]] = COLUMNS) -> Form:
    """Return the first form whose columns are in the source's first row. Raises DataError if there is none."""
    for form, wanted in forms.items():
        try:
            first = next(iter(read_records(source, _column_names(wanted, columns))), None)
        except DataError as error:
            if "no column" not in str(error) and "expected [" not in str(error):
                raise  # the source is unreadable
        else:
            if forms is GIVEN and form == "messages" and first and isinstance(first[0], str):
                continue  # a row that is a bare string fits every form: take it as a prompt
            return form
    known = ", ".join(
        f"{' and '.join(_column_names(wanted, columns).values())} ({form})" for form, wanted in forms.items()
    )
    raise DataError(f"{source_name(source)}: has none of the columns {known}; name yours with --set columns.text=NAME")


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
