"""The option ``filter`` in every task that reads files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from image_cases import encoded, pixels

from distcore import ConfigError, DataError, RunConfig
from distcore.cli.main import main
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.embedding.task import Embedding
from distcore_tasks.image_classification.task import ImageClassification
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.preference.task import Preference
from distcore_tasks.reward_model.task import RewardModel
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared.options import Filter
from distcore_tasks.text_classification.task import TextClassification
from distcore_tasks.token_classification.task import TokenClassification

EN = Filter(column="lang", matches="^en$")
PREFERENCE: list[Any] = [
    {"prompt": f"say {n}", "chosen": f"{n}", "rejected": f"not {n}"} for n in range(12)
]
CASES: dict[str, tuple[type[Any], list[dict[str, Any]]]] = {
    "causal-lm": (
        CausalLM,
        [{"prompt": f"after {n}?", "completion": f" {n + 1}"} for n in range(12)],
    ),
    "embedding": (
        Embedding,
        [{"anchor": f"after {n}?", "positive": f"{n + 1}"} for n in range(12)],
    ),
    "masked-lm": (MaskedLM, [{"text": f"text {n}"} for n in range(12)]),
    "preference": (Preference, PREFERENCE),
    "reward-model": (RewardModel, PREFERENCE),
    "seq2seq": (Seq2Seq, [{"source": f"read {n}", "target": f"wrote {n}"} for n in range(12)]),
    "text-classification": (
        TextClassification,
        [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(12)],
    ),
    "token-classification": (
        TokenClassification,
        [{"tokens": ["word", str(n)], "tags": ["O", "N"]} for n in range(12)],
    ),
}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", CASES)
def test_a_filter_keeps_what_a_file_of_these_rows_has(name: str, tmp_path: Path) -> None:
    task, rows = CASES[name]
    kept = [row | {"lang": "en"} for row in rows]
    nulls = [dict.fromkeys(rows[0], None) | {"lang": lang} for lang in ("de", None)]
    mixed = write_lines(tmp_path / "mixed.jsonl", [*kept[:6], *nulls, *kept[6:]])
    held = write_lines(tmp_path / "held.jsonl", [*nulls, *kept[:3]])
    alone = task(
        data=write_lines(tmp_path / "kept.jsonl", kept),
        eval_data=write_lines(tmp_path / "three.jsonl", kept[:3]),
    )
    filtered = task(data=mixed, eval_data=held, filter=EN).prepare(RunConfig())
    expected = alone.prepare(RunConfig())
    assert filtered.train.content == expected.train.content
    assert filtered.evaluation.content == expected.evaluation.content
    with pytest.raises(DataError, match=r"row \d+: .*null"):  # and no cache entry is taken for it
        task(data=mixed, eval_data=held).prepare(RunConfig())


def test_images_are_filtered_where_they_have_columns(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [encoded(pixels(n)) for n in range(6)]
    rows = {"image": images, "label": [0, 1, 0, 1, 0, 1], "lang": ["en"] * 4 + ["de"] * 2}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    task = ImageClassification(data=str(tmp_path / "rows.parquet"), eval_fraction=0.5, filter=EN)
    data = task.prepare(RunConfig())
    assert len(data.train) + len(data.evaluation) == 4
    (tmp_path / "photos").mkdir()
    with pytest.raises(
        DataError,
        match=r"photos: has no columns, so filter.column is for .parquet, .arrow, .tar and splits$",
    ):
        ImageClassification(data=str(tmp_path / "photos"), filter=EN).prepare(RunConfig())


def test_a_filter_has_a_column_and_a_valid_expression_and_is_not_for_embedded_rows() -> None:
    with pytest.raises(ConfigError, match=r"^filter\.matches: is missing"):
        Filter(column="lang")
    with pytest.raises(ConfigError, match=r"^filter\.column: is missing"):
        Filter(matches="zh")
    with pytest.raises(ConfigError, match=r"^filter.matches = '\(': no regular expression: "):
        Filter(column="lang", matches="(")
    for task in (TextClassification, ImageClassification):
        with pytest.raises(ConfigError, match=r"^filter.column = 'lang': .* has no such column"):
            task(filter=EN).prepare(RunConfig())


def test_a_bad_filter_ends_the_command_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(
        tmp_path / "rows.jsonl", [row | {"lang": "en"} for row in CASES["text-classification"][1]]
    )
    run = [
        "train",
        "--data",
        file,
        "--model",
        "bert-tiny",
        "--nproc",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    for column, matches in (("lang", "("), ("lang", "fr"), ("lan", "en")):
        command = [*run, "--set", f"filter.column={column}", "--set", f"filter.matches={matches}"]
        assert main(command) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
        assert not (tmp_path / "run").exists()
