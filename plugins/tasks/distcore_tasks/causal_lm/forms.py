"""The three forms of a row: a document, a prompt with its completion, a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from distcore import DataError
from distcore_data import (
    OPTIONAL_COLUMN,
    Record,
    Source,
    check_source,
    describe_value,
    read_records,
    skipping,
    source_columns,
    source_name,
)
from distcore_tasks.causal_lm import vocabulary
from distcore_tasks.causal_lm.conversations import OPTIONAL, Conversation
from distcore_tasks.causal_lm.options import CausalOptions, Columns, Form
from distcore_tasks.rows.pipeline import NamedValues
from distcore_tasks.shared.sources import source_file, text_problem

COLUMNS: dict[Form, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompts": ("prompt", "completion"),
    "documents": ("text",),
}
"""The columns of each form, in the order of detection."""

FOREIGN = (
    (
        {"conversations"},
        (
            "has the column conversations, as ShareGPT names it: if its messages have role and"
            " content, add --messages-column conversations; from and value are to be renamed, and"
            " human to user, gpt to assistant"
        ),
    ),
    (
        {"instruction", "output"},
        (
            "has the columns instruction and output, as Alpaca names them: add --prompt-column"
            " instruction --completion-column output, and put what is in another column, such as"
            " input, into the instruction"
        ),
    ),
)
"""Columns of other libraries, with what to do with such rows."""
ROLES = (*vocabulary.ROLES, "developer")
"""Roles of messages; a chat template may refuse some of them."""
KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
"""Keys of a message that need no place in a template: it is refused if it writes no content, or
no calls of tools.
"""
LOOKED_AT = 10_000
"""Rows in whose messages keys are looked for that nobody reads."""
GIVEN: dict[Form, tuple[str, ...]] = {form: columns[:1] for form, columns in COLUMNS.items()}
"""The column of each form with the input for generation."""


def texts_of(values: Iterable[Any]) -> Iterator[str]:
    """Yield all texts in the values of rows, to train a vocabulary."""
    for value in values:
        if isinstance(value, str):
            yield value
        else:
            parts = value["messages"] if isinstance(value, dict) else value
            yield from (
                part if isinstance(part, str) else part.get("content", "") for part in parts
            )


def form_of(source: Source, options: CausalOptions) -> Form:
    """Return the form of the rows of a data file or split. Raises DataError for none."""
    check_source(source)
    return _detect_form(source, options) if options.form == "auto" else options.form


def columns_of(form: Form, columns: Columns) -> dict[str, str]:
    """Return the columns that are read of a row, by config key."""
    names = _column_names(COLUMNS[form], columns)
    return names | optional_columns() if form == "messages" else names


def optional_columns() -> dict[str, str]:
    """Return the columns that a row of messages may have besides, in the order of ``OPTIONAL``."""
    return {f"columns.{name}{OPTIONAL_COLUMN}": name for name in OPTIONAL}


def given_column(source: Source, options: CausalOptions) -> dict[str, str]:
    """Return the column with the input for generation, by the option that
    names it. Raises DataError.
    """
    check_source(source)
    form = _detect_form(source, options, GIVEN) if options.form == "auto" else options.form
    others = optional_columns() if form == "messages" else {}
    return _column_names(GIVEN[form], options.columns) | others


def unread_columns(options: CausalOptions, form: Form, embedded: Collection[str]) -> Iterator[str]:
    """Yield a line for each source of conversations that has columns which nobody reads, such
    as weights of rows.
    """
    if form != "messages":
        return
    read = {*columns_of(form, options.columns).values(), options.filter.column, "id"}
    for source in dict.fromkeys(options.sources.values()):
        if source in embedded:
            continue
        file = source_file(source, embedded)
        if unread := [name for name in source_columns(file) if name not in read]:
            yield (
                f"{source_name(file)}: not read: column{'s' * (len(unread) > 1)}"
                f" {', '.join(unread)}"
            )


def unread_keys(sources: Iterable[NamedValues[Any]], tokenizer: Any) -> Iterator[str]:
    """Yield a line for each source with keys in its messages that the chat template does not name.

    Such as weights of messages, which other trainers read. Looks at the first ``LOOKED_AT`` rows.
    """
    template = json.dumps(tokenizer.chat_template)
    for rows in sources:
        keys: dict[str, None] = {}
        for conversation in islice(rows, LOOKED_AT):
            keys |= dict.fromkeys(key for message in conversation["messages"] for key in message)
        if unread := [
            key
            for key in keys
            if key not in KEYS and not re.search(rf"\b{re.escape(key)}\b", template)
        ]:
            yield (
                f"{rows.name}: not read: key{'s' * (len(unread) > 1)} {', '.join(unread)} of"
                " messages"
            )


def row_value(form: Form, record: Record) -> Any:
    """Return what is encoded of a record: a text, a prompt with its completion, or messages."""
    if form == "messages":
        return conversation_of(record)
    return record if form == "prompts" else record[0]


def conversation_of(record: Record) -> Conversation:
    """Return messages, and tools and settings of the template if there are any, of
    a record without problems.
    """
    messages, *others = record
    given = {name: _decoded(value) for name, value in zip(OPTIONAL, others, strict=False) if value}
    return {"messages": _without_nulls(messages), **given}


def _without_nulls(messages: Any) -> list[dict[str, object]]:
    """Drop keys with null values: in Parquet and Arrow every message has the
    keys of all messages.
    """
    return [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]


def _decoded(value: object) -> Any:
    """Return what a text of JSON says, as which files with a schema have
    values of different kinds.
    """
    return json.loads(value) if isinstance(value, str) else value


def _column_names(wanted: tuple[str, ...], columns: Columns) -> dict[str, str]:
    names = asdict(columns)
    return {f"columns.{column}": names[column] for column in wanted}


def _detect_form(
    source: Source, options: CausalOptions, forms: dict[Form, tuple[str, ...]] = COLUMNS
) -> Form:
    """Return the first form whose columns are in the source's first rows. Raises DataError
    if there is none.
    """
    columns = options.columns
    for form, wanted in forms.items():
        first = _first_row(source, _column_names(wanted, columns), options.skip_bad_rows)
        if first is None or (
            forms is GIVEN and form == "messages" and all(isinstance(given, str) for given in first)
        ):
            continue  # a row that is a bare string fits every form: take it as a prompt
        return form
    known = ", ".join(
        f"{' and '.join(_column_names(wanted, columns).values())} ({form})"
        for form, wanted in forms.items()
    )
    name, there = source_name(source), set(source_columns(source))
    if hint := next((hint for columns, hint in FOREIGN if columns <= there), None):
        raise DataError(f"{name}: {hint}")
    raise DataError(
        f"{name}: has none of the columns {known}; name yours with --set columns.text=NAME"
    )


def _first_row(source: Source, columns: dict[str, str], most_bad_rows: int) -> Record | None:
    """Return the first row that can be read; ``None`` if it or one before lacks a column.
    Raises DataError for others.

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


def row_problem(form: Form, record: Record) -> str | None:
    """Return what is wrong with a record; ``None`` for one that can be used."""
    if form == "messages":
        return _conversation_problem(record)
    names = COLUMNS[form]
    return next(filter(None, map(text_problem, record, names)), None)


def _conversation_problem(record: tuple[object, ...]) -> str | None:
    """Return the problem of a conversation from which a model learns; ``None`` if it has none."""
    messages = record[0]
    if problem := conversation_problem(record):
        return problem
    if isinstance(messages, list) and not any(
        message["role"] == "assistant" for message in messages
    ):
        return (
            "no message is the assistant's, so there is nothing to learn: add its answer or remove"
            " the row"
        )
    return None


def conversation_problem(record: tuple[object, ...]) -> str | None:
    """Return the problem of a conversation, with or without an answer; ``None`` if it has none."""
    messages, *others = record
    if problem := messages_problem(messages):
        return problem
    kinds: tuple[type, ...] = (list, dict)
    for name, kind, value in zip(OPTIONAL, kinds, others, strict=False):
        if problem := _json_problem(name, kind, value):
            return problem
    return None


def _json_problem(name: str, kind: type, value: object) -> str | None:
    """Return the problem of a value that is JSON, or a text of JSON; ``None`` if there is
    none, or no value.
    """
    expected = "a list of objects" if kind is list else "an object"
    try:
        decoded = _decoded(value or None)
    except ValueError as error:
        return f"{name} is a string but no JSON: {error}"
    is_right = isinstance(decoded, kind)
    if isinstance(decoded, list):
        is_right = is_right and all(isinstance(item, dict) for item in decoded)
    return (
        None
        if decoded is None or is_right
        else f"{name} is {describe_value(decoded)}, expected {expected}"
    )


def messages_problem(messages: object) -> str | None:
    """Return the problem of messages; ``None`` if they have none."""
    if not isinstance(messages, list):
        return (
            f'messages is {describe_value(messages)}, expected a list of {{"role": …,'
            ' "content": …}'
        )
    if not messages:
        return "messages is empty: fill it in or remove the row"
    for number, message in enumerate(messages, 1):
        if problem := _message_problem(message, number):
            return problem
    return None


def _message_problem(message: object, number: int) -> str | None:
    """Return the problem of a message; ``number`` counts from 1."""
    if isinstance(message, dict) and {"from", "value"} <= message.keys():
        return (
            f"message {number} has 'from' and 'value', the form of ShareGPT, expected 'role' and"
            " 'content': rename these, and human to user, gpt to assistant"
        )
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if (
        not isinstance(message, dict)
        or "role" not in message
        or ("content" not in message and not calls)
    ):
        return (
            f"message {number} is {describe_value(message)}, expected an object with role and"
            " content"
        )
    if message["role"] not in ROLES:
        return (
            f"message {number} has the role {message['role']!r}, expected one of {', '.join(ROLES)}"
        )
    if calls is not None and not _are_calls(calls):
        expected = 'a list of {"function": {"name": …, "arguments": …}}'
        return f"tool_calls of message {number} is {describe_value(calls)}, expected {expected}"
    if calls and not message.get("content"):
        return None
    return text_problem(message["content"], f"the content of message {number}")


def _are_calls(calls: object) -> bool:
    """Return True for a list of calls of tools."""
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function", call), dict) for call in calls
    )
