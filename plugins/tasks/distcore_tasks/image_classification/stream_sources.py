"""Sources of images that are read when their step comes. Their labels alone are stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from distcore import DataError
from distcore_data import (
    ChosenRows,
    Filtered,
    IndexedRows,
    Record,
    Source,
    cached_folder,
    pass_over,
    skipping,
    source_digest,
    source_name,
)
from distcore_tasks.image_classification.decoding import CHUNK, check_images, check_pillow, decode
from distcore_tasks.image_classification.encoded import (
    BAD_ROWS,
    image_bytes,
    image_problem,
    labeled,
)
from distcore_tasks.image_classification.options import Columns
from distcore_tasks.shared.arrays import ArrayFile, array_blocks
from distcore_tasks.shared.classification.coded import CodedLabels, LabelCoder
from distcore_tasks.shared.classification.labels import row_places
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.stored_arrays import open_array
from distcore_tasks.shared.streams.values import (
    NumberedValues,
    numbered_values,
    open_values,
    save_values,
)

FORMAT = 2
"""Version of a cache entry, part of its key. Raise it when the files of an entry change."""
CODES, NAMES = "codes.npy", "labels.json"
"""Files of a cache entry with the place of each row's label among all, and with these."""
Row = tuple[int, object, str | None]
"""Number and label of a row, and what is wrong with it."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class NumberedImages:
    """Labeled images by number; implements
    ``distcore_tasks.shared.classification.labels.Labeled``.
    """

    name: str
    """Name of the source in error messages, such as ``data file photos.tar``."""
    source: str
    """Name of the source in predictions."""
    labels: CodedLabels
    """One per image: all integers from 0, or all strings."""
    values: NumberedValues[bytes]
    """The encoded images."""
    content: str
    """Digest of the source, and the column of the labels."""
    bad_rows: tuple[str, ...] = ()
    """A line for each image that was passed over."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.values)

    def places(self, rows: Sequence[int]) -> str:
        """Return how messages say where these images are."""
        return row_places([self.values.number(row) for row in rows])

    def problem(self, row: int, what: str) -> DataError:
        """Return the error of an image."""
        return self.values.problem(row, what)


def open_stream(source: Source, columns: Columns, most_bad_rows: int) -> NumberedImages:
    """Return the images of files, shards or a split, after a pass over their labels.
    Raises DataError, one line.

    Where bad rows are passed over, the pass decodes all images, too.
    """
    name, content = source_name(source), source_digest(source)
    check_pillow(name)
    facts = [FORMAT, "stream", content, columns.image, columns.label, most_bad_rows > 0]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]
    folder = cached_folder(
        "images", key, lambda folder: _write(source, columns, most_bad_rows, folder)
    )
    values = open_values(source, schema_of(columns), folder / "rows")
    return NumberedImages(
        name=name,
        source=str(source),
        labels=CodedLabels(
            codes=open_array(folder / CODES),
            names=json.loads((folder / NAMES).read_text(encoding="utf-8")),
        ),
        values=values,
        content=f"{content} {columns.label}",
        bad_rows=tuple(json.loads((folder / BAD_ROWS).read_text(encoding="utf-8"))),
    )


def schema_of(columns: Columns) -> Schema[bytes]:
    """Return what is read of a row."""
    return Schema({"columns.image": columns.image}, _problem, _value)


def _problem(record: Record) -> str | None:
    return image_problem(record[0])


def _value(record: Record) -> bytes:
    return image_bytes(record[0])


def _write(source: Source, columns: Columns, most_bad_rows: int, folder: Path) -> None:
    """Write labels, and which rows are taken, to the new cache entry ``folder``."""
    rows = IndexedRows(source.source if isinstance(source, Filtered) else source, {}, whole=False)
    coder, refused = LabelCoder(), list[DataError]()

    def good() -> Iterator[int]:
        for number, label, problem in _checked(source, columns, decodes=most_bad_rows > 0):
            if problem:
                refused.append(rows.problem(number, problem))
                pass_over(refused[-1])
            else:
                coder.add(label)
                yield number

    with skipping(most_bad_rows) as bad:
        chosen = ChosenRows.from_numbers(len(rows), good())
    labels = coder.coded()
    if not len(labels):
        raise refused[0] if refused else DataError(f"{source_name(source)}: holds no rows")
    is_all = not most_bad_rows and not isinstance(source, Filtered)
    values = numbered_values(source, schema_of(columns), None if is_all else chosen)
    _check_first(values)
    save_values(values, folder / "rows")
    with ArrayFile(folder / CODES, labels.codes.dtype) as file:
        for block in array_blocks(labels.codes):
            file.add(block)
    (folder / NAMES).write_text(json.dumps(labels.names, ensure_ascii=False), encoding="utf-8")
    (folder / BAD_ROWS).write_text(
        json.dumps([*bad.problems], ensure_ascii=False), encoding="utf-8"
    )


def _checked(source: Source, columns: Columns, *, decodes: bool) -> Iterator[Row]:
    """Yield each row; if it ``decodes``, what is wrong with the image counts, too."""
    rows = labeled(source, columns, images=decodes)
    while some := [*islice(rows, CHUNK)]:
        images = [image_bytes(image) for _, image, _, _ in some]
        damaged = check_images(len(some), images.__getitem__)[1] if decodes else {}
        for place, (number, image, label, problem) in enumerate(some):
            of_image = image_problem(image) if decodes else None
            yield number, label, of_image or problem or damaged.get(place)


def _check_first(values: NumberedValues[bytes]) -> None:
    """Raise DataError for a first image that is none: then it may be the column that is wrong,
    or all of them.
    """
    try:
        decode(*values.at([0]))
    except ValueError as error:
        raise values.problem(0, str(error)) from None
