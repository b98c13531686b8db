"""``--skip-bad-rows N`` passes over what a task refuses, and lists it by file and row,
also of a stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import encoded, in_parquet, pixels

from distcore import ConfigError, DataError, ModelError, RunConfig
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.distillation.task import Distillation
from distcore_tasks.embedding.task import Embedding
from distcore_tasks.image_classification.task import ImageClassification
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.preference.task import Preference
from distcore_tasks.reward_model.task import RewardModel
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared.options import Filter, Order
from distcore_tasks.text_classification.task import TextClassification
from distcore_tasks.token_classification.task import TokenClassification

Row = dict[str, Any]
PAIR: Row = {"prompt": "say it", "chosen": "this", "rejected": "that"}
ANSWERS: Row = {"prompt": "say it", "completion": "this"}
CHAT: Row = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
}
TAGGED: Row = {"tokens": ["a", "b"], "tags": ["O", "N"]}
LABELED: Row = {"text": "some text", "label": "good"}
REFUSED: dict[str, tuple[Callable[..., Any], Row, dict[str, Row]]] = {
    "texts": (
        partial(MaskedLM, split_texts=False),
        {"text": "some text"},
        {"text is empty": {"text": " "}, "text is an integer": {"text": 3}},
    ),
    "documents": (CausalLM, {"text": "some text"}, {"text is missing": {"text": None}}),
    "prompts": (CausalLM, ANSWERS, {"completion is empty": {"completion": ""}}),
    "messages": (
        partial(CausalLM, form="messages"),
        CHAT,
        {
            "messages is empty": {"messages": []},
            "no message is the assistant's": {"messages": CHAT["messages"][:1]},
        },
    ),
    "pairs": (
        Seq2Seq,
        {"source": "one", "target": "two"},
        {"target is missing (null)": {"target": None}},
    ),
    "groups": (
        Embedding,
        {"anchor": "one", "positive": "two"},
        {"anchor is empty": {"anchor": " "}},
    ),
    "preferences": (
        Preference,
        PAIR,
        {
            "rejected is a list of 0": {"rejected": []},
            "chosen and rejected are the same text": {"rejected": PAIR["chosen"]},
        },
    ),
    "rewards": (RewardModel, PAIR, {"chosen is empty": {"chosen": ""}}),
    "tags": (
        TokenClassification,
        TAGGED,
        {
            "tokens is an empty list": {"tokens": [], "tags": []},
            "2 words have 1 tags": {"tags": ["O"]},
            "word 1 ('a'): tag is an integer (1), but": {"tags": [1, 2]},
            "word 2 is empty": {"tokens": ["a", ""]},
        },
    ),
    "labels": (
        TextClassification,
        LABELED,
        {
            "label is missing (null)": {"label": None},
            "label is an integer (1), but": {"label": 1},
            "label is empty": {"label": ""},
            "text is empty": {"text": ""},
        },
    ),
    "several labels": (
        partial(TextClassification, problem_type="multi_label"),
        LABELED | {"label": ["good"]},
        {
            "label is a string": {"label": "good"},
            "label 'good' is repeated": {"label": ["good", "good"]},
        },
    ),
    "numbers": (
        partial(TextClassification, problem_type="regression"),
        LABELED | {"label": 0.5},
        {"label is a boolean": {"label": True}, "label is nan": {"label": float("nan")}},
    ),
    "teacher": (
        partial(Distillation, teacher="bert-tiny"),
        LABELED,
        {"label is a float": {"label": 1.5}},
    ),
}
OTHER: dict[str, Row] = {
    "labels": {"label": "bad"},
    "teacher": {"label": "bad"},
    "numbers": {"label": 0.25},
    "several labels": {"label": ["bad"]},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))


def write(file: Path, rows: list[Row]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def prepared(make: Callable[..., Any], **options: Any) -> Any:
    return make(**options).prepare(RunConfig(global_batch_size=4, padding_free="off"))


def rows_of(case: str) -> tuple[list[Row], list[Row], list[str]]:
    """Return good rows, all rows, with bad ones at the start, in the middle and at the
    end, and their problems.
    """
    _, row, bad = REFUSED[case]
    good = [row | OTHER.get(case, {}) if n % 2 else row for n in range(12)]
    wrong = [row | change for change in bad.values()]
    first, *others = zip(bad, wrong, strict=True)
    return (
        good,
        [first[1], *good[:6], *(one for _, one in others), *good[6:], first[1]],
        [*bad, first[0]],
    )


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_a_task_refuses_are_passed_over_and_listed(case: str, tmp_path: Path) -> None:
    make = REFUSED[case][0]
    good, all_rows, problems = rows_of(case)
    alone = prepared(make, data=str(write(tmp_path / "good.jsonl", good)))
    data, most = str(write(tmp_path / "rows.jsonl", all_rows)), len(problems)
    for _ in range(2):  # the second time from the cache
        left = prepared(make, data=data, skip_bad_rows=most)
        assert (left.train.content, left.evaluation.content) == (
            alone.train.content,
            alone.evaluation.content,
        )
        places = [row + 1 for row, one in enumerate(all_rows) if one not in good]
        expected = {
            (place, what)
            for place, what in zip([places[-1], *places[1:-1], places[0]], problems, strict=True)
        }
        for place, what in expected:
            assert any(
                f"data file {data}, row {place}: {what}" in line for line in left.bad_rows
            ), (place, what)
        assert len(left.bad_rows) == most
    streamed = prepared(make, data=data, skip_bad_rows=most, stream=True)
    assert sorted(streamed.bad_rows) == sorted(left.bad_rows)
    assert len(streamed.train) == 11
    assert streamed.evaluation.content == left.evaluation.content
    for fewer in (most - 1, 0):
        with pytest.raises(DataError) as error:
            prepared(make, data=data, skip_bad_rows=fewer)
        assert str(error.value).endswith(
            f"; more bad rows than the {fewer} of --skip-bad-rows"
        ) == bool(fewer)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", REFUSED)
def test_the_first_bad_row_is_the_error_where_no_row_is_left(case: str, tmp_path: Path) -> None:
    make, row, bad = REFUSED[case]
    what, change = next(iter(bad.items()))
    data = str(write(tmp_path / "rows.jsonl", [row | change] * 2))
    with pytest.raises(DataError) as error:
        prepared(make, data=data, skip_bad_rows=9)
    assert str(error.value).startswith(f"data file {data}, row 1: {what}")


LONG = "word " * 40
CUT: dict[str, tuple[Callable[..., Any], Row, Row, str]] = {
    "prompts": (CausalLM, ANSWERS, {"prompt": LONG}, "the answer is cut off entirely"),
    "pairs": (
        partial(Seq2Seq, prefix="do:"),
        {"source": "one", "target": "two"},
        {"source": "</s>"},
        "the source is",
    ),
    "preferences": (Preference, PAIR, {"prompt": LONG}, "the answers are cut off entirely"),
    "rewards": (RewardModel, PAIR, {"prompt": LONG}, "the answers are cut off entirely"),
}


@pytest.mark.parametrize("case", CUT)
def test_rows_of_which_no_token_is_left_are_passed_over(case: str, tmp_path: Path) -> None:
    make, row, change, what = CUT[case]
    good = [{key: f"{text} {n}" for key, text in row.items()} for n in range(9)]
    data = str(write(tmp_path / "rows.jsonl", [*good[:3], row | change, *good[3:]]))
    held = str(write(tmp_path / "held.jsonl", [row | change, *good[:3]]))
    kinds = [{}, {"stream": True}]
    stored, *streamed = (
        prepared(make, data=data, eval_data=held, max_seq_len=16, skip_bad_rows=2, **kind)
        for kind in kinds
    )
    for left in (stored, *streamed):
        assert (len(left.train), len(left.evaluation)) == (9, 3)
        lines = [f"data file {held}, row 1: {what}", f"data file {data}, row 4: {what}"]
        named = sorted(left.bad_rows)
        assert [line[: len(part)] for line, part in zip(named, lines, strict=True)] == lines
        every = np.arange(9)
        for name, value in left.train.batch(every).items():
            assert value.tolist() == stored.train.batch(every)[name].tolist(), name
    for kind in kinds:
        with pytest.raises(DataError, match="more bad rows than the 1 of"):
            prepared(make, data=data, eval_data=held, max_seq_len=16, skip_bad_rows=1, **kind)


UNKNOWN: dict[str, tuple[Callable[..., Any], list[Row], Row, str]] = {
    "labels": (
        TextClassification,
        [LABELED, LABELED | {"label": "bad"}],
        {"label": "odd"},
        "label 'odd' is out of",
    ),
    "several labels": (
        partial(TextClassification, problem_type="multi_label"),
        [LABELED | {"label": ["good"]}, LABELED | {"label": ["bad"]}],
        {"label": ["bad", "odd", "other"]},
        "label 'odd' is out of range",
    ),
    "tags": (
        TokenClassification,
        [TAGGED, TAGGED],
        {"tags": ["N", "X"]},
        "tag 'X' of the word 'b' is out of range",
    ),
    "words cut off": (
        partial(TokenClassification, max_seq_len=4),
        [TAGGED, TAGGED],
        {"tokens": ["\ufeff", "\ufeff"]},
        "no word of it is left",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_rows_of_an_evaluation_set_that_do_not_fit_training_are_passed_over(
    case: str, tmp_path: Path
) -> None:
    make, good, change, what = UNKNOWN[case]
    held = [good[0] | change, *good, good[1] | change]
    files = {
        "data": write(tmp_path / "rows.jsonl", good * 6),
        "eval_data": write(tmp_path / "held.jsonl", held),
    }
    options = {name: str(file) for name, file in files.items()}
    alone = prepared(make, **options | {"eval_data": str(write(tmp_path / "good.jsonl", good))})
    left = prepared(make, **options, skip_bad_rows=2)
    assert left.evaluation.content == alone.evaluation.content
    lines = [f"data file {options['eval_data']}, row {row}: {what}" for row in (1, 4)]
    assert [line[: len(part)] for line, part in zip(left.bad_rows, lines, strict=True)] == lines
    assert [origin["row"] for origin in left.evaluation.origins()] == [2, 3]
    with pytest.raises(DataError, match=r"row 4: .*more bad rows than the 1 of"):
        prepared(make, **options, skip_bad_rows=1)


def test_images_with_labels_that_do_not_fit_are_passed_over(tmp_path: Path) -> None:
    images = [encoded(pixels(row)) for row in range(8)]
    data = in_parquet(
        tmp_path / "rows.parquet", images, ["red", "blue", " ", "red", "blue", "red", None, "blue"]
    )
    held = in_parquet(tmp_path / "held.parquet", images[:4], ["red", "green", "blue", "blue"])
    options: dict[str, Any] = {"data": str(data), "eval_data": str(held)}
    left: Any = ImageClassification(**options, skip_bad_rows=3).prepare(RunConfig())
    assert (len(left.train), len(left.evaluation)) == (6, 3)
    lines = [f"data file {held}, row 2: label 'green'", f"data file {data}, row 3: label is empty",
             f"data file {data}, row 7: label is missing"]  # fmt: skip
    assert [line[: len(part)] for line, part in zip(left.bad_rows, lines, strict=True)] == lines
    assert [origin["row"] for origin in left.evaluation.origins()] == [1, 3, 4]
    for most in (2, 1):
        with pytest.raises(DataError, match=f"more bad rows than the {most} of"):
            ImageClassification(**options, skip_bad_rows=most).prepare(RunConfig())


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_names_file_and_row_of_several_files_and_of_rows_that_are_filtered(
    stream: bool, tmp_path: Path
) -> None:
    rows = [ANSWERS | {"lang": "en" if n % 3 else "de"} for n in range(20)]
    wrong: Row = {"completion": " "}
    write(tmp_path / "one.jsonl", [*rows[:6], {"lang": "en"}, *rows[6:]])
    two = write(tmp_path / "two.jsonl", [rows[0] | wrong, *rows[:4], rows[1] | wrong])
    data, kept = str(tmp_path / "*.jsonl"), Filter("lang", "en")
    left = prepared(CausalLM, data=data, skip_bad_rows=2, filter=kept, stream=stream)
    assert len(left.train) + len(left.evaluation) == 15
    assert left.bad_rows[0].startswith(f"data file {tmp_path}/one.jsonl, row 7: no column 'prompt'")
    assert (
        left.bad_rows[1]
        == f"data file {two}, row 6: completion is empty: fill it in or remove the row"
    )
    with pytest.raises(DataError, match=r"two.jsonl, row 6: completion is empty"):
        prepared(CausalLM, data=str(two), filter=kept, stream=stream)


def test_a_mixture_knows_which_rows_of_each_source_are_left(tmp_path: Path) -> None:
    for name, number in (("web", 6), ("code", 9)):
        write(
            tmp_path / f"{name}.jsonl",
            [*[ANSWERS] * number, ANSWERS | {"prompt": LONG}, ANSWERS | {"prompt": ""}],
        )
    held = str(write(tmp_path / "held.jsonl", [ANSWERS] * 2))
    data, order = (
        f"{tmp_path}/web.jsonl,{tmp_path}/code.jsonl",
        Order(mix={"web": 1.0, "code": 1.0}),
    )
    for stream in (False, True):
        left = prepared(
            CausalLM,
            data=data,
            eval_data=held,
            max_seq_len=16,
            skip_bad_rows=4,
            order=order,
            stream=stream,
        )
        assert [len(source) for source in left.train.row_order.sources] == [6, 9]


def test_labels_of_a_csv_file_are_numbers_without_the_bad_ones(tmp_path: Path) -> None:
    lines = ["text,label", *(f"text {n},{n % 2}" for n in range(8)), 'none,""', "negative,-1"]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    left = prepared(TextClassification, data=str(tmp_path / "rows.csv"), skip_bad_rows=2)
    assert left.labels == (0, 1)
    assert [line.partition("row ")[2][:9] for line in left.bad_rows] == ["9: label ", "10: label"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("make", "columns", "same"),
    [
        (TextClassification, {"label": "text"}, "columns.text and columns.label are both 'text'"),
        (
            TextClassification,
            {"text_pair": "text"},
            "columns.text and columns.text_pair are both 'text'",
        ),
        (
            CausalLM,
            {"prompt": "text", "completion": "text"},
            "columns.prompt and columns.completion are both 'text'",
        ),
        (Seq2Seq, {"target": "source"}, "columns.source and columns.target are both 'source'"),
        (
            Embedding,
            {"positive": "anchor"},
            "columns.anchor and columns.positive are both 'anchor'",
        ),
        (
            Preference,
            {"rejected": "chosen"},
            "columns.chosen and columns.rejected are both 'chosen'",
        ),
        (
            TokenClassification,
            {"tags": "tokens"},
            "columns.tokens and columns.tags are both 'tokens'",
        ),
        (
            ImageClassification,
            {"label": "image"},
            "columns.image and columns.label are both 'image'",
        ),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", "")),
)
def test_a_column_in_two_places_is_refused(
    make: Callable[..., Any], columns: dict[str, str], same: str, stream: bool, tmp_path: Path
) -> None:
    """A text that is its own label, or an answer that is better than itself,
    trained without a word.
    """
    names = (
        "text",
        "source",
        "anchor",
        "chosen",
        "prompt",
        "completion",
        "target",
        "positive",
        "rejected",
        "label",
    )
    rows = [dict.fromkeys(names, f"text {number}") for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kind, form = type(make().columns), {"form": "prompts"} if make is CausalLM else {}

    def prepare() -> None:
        task = make(
            data=str(tmp_path / "rows.jsonl"), columns=kind(**columns), stream=stream, **form
        )
        task.prepare(RunConfig())

    with pytest.raises(ConfigError, match=f"^{same}: one would be read as the other; name another"):
        prepare()


def test_an_id_may_be_any_column(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps([f"row {n}", n % 2]) for n in range(20))
    )
    (tmp_path / "rows.csv").write_text(
        "text,label\n" + "".join(f"row {n},{n % 2}\n" for n in range(20))
    )
    columns = type(TextClassification().columns)(id="text")
    assert len(
        TextClassification(data=str(tmp_path / "rows.csv"), columns=columns)
        .prepare(RunConfig())
        .train
    )


def test_a_pointer_of_git_lfs_is_named_in_place_of_an_image_and_of_a_model(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    for name in (
        "cats/1.png",
        "dogs/1.png",
        "model/config.json",
        "model/model.safetensors",
        "arrays.npz",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(pointer)
    remedy = "is a pointer of Git LFS, not the (image|file); fetch it: git lfs pull"
    (tmp_path / "images").mkdir()
    for folder in ("cats", "dogs"):
        (tmp_path / folder).rename(tmp_path / "images" / folder)
    for data in ("images", "arrays.npz"):
        with pytest.raises(DataError, match=remedy):
            ImageClassification(data=str(tmp_path / data)).prepare(RunConfig())
    with pytest.raises(ModelError, match=rf"config\.json {remedy}, in "):
        TextClassification(model=str(tmp_path / "model")).model_folder()
