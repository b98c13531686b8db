"""The forms of valid rows of words and tags, their tokens, and the error line of an invalid row."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import normalizers

from distcore.config import RunConfig
from distcore.errors import DataError
from distcore.plugin.task.task import FileRows
from distcore_tasks.rows import writing
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.pretrained import load_tokenizer
from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece
from distcore_tasks.token_classification.embedded import stdlib_code, tagged_statements
from distcore_tasks.token_classification.options import Columns
from distcore_tasks.token_classification.task import TokenClassification
from distcore_tasks.token_classification.words import tokenize_words

ROWS = [
    {
        "tokens": ["Ada", "Lovelace", "came", "to", f"London-{row}"],
        "tags": ["B-PER", "I-PER", "O", "O", "B-LOC"],
    }
    for row in range(9)
]


def task_of(folder: Path, rows: list[Any] = ROWS, **options: Any) -> TokenClassification:
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held-out.json").write_text(json.dumps(ROWS[:3]))
    given: dict[str, Any] = {
        "data": str(folder / "words.jsonl"),
        "eval_data": str(folder / "held-out.json"),
    }
    return TokenClassification(**(given | options))


def prepared(task: TokenClassification) -> tuple[Any, Any]:
    data: Any = task.prepare(RunConfig())
    return data, load_tokenizer("it", data.tokenizer)


def test_the_first_token_of_a_word_has_its_tag_and_the_others_have_none(tmp_path: Path) -> None:
    data, tokenizer = prepared(task_of(tmp_path))
    assert data.labels == data.classes == ("B-LOC", "B-PER", "I-PER", "O")
    batch = data.train.batch(np.arange(2))
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    by_token = {
        tokens[at]: int(label) for at, label in enumerate(batch["labels"][0]) if label != IGNORED
    }
    assert by_token == {"ada": 1, "lovelace": 2, "came": 3, "to": 3, "london": 0}
    assert tokens[-4:-1] == ["london", "-", "0"]  # one word of three tokens
    assert data.train.items.tolist() == [5] * 9
    assert batch["begins"][0][batch["begins"][0] >= 0].tolist() == [0, 1, 2, 3, 4]
    assert batch["words"].tolist() == [5, 5]


def test_words_behind_the_last_token_are_counted(tmp_path: Path) -> None:
    data, _ = prepared(task_of(tmp_path, max_seq_len=5))
    assert data.train.items.tolist() == [3] * 9
    assert data.facts["evaluation"]["words_cut"] == 6
    assert data.warnings[0].startswith(
        "24 of 60 words stand behind the 5 tokens of their row, or have none"
    )


def test_a_word_without_a_token_keeps_the_others_in_their_places() -> None:
    tokenizer = as_transformers(train_wordpiece(["one two three"], 64))
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("two", "")
    words = tokenize_words(tokenizer, [["one", "two", "three", "three"]], 64)
    begins = words.begins.values[words.begins.values >= 0]
    assert begins.tolist() == [0, 2, 3]
    assert (words.count.tolist(), words.count_judged().tolist()) == ([4], [3])


def test_rows_are_tokenized_some_at_a_time_and_none_is_lost_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = prepared(task_of(tmp_path))
    monkeypatch.setattr(writing, "CHUNK", 2)
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "another-cache"))
    parts, _ = prepared(task_of(tmp_path))
    assert parts.facts == whole.facts
    assert parts.train.content == whole.train.content
    assert parts.train.batch(np.arange(9))["labels"].equal(
        whole.train.batch(np.arange(9))["labels"]
    )


@pytest.mark.programs  # as long as one
def test_the_words_of_a_large_file_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"word{number}" for number in range(60)]
    path, rows = tmp_path / "large.jsonl", 1_000
    monkeypatch.setattr(writing, "CHUNK", 32)
    with path.open("w") as file:
        for row in range(rows):
            tags = ["O", "B-X"] * 30
            file.write(
                json.dumps({"tokens": [f"{word}-{row % 7}" for word in words], "tags": tags}) + "\n"
            )
    prepared(task_of(tmp_path))  # modules that this imports count as memory, too
    task = task_of(tmp_path, data=str(path), eval_data=None, eval_fraction=0.01)
    tracemalloc.start()
    try:
        data = task.prepare(RunConfig())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(data.train) == rows - 10
    # a word of seven characters is an object of 56 bytes, and has a place in a list
    assert peak < rows * 60 * 64


def test_integer_tags_stay_integers_and_name_no_entities(tmp_path: Path) -> None:
    rows = [{"tokens": ["a", "b"], "tags": [7, 0]}] * 4
    data, _ = prepared(task_of(tmp_path, rows, eval_data=None, eval_fraction=0.5))
    assert data.labels == (0, 7)
    assert data.classes == ("0", "7")
    assert data.facts["iob"] is False


def test_parquet_and_columns_of_other_names(tmp_path: Path) -> None:
    columns = {
        "words": [row["tokens"] for row in ROWS],
        "ner": [row["tags"] for row in ROWS],
        "key": list("abcdefghi"),
    }
    pq.write_table(pa.table(columns), tmp_path / "words.parquet")
    file = str(tmp_path / "words.parquet")
    task = TokenClassification(data=file, eval_data=file, columns=Columns("words", "ner", "key"))
    data, _ = prepared(task)
    assert len(data.train) == 9
    assert list(data.evaluation.origins())[2] == {"file": file, "row": 3, "id": "c"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"tokens": ["a"]}, r"row 3: no column 'tags', which the rows before it have; fill it in"),
        (
            {"tokens": "a b", "tags": []},
            r"row 3: tokens is a string \('a b'\), expected a list of strings",
        ),
        (
            {"tokens": [], "tags": []},
            "row 3: tokens is an empty list: fill it in or remove the row",
        ),
        (
            {"tokens": ["a", 7], "tags": ["O", "O"]},
            r"row 3: word 2 is an integer \(7\), expected a string",
        ),
        (
            {"tokens": ["a", " "], "tags": ["O", "O"]},
            "row 3: word 2 is empty: fill it in or remove the row",
        ),
        (
            {"tokens": ["a"], "tags": "O"},
            r"row 3: tags is a string \('O'\), expected a list with one tag per word",
        ),
        ({"tokens": ["a", "b"], "tags": ["O"]}, "row 3: 2 words have 1 tags: each word needs one"),
        ({"tokens": ["a"], "tags": [None]}, r"row 3: word 1 \('a'\): tag is missing \(null\)"),
        (
            {"tokens": ["a"], "tags": [7]},
            r"row 3: word 1 \('a'\): tag is an integer \(7\), but row 1 has a string",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_row(row: object, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"data file .*words.jsonl, {problem}") as raised:
        task_of(tmp_path, [*ROWS[:2], row, *ROWS]).prepare(RunConfig())
    assert "\n" not in str(raised.value)


def test_an_unknown_tag_says_which_was_meant(tmp_path: Path) -> None:
    (tmp_path / "test.json").write_text(
        json.dumps([ROWS[0], {"tokens": ["Ada"], "tags": ["B-PRE"]}])
    )
    problem = (
        r"test.json, row 2: tag 'B-PRE' of the word 'Ada' is out of range: training lacks"
        r" it.*'B-PER'.*B-LOC, B-PER"
    )
    with pytest.raises(DataError, match=problem):
        task_of(tmp_path, test_data=str(tmp_path / "test.json")).prepare(RunConfig())


def test_a_row_of_which_no_word_is_left_is_named(tmp_path: Path) -> None:
    rows = [*ROWS, {"tokens": ["\u200b"], "tags": ["O"]}]
    with pytest.raises(
        DataError, match=r"words.jsonl, row 10: no word of it is left: raise --max-seq-len \(128\)"
    ):
        task_of(tmp_path, rows).prepare(RunConfig())


def test_csv_is_refused_and_so_is_one_tag_for_all(tmp_path: Path) -> None:
    (tmp_path / "words.csv").write_text("tokens,tags\na b,O O\n")
    with pytest.raises(
        DataError, match=r"words.csv: CSV has no lists, which words and tags are; use .json, .jsonl"
    ):
        task_of(tmp_path, data=str(tmp_path / "words.csv")).prepare(RunConfig())
    with pytest.raises(DataError, match=r"words.jsonl: all words have the tag 'O'"):
        task_of(tmp_path, [{"tokens": ["a", "b"], "tags": ["O", "O"]}]).prepare(RunConfig())


def test_rows_without_tags_are_checked_alike(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    data: Any = task.prepare(RunConfig())
    with pytest.raises(DataError, match=r"data file new.jsonl, row 12: word 2 is empty"):
        task.unlabeled(FileRows(file="new.jsonl", start=11, records=[(["a"],), (["a", ""],)]), data)
    rows: Any = task.unlabeled(
        FileRows(file="new.jsonl", start=1, records=[(["Ada", "came"],), (["to"],)]), data
    )
    assert rows.batch(np.asarray([1, 0]))["words"].tolist() == [1, 2]


SOURCE = '''
import os.path, sys
from .far import away
@decorator(key=1)
async def run(self, *rest, limit: int = compute()) -> None:
    """Text."""
    self.out.write(rest)[0]
    if limit > sys.maxsize:
        raise errors.TooMany(limit)
    try:
        await ''.join(rest).strip()
    except (ValueError, os.error) as problem:
        print(f"{self.out()}")
class Thing(Base):
    pass
'''


def test_the_parser_says_what_each_word_of_a_statement_names() -> None:
    by_statement = {" ".join(words): tags for words, tags in tagged_statements(SOURCE)}
    named = {text: _entities(text.split(), tags) for text, tags in by_statement.items()}
    assert named == {
        "import os . path , sys": ["MODULE os . path", "MODULE sys"],
        "from . far import away": ["MODULE . far"],
        "async def run ( self , * rest , limit : int = compute ( ) ) -> None :": [
            "FUNCTION run",
            "ARGUMENT self",
            "ARGUMENT rest",
            "ARGUMENT limit",
            "CALL compute",
        ],
        "''": [],
        "self . out . write ( rest ) [ 0 ]": ["CALL self . out . write"],
        "if limit > sys . maxsize :": [],
        "raise errors . TooMany ( limit )": ["EXCEPTION errors . TooMany"],
        "try :": [],
        "await '' . join ( rest ) . strip ( )": ["CALL join", "CALL strip"],
        "except ( ValueError , os . error ) as problem :": [
            "EXCEPTION ValueError",
            "EXCEPTION os . error",
        ],
        "class Thing ( Base ) :": ["CLASS Thing"],
        "pass": [],
    }


def _entities(words: list[str], tags: list[str]) -> list[str]:
    entities: list[str] = []
    for word, tag in zip(words, tags, strict=True):
        if tag.startswith("B-"):
            entities.append(f"{tag[2:]} {word}")
        elif tag.startswith("I-"):
            entities[-1] += f" {word}"
    return entities


@pytest.mark.programs
def test_the_embedded_rows_are_thousands_and_none_occurs_twice() -> None:
    rows = stdlib_code().values
    assert len({tuple(row.words) for row in rows}) == len(rows) > 5000
    assert len({tag for row in rows for tag in row.tags}) == 10
