"""Sources of texts that are read when their step comes. Their labels alone are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data import Source, data_format, pass_over
from distcore_tasks.shared import source_rows
from distcore_tasks.shared.classification.coded import CodedLabels, LabelCoder
from distcore_tasks.shared.source_rows import Rows
from distcore_tasks.shared.splits import without
from distcore_tasks.shared.stored_arrays import StoredArray, stored
from distcore_tasks.shared.streams.values import AT_ONCE, NumberedValues
from distcore_tasks.text_classification.options import Columns
from distcore_tasks.text_classification.problems import PROBLEMS
from distcore_tasks.text_classification.problems.contract import Problem
from distcore_tasks.text_classification.rows import (
    ColumnValues,
    LabeledTexts,
    columns_of,
    schema_of,
)


def stream_rows(
    source: Source, columns: Columns, problem: Problem, most_bad_rows: int
) -> LabeledTexts:
    """Return rows that are read by number, after a pass over their labels.
    Raises DataError as ``read_rows``.

    Memory is for each distinct label, and numbers are in a file.
    """
    records, csv = (
        source_rows.stream_rows(source, schema_of(columns), most_bad_rows),
        data_format(source) == ".csv",
    )
    places = {column: place for place, column in enumerate(columns_of(columns))}
    given = (record[places["label"]] for record in records.values)
    labels: Any
    if problem is PROBLEMS["regression"]:
        records, labels = _numbers(records, given, problem, csv)
    else:
        coder = LabelCoder()
        for label in given:
            coder.add(label)
        records, labels = _good_rows(records, coder.coded(), problem, csv)
    texts, seconds, ids = (
        ColumnValues(records.values, places[name], None) if name in places else None
        for name in ("text", "text_pair", "id")
    )
    assert texts
    return LabeledTexts(records.name, texts, labels, ids, seconds, records, range(len(records)))


def _numbers(
    records: Rows[Any], given: Iterator[object], problem: Problem, csv: bool
) -> tuple[Rows[Any], StoredArray]:
    """Return the rows whose labels are numbers, and these, fp32. Others are bad rows,
    which are passed over.
    """
    bad = dict[int, DataError]()

    def good() -> Iterator[np.ndarray]:
        start = 0
        while labels := [*islice(given, AT_ONCE)]:
            labels = problem.from_csv(labels) if csv else labels
            problems = [*problem.label_problems(labels)]
            for place in (place for place, what in enumerate(problems) if what):
                bad[start + place] = records.problem(start + place, str(problems[place]))
                pass_over(bad[start + place])
            yield np.array(
                [label for label, what in zip(labels, problems, strict=True) if not what],
                np.float32,
            )
            start += len(labels)

    numbers = stored(good())
    if len(bad) == len(records):
        raise next(iter(bad.values()))
    if not bad:
        return records, numbers
    assert isinstance(records.values, NumberedValues)
    rows = without(len(records), np.array([*bad]))
    return replace(records, values=records.values.only(rows)), numbers


def _good_rows(
    records: Rows[Any], given: CodedLabels, problem: Problem, csv: bool
) -> tuple[Rows[Any], CodedLabels]:
    """Return the rows with good labels, and these. Others are bad rows, which are passed over."""
    bad = dict[int, str]()
    names = {code: given.names[code] for code in range(len(given.names))}
    while wrong := _wrong(names, problem, csv):
        errors = _errors(records, given, wrong)
        if len(wrong) == len(names):
            raise errors[0]
        bad |= wrong
        # The labels of a CSV file may be integers now.
        names = {code: given.names[code] for code in names if code not in wrong}
    labels: Sequence[Any] = problem.from_csv([*names.values()]) if csv else [*names.values()]
    named = dict(zip(names, labels, strict=True))
    coded = CodedLabels(
        given.codes, [named.get(code, name) for code, name in enumerate(given.names)]
    )
    if not bad:
        return records, coded
    coded, rows = coded.without(bad)
    assert isinstance(records.values, NumberedValues)
    return replace(records, values=records.values.only(rows.blocks())), coded


def _wrong(names: dict[int, Any], problem: Problem, csv: bool) -> dict[int, str]:
    """Return what is wrong with labels, by code."""
    some = [*names.values()]
    labels = problem.from_csv(some) if csv else some
    return {
        code: what for code, what in zip(names, problem.label_problems(labels), strict=True) if what
    }


def _errors(records: Rows[Any], labels: CodedLabels, wrong: dict[int, str]) -> list[DataError]:
    """Pass over the rows of some labels, and return their errors."""
    errors = list[DataError]()
    for row in labels.rows_of(wrong):
        errors.append(records.problem(row, wrong[labels.code(row)]))
        pass_over(errors[-1])
    return errors
