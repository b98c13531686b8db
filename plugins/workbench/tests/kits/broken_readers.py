"""Readers that are broken on purpose; a class names the case that must notice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from distcore import DataError


class Sound:
    """Reads JSON lines, and keeps every law."""

    case: ClassVar = ""

    def read(self, source: Path, columns: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        if not source.is_file():
            raise DataError(f"{source}: no such file")
        with source.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield self.values(self.row(line, number, source), number, source, columns)

    def row(self, line: str, number: int, source: Path) -> dict[str, Any]:
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError:
            raise DataError(f"{source}, row {number}: not JSON") from None
        return row

    def values(
        self, row: dict[str, Any], number: int, source: Path, columns: Mapping[str, str]
    ) -> tuple[object, ...]:
        try:
            return tuple(row[name] for name in columns.values())
        except KeyError as error:
            raise DataError(f"{source}, row {number}: no column {error}") from None

    def digest(self, source: Path) -> str | None:
        if not source.is_file():
            raise DataError(f"{source}: no such file")
        return hashlib.sha256(source.read_bytes()).hexdigest()


class SkipsEmptyTexts(Sound):
    case = "all-rows"

    def read(self, source: Path, columns: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        return (row for row in super().read(source, columns) if "" not in row)


class GivesTexts(Sound):
    case = "all-rows"

    def values(self, row: dict[str, Any], *rest: Any) -> tuple[object, ...]:
        return tuple(str(value) for value in super().values(row, *rest))


class OrderOfTheFile(Sound):
    case = "columns-as-asked"

    def values(
        self, row: dict[str, Any], number: int, source: Path, columns: Mapping[str, str]
    ) -> tuple[object, ...]:
        super().values(row, number, source, columns)
        return tuple(value for name, value in row.items() if name in columns.values())


class OnePlace(Sound):
    case = "two-at-once"

    def read(self, source: Path, columns: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        self.rows = getattr(self, "rows", None) or super().read(source, columns)
        return self.rows


class NeedsARow(Sound):
    case = "no-rows"

    def read(self, source: Path, columns: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        rows = list(super().read(source, columns))
        yield rows[0]
        yield from rows[1:]


class FillsIn(Sound):
    case = "damage-is-seen"

    def row(self, line: str, number: int, source: Path) -> dict[str, Any]:
        try:
            return super().row(line, number, source)
        except DataError:
            return {"text": line, "count": 0, "share": 0.0}


class NoneForMissing(Sound):
    case = "missing-column"

    def values(
        self, row: dict[str, Any], number: int, source: Path, columns: Mapping[str, str]
    ) -> tuple[object, ...]:
        return tuple(row.get(name) for name in columns.values())


class SaysNoName(Sound):
    case = "missing-column"

    def values(
        self, row: dict[str, Any], number: int, source: Path, columns: Mapping[str, str]
    ) -> tuple[object, ...]:
        try:
            return super().values(row, number, source, columns)
        except DataError:
            raise DataError(f"{source}: bad columns") from None


class OwnError(Sound):
    case = "missing-source"

    def read(self, source: Path, columns: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        with source.open():
            return super().read(source, columns)


class DigestOfSize(Sound):
    case = "digest-of-content"

    def digest(self, source: Path) -> str | None:
        return super().digest(source) and str(source.stat().st_size)


class DigestOfPath(Sound):
    case = "digest-of-content"

    def digest(self, source: Path) -> str | None:
        return f"{super().digest(source)} {source}"


class HashOfText(Sound):
    case = "digest-of-any-process"

    def digest(self, source: Path) -> str | None:
        return super().digest(source) and str(hash(source.read_text()))


class IndexBeside(Sound):
    case = "changes-nothing"

    def digest(self, source: Path) -> str | None:
        source.with_suffix(".index").write_text("4")
        return super().digest(source)


class NeverCloses(Sound):
    case = "closes-files"
    opened: ClassVar[list[Any]] = []

    def read(self, source: Path, columns: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        self.opened.append(source.open())
        return super().read(source, columns)


class ReadsAll(Sound):
    case = "row-by-row"

    def read(self, source: Path, columns: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        return iter(list(super().read(source, columns)))
