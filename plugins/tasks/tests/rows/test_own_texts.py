"""The task of the page "Your own texts": its rows are stored and streamed, chosen, mixed and
predicted, and its run goes on bit for bit, as those of the shipped tasks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_pages import ROOT, blocks

from distcore import ConfigError, DataError, RunConfig, TaskError, train
from distcore.cli.main import main
from distcore.registry import load
from distcore_tasks.rows.encoding import check_pipeline
from distcore_tasks.rows.pipeline import Encoded

PAGE = ROOT / "docs/your-own-texts.md"
TASK, OWN_ROW, *_ = blocks(PAGE, "python")
CONFIG = RunConfig()
WORDS = ("awful", "dull", "fair", "good", "wonderful")


def films(count: int) -> list[dict[str, object]]:
    return [
        {"review": f"a {WORDS[n % 5]} film, number {n}", "stars": n % 5 + 1} for n in range(count)
    ]


def write(file: Path, rows: Sequence[dict[str, object]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def task_file(folder: Path, source: str = TASK, name: str = "stars.py") -> str:
    (folder / name).write_text(source, encoding="utf-8")
    return f"{folder / name}:Stars"


def task(folder: Path, source: str = TASK, rows: int = 60, **options: Any) -> Any:
    """The task of a file, with rows unless ``data`` names others."""
    if "data" not in options:
        options["data"] = write(folder / "stars.jsonl", films(rows))
    return load("tasks", task_file(folder, source))(**options)


def tensors(rows: Any, numbers: Sequence[int] | None = None) -> dict[str, Any]:
    wanted = np.arange(len(rows)) if numbers is None else np.array(numbers)
    return {name: tensor.tolist() for name, tensor in rows.batch(wanted).items()}


def config(folder: Path, out: str, **changes: Any) -> RunConfig:
    keys = {
        "task": task_file(folder),
        "max_steps": 6,
        "global_batch_size": 8,
        "save_every": 3,
        "device": "cpu",
        "out": str(folder / out),
        "extensions": {"progress": False},
    }
    return RunConfig.model_validate(keys | changes)


def test_two_columns_are_a_trained_model_in_thirty_lines(tmp_path: Path) -> None:
    code = [line for line in TASK.splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 30
    rows = [{"review": f"{WORDS[n % 5]} film", "stars": n % 5 + 1} for n in range(200)]
    options = {"data": write(tmp_path / "stars.jsonl", rows)}
    report = train(config(tmp_path, "run", task_options=options, max_steps=100))
    before = train(config(tmp_path, "begin", task_options=options, max_steps=1))
    assert report["evaluation"]["loss"] < before["evaluation"]["loss"] / 2
    assert report["evaluation"]["evaluated"] == 20
    new = write(tmp_path / "new.jsonl", [{"review": row["review"]} for row in rows[:5]])
    lines = tmp_path / "predicted.jsonl"
    assert main(["predict", str(tmp_path / "run"), "--data", new, "--out", str(lines)]) == 0
    predicted = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["row"] for line in predicted] == [1, 2, 3, 4, 5]
    stars = [line["stars"] for line in predicted]
    assert stars[0] < stars[2] < stars[4]


def test_streamed_rows_are_the_stored_ones(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": write(tmp_path / "stars.jsonl", films(60))}
    # A stream trains its vocabulary on a sample, which is all of so few rows.
    stored, streamed = (task(tmp_path, stream=stream, **given).prepare(CONFIG) for stream in (0, 1))
    assert not stored.train.is_streamed
    assert streamed.train.is_streamed
    assert tensors(stored.train) == tensors(streamed.train)
    assert tensors(stored.evaluation) == tensors(streamed.evaluation)
    rows = tensors(stored.train, [3])
    assert [*rows] == ["input_ids", "attention_mask", "stars"]
    assert np.asarray(stored.train.batch(np.arange(2))["stars"]).dtype == np.float32


@pytest.mark.parametrize("stream", [False, True])
def test_sources_are_filtered_mixed_and_evaluated_by_name(tmp_path: Path, stream: bool) -> None:
    bad = {"review": " ", "stars": 3}
    write(tmp_path / "a.jsonl", [*films(40), bad])
    write(tmp_path / "b.jsonl", films(30))
    options = {
        "data": "a.jsonl,b.jsonl",
        "order": {"mix": {"a": 0.75, "b": 0.25}},
        "stream": stream,
        "skip_bad_rows": 1,
        "filter": {"column": "review", "matches": "number [1-9]| $"},
        "eval_data": {"old": "a.jsonl", "new": "b.jsonl"},
    }
    report = train(config(tmp_path, "run", task_options=options))
    assert {name: one["evaluated"] for name, one in report["evaluations"].items()} == {
        "old": 39,
        "new": 29,
    }
    bad_rows = (tmp_path / "run/bad_rows.txt").read_text()
    assert "a.jsonl, row 41: review is empty" in bad_rows


def test_a_csv_file_has_its_numbers_as_texts(tmp_path: Path) -> None:
    (tmp_path / "stars.csv").write_text("review,stars\n" + "fine,3.5\ndull,007\nodd,1e1\n" * 4)
    rows = task(tmp_path, data=str(tmp_path / "stars.csv")).prepare(CONFIG).train
    assert set(tensors(rows)["stars"]) == {3.5, 7.0, 10.0}


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, stream: bool) -> None:
    options = {"data": write(tmp_path / "stars.jsonl", films(60)), "stream": stream}
    train(config(tmp_path, "whole", task_options=options))
    step = str(tmp_path / "whole/checkpoints/step-00000003")
    train(config(tmp_path, "on", task_options=options, resume=step))
    whole, on = (
        {file.name: file.read_bytes() for file in (tmp_path / run).glob(last)}
        for run, last in product(("whole", "on"), ["checkpoints/step-00000006/*.safetensors"])
    )
    assert len(whole) == 2
    assert whole == on


def entries(cache: Path) -> int:
    return sum(1 for _ in cache.glob("own-texts/*/entry.json"))


HELPED = TASK.replace(
    "from distcore_tasks.rows import RowTask, TextRows",
    "from distcore_tasks.rows import Encoded, RowTask, TextRows\n\nLONGEST = 40\n\n"
    "def shown(text):\n    return text[:LONGEST]\n",
).replace(
    '    numbers = ("stars",)\n',
    '    numbers = ("stars",)\n\n'
    "    def encode(self, tokenizer, info, values, refuse):\n"
    "        tokens = [tokenizer(shown(review))['input_ids'] for review, _ in values]\n"
    "        stars = [stars for _, stars in values]\n"
    "        return Encoded.from_columns({'tokens': tokens, 'stars': stars})\n",
)
CHANGES = {
    "encode": ("shown(review)", "shown(review.upper())", 2),
    "a function of its file": ("text[:LONGEST]", "text[:LONGEST].upper()", 2),
    "a constant of its file": ("LONGEST = 40", "LONGEST = 4", 2),
    "a comment": ("LONGEST = 40", "LONGEST = 40  # letters", 1),
    "a docstring": ('"""How many stars', '"""How  many stars', 1),
    "the loss": (".square()", ".abs()", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_made_anew_when_their_code_changes(
    change: str, tmp_path: Path, cache: Path
) -> None:
    before, after, count = CHANGES[change]
    assert before in HELPED
    first = task(tmp_path, HELPED).prepare(CONFIG)
    again = task(tmp_path, HELPED.replace(before, after)).prepare(CONFIG)
    assert entries(cache) == count
    assert (first.train.content != again.train.content) == (count == 2)


def test_rows_are_made_anew_when_an_imported_file_or_an_option_changes(
    tmp_path: Path, cache: Path
) -> None:
    source = TASK.replace("from torch import nn", "from torch import nn\nimport near_to_stars")
    source = source.replace('("stars",)\n\n\n@', '("stars",)\n    of = near_to_stars.A\n\n\n@')
    source = source.replace("    lr = 0.05", "    lr = 0.05\n    width: int = 8")
    (tmp_path / "near_to_stars.py").write_text("A = 1")
    task(tmp_path, source).prepare(CONFIG)
    (tmp_path / "near_to_stars.py").write_text("A = 2")
    task(tmp_path, source).prepare(CONFIG)
    assert entries(cache) == 2
    task(tmp_path, source, width=9).prepare(CONFIG)
    assert entries(cache) == 3
    task(tmp_path, source, width=9, eval_fraction=0.1).prepare(CONFIG)
    assert entries(cache) == 3


def with_encode(*lines: str) -> str:
    """The task of the page, whose rows are encoded by these lines of code."""
    body = "".join(f"        {line}\n" for line in lines)
    encode = "    def encode(self, tokenizer, info, values, refuse):\n"
    source = TASK.replace("import RowTask,", "import Encoded, RowTask,")
    return source.replace('("stars",)\n\n\n@', f'("stars",)\n\n{encode}{body}\n\n@')


TOKENS = "tokens = [[1] if stars < 3 else [1, 2] for _, stars in values]"
STARS = "stars = [stars for _, stars in values]"
GIVEN = "return Encoded.from_columns"
ROW_3 = r"stars.jsonl, row \d*[38]: ReviewRows.encode"
ANY_ROW = r"stars.jsonl, row \d+: ReviewRows.encode"
WRONG = {
    "raises": (
        ["if any('fair' in review for review, _ in values):", "    {}['x']",
         "tokens = [[1] for _ in values]",
         "return Encoded.from_columns({'tokens': tokens, 'stars': [1] * len(values)})"],
        rf"{ROW_3} raised KeyError: 'x' \(stars.py:\d+\)$",
    ),
    "returns a list": (["return []"], "encode returned list, expected Encoded"),
    "returns nothing": (["pass"], "encode returned NoneType, expected Encoded"),
    "unequal lengths": (
        [TOKENS, STARS, GIVEN + "({'tokens': tokens, 'stars': stars[1:]})"],
        "encode: column 'stars' has not one entry for each of 1 rows",
    ),
    "no tokens": (
        [STARS, GIVEN + "({'stars': stars})"],
        "encode: has no column 'tokens', expected a list of tokens for each row",
    ),
    "texts for tokens": (
        [STARS, GIVEN + "({'tokens': [review for review, _ in values], 'stars': stars})"],
        r"raised TypeError: column 'tokens' has a row with a string \('a .*expected integers",
    ),
    "fractions for tokens": (
        [TOKENS.replace("[1, 2]", "[0.5]"), STARS, GIVEN + "({'tokens': tokens, 'stars': stars})"],
        rf"{ANY_ROW} raised TypeError: column 'tokens' has a row with a list of 1 values",
    ),
    "None for a number": (
        [TOKENS, "stars = [stars if stars < 3 else None for _, stars in values]",
         GIVEN + "({'tokens': tokens, 'stars': stars})"],
        rf"{ANY_ROW} raised TypeError: column 'stars' has a row with missing \(null\)",
    ),
    "a token outside of the vocabulary": (
        [TOKENS.replace("[1, 2]", "[1, 99999]"), STARS,
         GIVEN + "({'tokens': tokens, 'stars': stars})"],
        rf"{ANY_ROW}: column 'tokens' has the token 99999, the vocabulary has \d+$",
    ),
    "an unknown count": (
        [TOKENS, STARS, GIVEN + "({'tokens': tokens, 'stars': stars}, lost=1)"],
        "encode: counts = {'lost': 1}, expected numbers of rows_cut",
    ),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_encode_is_one_line_with_file_and_row(
    case: str, stream: bool, tmp_path: Path
) -> None:
    lines, problem = WRONG[case]
    wrong = task(tmp_path, with_encode(*lines), stream=stream)

    def all_rows() -> None:
        rows = wrong.prepare(CONFIG).train
        rows.batch(np.arange(len(rows)))

    with pytest.raises((DataError, TaskError), match=problem) as error:
        all_rows()
    line = str(error.value)
    assert "\n" not in line
    assert "stars.jsonl, row " in line


def test_a_wrong_encode_ends_the_command_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, _ = WRONG["raises"]
    reference = task_file(tmp_path, with_encode(*lines))
    data = write(tmp_path / "stars.jsonl", films(30))
    arguments = ["train", "--task", reference, "--data", data, "--device", "cpu", "--out", "run"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert re.search(f"^error: data file {ROW_3} raised KeyError: 'x'", error)
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("check(self, record): return record[9]", "ReviewRows.check raised IndexError: "),
        ("check(self, record): return False", "ReviewRows.check returned bool, expected a text"),
        ("value(self, record): return record[9]", "ReviewRows.value raised IndexError: "),
    ],
)
def test_a_wrong_check_is_one_line_with_file_and_row(
    method: str, problem: str, tmp_path: Path
) -> None:
    source = TASK.replace('("stars",)\n\n\n@', f'("stars",)\n\n    def {method}\n\n\n@')
    with pytest.raises(DataError, match=rf"stars.jsonl, row 1: {problem}"):
        task(tmp_path, source).prepare(CONFIG)


def test_bad_rows_are_named(tmp_path: Path) -> None:
    for value, problem in (
        ("many", r"stars is a string \('many'\), expected a number"),
        (None, r"stars is missing \(null\), expected a number"),
        (True, "stars is a boolean"),
        (float("nan"), "not usable JSON|stars is a float"),
    ):
        rows = films(9)
        rows[4]["stars"] = value
        data = write(tmp_path / "odd.jsonl", rows)
        with pytest.raises(DataError, match=rf"odd.jsonl, (row|line) 5.*({problem})"):
            task(tmp_path, data=data).prepare(CONFIG)


def test_what_cannot_be_pickled_is_refused_where_processes_load_rows(tmp_path: Path) -> None:
    source = TASK.replace("return ReviewRows(self)", "return self.made()") + (
        "\n    def made(self):\n        class Inner(ReviewRows):\n            pass\n"
        "        return Inner(self)\n"
    )
    rows = task(tmp_path, source).rows(CONFIG)
    check_pipeline(rows, workers=0)
    with pytest.raises(TaskError, match=r"Inner cannot be sent to loader processes: .*workers=0$"):
        check_pipeline(rows, workers=2)
    with pytest.raises(
        TaskError, match=r"rows\(\) of the task returned int, expected a RowPipeline"
    ):
        check_pipeline(7, workers=0)


def test_the_row_of_the_page_is_encoded_and_refused(tmp_path: Path) -> None:
    source = TASK.replace("import RowTask,", "import Encoded, RowTask,")
    own = OWN_ROW.partition("\n")[2]
    begin, end = (
        source.index("@dataclass(frozen=True)\nclass ReviewRows"),
        source.index("@dataclass(frozen=True, kw_only=True)"),
    )
    source = f"{source[:begin]}{own}\n\n{source[end:]}"
    assert len(task(tmp_path, source).prepare(CONFIG).train) == 54
    data = write(tmp_path / "six.jsonl", [*films(30), {"review": "best", "stars": 6}])
    with pytest.raises(DataError, match=r"six.jsonl, row 31: has 6 stars, expected at most 5$"):
        task(tmp_path, source, data=data).prepare(CONFIG)


def test_two_texts_are_a_pair(tmp_path: Path) -> None:
    source = TASK.replace('    review: str = "review"', '    review: str = "review"\n'
                          '    title: str = "title"')  # fmt: skip
    rows = [{**film, "title": "red sun"} for film in films(40)]
    data = task(tmp_path, source, data=write(tmp_path / "pairs.jsonl", rows)).prepare(CONFIG)
    text = data.loaded_tokenizer.decode(tensors(data.train, [0])["input_ids"][0])
    review, _, title = text.partition("<|end|>")
    assert review.startswith("a ")
    assert title == "red sun"


def test_columns_of_encoded_rows_have_plain_types() -> None:
    encoded = Encoded.from_columns({"tokens": [[1, 2], []], "n": [3, 4], "x": [0.5, 1]}, rows_cut=1)
    table = encoded.table
    assert table.jagged("tokens").lengths.tolist() == [2, 0]
    rows = table.all()
    assert [str(rows[name].dtype) for name in ("n", "x")] == ["int64", "float32"]
    assert asdict(encoded)["counts"] == {"rows_cut": 1}


def test_the_same_column_twice_is_refused(tmp_path: Path) -> None:
    one = replace(task(tmp_path).columns, review="stars")
    with pytest.raises(ConfigError, match=r"columns.review and columns.stars are both 'stars'"):
        task(tmp_path, columns=one).prepare(CONFIG)
