"""Tables: rows by number from arrays, and rows that are encoded when they are asked for."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcore import DataError
from distcore_tasks.rows import lazy_table
from distcore_tasks.rows.lazy_table import LazyTable
from distcore_tasks.rows.pipeline import Refuse
from distcore_tasks.rows.table import CachedTable
from distcore_tasks.rows.table_files import TableWriter
from distcore_tasks.shared.jagged import flat_of, flat_rows

TOKENS = [[1, 2, 3], [4], [], [5, 6]]


TEXTS = [b"a", b"", b"bc", b"d"]


def table(first: int = 0, end: int = 4) -> CachedTable:
    texts = TEXTS[first:end]
    content = np.frombuffer(b"".join(texts), np.uint8)
    return CachedTable(
        {
            "tokens": flat_rows(TOKENS[first:end]),
            "text": flat_of(content, np.array([*map(len, texts)], np.int64)),
            "number": np.array([10, 20, 30, 40])[first:end],
        }
    )


def rows_of(rows: Any) -> list[tuple[list[int], bytes, int]]:
    """The three columns of some rows, row by row."""
    tokens, texts = ([row.tolist() for row in rows.each(name)] for name in ("tokens", "text"))
    return list(zip(tokens, map(bytes, texts), rows["number"].tolist(), strict=True))


ALL = [([1, 2, 3], b"a", 10), ([4], b"", 20), ([], b"bc", 30), ([5, 6], b"d", 40)]


def test_rows_are_taken_by_number_in_the_order_that_was_asked_for() -> None:
    assert rows_of(table().all()) == ALL
    rows = table().take(np.array([3, 0, 3]))
    assert len(rows) == 3
    assert rows_of(rows) == [ALL[3], ALL[0], ALL[3]]
    assert rows.lengths("tokens").tolist() == [2, 3, 2]
    padded, mask = rows.padded("tokens", -1)
    assert padded.tolist() == [[5, 6, -1], [1, 2, 3], [5, 6, -1]]
    assert mask.sum() == 7


def test_a_table_that_is_written_in_chunks_is_mapped_whole(tmp_path: Path) -> None:
    with TableWriter(tmp_path / "rows") as writer:
        for bounds in ((0, 1), (1, 1), (1, 4)):
            writer.add(table(*bounds))
        written = writer.finish()
    assert rows_of(written.all()) == ALL
    assert written.jagged("text").values.dtype == np.uint8
    another = pickle.loads(pickle.dumps(written))
    assert rows_of(another.all()) == ALL
    assert len(pickle.dumps(written)) < len(str(tmp_path)) + 200, (
        "another process maps the same files"
    )


class Words:
    """Values in memory by number."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.asked = words, list[int]()

    def __len__(self) -> int:
        return len(self.words)

    def at(self, places: Sequence[int]) -> Sequence[str]:
        self.asked += places
        return [self.words[place] for place in places]

    def problem(self, place: int, what: str) -> DataError:
        return DataError(f"word {place}: {what}")


def encode(words: Sequence[str], refuse: Refuse) -> CachedTable:
    for place, word in enumerate(words):
        if word == "bad":
            refuse(place, "is bad")
    letters = flat_rows([[*word.encode()] for word in words])
    return CachedTable({"letters": letters, "first": np.array([ord(word[0]) for word in words])})


WORDS = ["alpha", "be", "gamma", "delta", "bad", "zeta"]


def test_a_lazy_table_encodes_a_row_once_while_it_is_kept() -> None:
    words = Words(WORDS)
    lazy = LazyTable(words, encode)
    rows = lazy.take(np.array([3, 0, 3]))
    assert [bytes(row.astype(np.uint8)) for row in rows.each("letters")] == [
        b"delta",
        b"alpha",
        b"delta",
    ]
    assert rows["first"].tolist() == [ord(letter) for letter in "dad"]
    lazy.take(np.array([0, 1]))
    assert words.asked == [0, 3, 1]
    assert len(pickle.loads(pickle.dumps(lazy)).values.asked) == 3
    assert not pickle.loads(pickle.dumps(lazy))._kept


def test_a_lazy_table_forgets_the_rows_that_were_asked_for_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lazy_table, "KEPT_TOKENS", 14)
    words = Words(WORDS)
    lazy = LazyTable(words, encode)
    for row in (0, 1, 0, 2):  # 6 + 3 + 6 numbers, of which those of row 1 go
        lazy.take(np.array([row]))
    assert words.asked == [0, 1, 2]
    for row in (0, 2, 1):
        lazy.take(np.array([row]))
    assert words.asked == [0, 1, 2, 1]


def test_a_lazy_table_counts_pixels_and_no_bytes_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_table, "KEPT_TOKENS", 30)

    def images(words: Sequence[str], refuse: Refuse) -> CachedTable:
        return CachedTable({"pixels": np.zeros((len(words), 2, 2, 3), np.uint8)})

    def texts(words: Sequence[str], refuse: Refuse) -> CachedTable:
        content = np.zeros(12 * len(words), np.uint8)
        return CachedTable({"text": flat_of(content, np.full(len(words), 12))})

    kept = []
    for encode_some in (images, texts):
        lazy = LazyTable(Words(WORDS), encode_some)
        for row in range(6):
            lazy.take(np.array([row]))
        kept.append(len(lazy._kept))
    assert kept == [2, 6]


def test_a_refused_row_is_named_by_its_place_in_the_source() -> None:
    with pytest.raises(DataError, match=r"^word 4: is bad$"):
        LazyTable(Words(WORDS), encode).take(np.array([5, 4, 0]))
