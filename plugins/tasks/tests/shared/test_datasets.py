"""Datasets of datasets in every task: the same rows as a file gives, in a run, under
ranks and on resume.
"""

from __future__ import annotations

import json
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from arrow_cases import datasets, save
from image_cases import CLASSES, encoded, pixels

from distcore import DataError, Report, RunConfig, launch, train
from distcore.cli.main import main
from distcore_tasks.causal_lm.rows import CausalRows
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.causal_lm.vocabulary import train_tokenizer
from distcore_tasks.image_classification.options import Augment
from distcore_tasks.image_classification.task import ImageClassification
from distcore_tasks.rows import blocks, writing
from distcore_tasks.rows.pipeline import TokenizerInfo
from distcore_tasks.rows.sources import open_source
from distcore_tasks.rows.writing import DatasetWriter
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared import arrays, tokenize_rows
from distcore_tasks.text_classification.task import TextClassification
from distcore_tasks.token_classification.task import TokenClassification

MESSAGES = [
    [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} it is"}]
    for n in range(30)
]
CASES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "documents": (CausalLM(), [{"text": f"document {n} " * 9} for n in range(30)]),
    "prompts": (
        CausalLM(),
        [{"prompt": f"after {n}?", "completion": f" {n + 1}"} for n in range(30)],
    ),
    "messages": (CausalLM(), [{"messages": messages} for messages in MESSAGES]),
    "pairs": (Seq2Seq(), [{"source": f"read {n}", "target": f"wrote {n % 7}"} for n in range(30)]),
    "texts": (
        TextClassification(),
        [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(30)],
    ),
}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(task: Any, source: str, **options: Any) -> Any:
    return type(task)(data=source, **options).prepare(RunConfig())


@pytest.mark.parametrize("case", CASES)
def test_a_dataset_gives_the_rows_that_a_file_gives(case: str, tmp_path: Path) -> None:
    task, rows = CASES[case]
    from_file = prepared(task, write_lines(tmp_path / "rows.jsonl", rows))
    from_dataset = prepared(task, str(save(tmp_path / "set", rows, shards=3)))
    assert from_dataset.train.content == from_file.train.content
    assert from_dataset.evaluation.content == from_file.evaluation.content
    named = {"data": "", "source": ""}  # both say where rows come from
    assert {**from_dataset.facts, **named} == {**from_file.facts, **named}


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".json"])
def test_a_file_of_another_format_has_the_same_rows(suffix: str, tmp_path: Path) -> None:
    task, rows = CASES["pairs"]
    table = datasets.Dataset.from_list(rows)
    write = {
        ".parquet": table.to_parquet,
        ".csv": table.to_csv,
        ".json": lambda path: table.to_json(path, lines=False),
    }
    write[suffix](str(tmp_path / f"rows{suffix}"))
    from_lines = prepared(task, write_lines(tmp_path / "rows.jsonl", rows))
    assert prepared(task, str(tmp_path / f"rows{suffix}")).train.content == from_lines.train.content


def test_a_null_key_of_a_message_counts_as_missing(tmp_path: Path) -> None:
    """In a table every message has the keys of all messages, and templates ask whether
    a key is there.
    """
    named = [{"messages": [messages[0] | {"name": "me"}, messages[1]]} for messages in MESSAGES]
    task = CausalLM(data=str(save(tmp_path / "set", named)))
    rows = list(open_source(task.data, CausalRows(task).resolved()))
    assert rows == named


def test_classes_are_words_where_the_dataset_names_them(tmp_path: Path) -> None:
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"])
    )
    rows = [{"text": f"text {n}", "label": n % 2} for n in range(30)]
    save(tmp_path / "set", rows, features)
    assert prepared(TextClassification(), str(tmp_path / "set")).classes == ("no", "yes")


@pytest.mark.parametrize("stream", [False, True])
def test_sets_that_number_classes_otherwise_are_mapped_by_name(
    stream: bool, tmp_path: Path
) -> None:
    names = {
        "train": ["no", "yes"],
        "shards/a": ["no", "yes"],
        "shards/b": ["yes", "no"],
        "test": ["yes", "no"],
    }
    (tmp_path / "shards").mkdir()
    for name, classes in names.items():
        features = datasets.Features(
            text=datasets.Value("string"), label=datasets.ClassLabel(names=classes)
        )
        rows = [
            {"text": f"{label} {n}", "label": classes.index(label)}
            for n in range(9)
            for label in ("no", "yes")
        ]
        datasets.Dataset.from_list(rows, features=features).to_parquet(
            str(tmp_path / f"{name}.parquet")
        )
    files = {
        "eval_data": {"shards": str(tmp_path / "shards")},
        "test_data": str(tmp_path / "test.parquet"),
    }
    data = prepared(TextClassification(), str(tmp_path / "train.parquet"), stream=stream, **files)
    assert data.classes == ("no", "yes")
    for part, count in (("train", 18), ("evaluation", 36), ("test", 18)):
        labels = getattr(data, part).batch(np.arange(count))["labels"].tolist()
        assert labels == [0, 1] * (count // 2), part


@pytest.mark.parametrize("form", ["set", "rows.parquet"])
def test_classes_in_lists_are_words_where_the_dataset_names_them(form: str, tmp_path: Path) -> None:
    names = ["O", "B-PER", "I-PER"]
    tags = {
        "tokens": datasets.Sequence(datasets.Value("string")),
        "tags": datasets.Sequence(datasets.ClassLabel(names=names)),
    }
    rows = [
        {"tokens": ["Ada", "Lovelace", "sleeps", f"{n}"], "tags": [1, 2, 0, 0]} for n in range(20)
    ]
    write(tmp_path / form, rows, datasets.Features(tags))
    data = prepared(TokenClassification(), str(tmp_path / form))
    assert (data.classes, data.facts["iob"]) == (("B-PER", "I-PER", "O"), True)
    several = {
        "text": datasets.Value("string"),
        "label": datasets.Sequence(datasets.ClassLabel(names=names[1:])),
    }
    rows = [{"text": f"text {n}", "label": [n % 2]} for n in range(20)]
    write(tmp_path / f"other {form}", rows, datasets.Features(several))
    data = prepared(
        TextClassification(problem_type="multi_label"),
        str(tmp_path / f"other {form}"),
        problem_type="multi_label",
    )
    assert data.classes == ("B-PER", "I-PER")


def write(path: Path, rows: list[dict[str, Any]], features: Any) -> None:
    """Write rows as a folder of ``save_to_disk`` or a Parquet file."""
    if path.suffix:
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(path))
    else:
        save(path, rows, features)


def test_images_are_read_as_datasets_keeps_them(tmp_path: Path) -> None:
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=list(CLASSES))
    )
    rows = [
        {"image": {"bytes": encoded(pixels(n)), "path": None}, "label": n % 2} for n in range(20)
    ]
    save(tmp_path / "set", rows, features, shards=2)
    images = prepared(
        ImageClassification(), str(tmp_path / "set"), image_size=12, augment=Augment(shift=0)
    )
    assert images.classes == CLASSES
    assert len(images.train) + len(images.evaluation) == 20
    row = int(images.train.table.rows[3])
    shown = images.train.preprocessing.values(pixels(row)[None])
    assert (images.train.batch(np.asarray([3]))["pixel_values"] == shown).all()
    assert next(images.evaluation.origins())["file"] == str(tmp_path / "set")


@pytest.mark.parametrize("case", ["documents", "pairs", "texts"])
def test_splits_that_are_left_aside_are_named_with_what_takes_them(
    case: str, tmp_path: Path
) -> None:
    task, rows = CASES[case]
    save(tmp_path / "set", rows, validation=rows[:6], test=rows[:8])
    source = str(tmp_path / "set")
    line = f"dataset {source}: has splits that are not used; to use them:"
    [warning] = [line for line in prepared(task, source).warnings if "not used" in line]
    assert warning == f"{line} --eval-data {source}@validation --test-data {source}@test"
    half = prepared(task, source, eval_data=f"{source}@validation")
    assert [line for line in half.warnings if "not used" in line] == [
        f"{line} --test-data {source}@test"
    ]
    assert len(half.evaluation) > 0
    whole = prepared(task, source, eval_data=f"{source}@test", test_data=f"{source}@validation")
    assert not [line for line in whole.warnings if "not used" in line]


def test_rows_that_are_trained_on_and_a_fraction_beside_rows_are_said(tmp_path: Path) -> None:
    task, rows = CASES["texts"]
    save(tmp_path / "set", rows)
    source = str(tmp_path / "set")
    said = prepared(task, source, eval_data=source, test_data=source, eval_fraction=0.3).warnings
    for line in (
        f"--eval-data {source}: is what is trained on; its metrics say nothing about other rows",
        f"--test-data {source}: is what is trained on; its metrics say nothing about other rows",
        "--eval-fraction 0.3: not used, because --eval-data names the rows",
    ):
        assert line in said
    assert not [
        line
        for line in prepared(task, source).warnings
        if "trained on;" in line or "not used, because" in line
    ]


@pytest.mark.programs
def test_a_dataset_of_many_rows_has_some_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tokenize_rows, writing):
        monkeypatch.setattr(module, "CHARACTERS", 5_000)
    monkeypatch.setattr(arrays, "BLOCK", 2**14)
    monkeypatch.setattr(blocks, "AT_ONCE", 2**14)
    rows = [{"text": f"{'word ' * 60}{number}"} for number in range(8_000)]
    size = sum(len(row["text"]) for row in rows)
    path = str(save(tmp_path / "rows", rows))
    tokenizer = train_tokenizer(["word 1 2 3"], 300)
    del rows
    tracemalloc.start()
    try:
        pipeline = CausalRows(CausalLM(data=path)).resolved()
        texts = open_source(path, pipeline)
        encode = partial(pipeline.encode, tokenizer, TokenizerInfo(0))
        with DatasetWriter(tmp_path / "tokens", pipeline, texts, encode) as writer:
            for text in texts:
                writer.add(text)
            writer.finish()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(writer.table.jagged("tokens").values) > 500_000
    assert peak < size / 2


SEQ2SEQ = {"max_seq_len": 8, "max_target_len": 8, "dropout": 0.0, "tokenizer": {"vocab_size": 300}}


def config(data: str, out: Path, **changes: Any) -> RunConfig:
    tree = {
        "task": "seq2seq",
        "task_options": SEQ2SEQ | {"data": data},
        "max_steps": 4,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "out": str(out),
        "schedule": {"name": "constant"},
        "lr": 0.005,
    }
    return RunConfig.model_validate(tree | changes)


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A folder with the dataset ``set``, its rows as a file, and a run of
    each, ``set-run`` and ``file-run``.
    """
    folder = tmp_path_factory.mktemp("runs")
    rows = CASES["pairs"][1]
    save(folder / "set", rows, shards=2, validation=rows[:6])
    file = write_lines(folder / "rows.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DISTCORE_CACHE", str(folder / "cache"))
        report = train(config("set@train", folder / "set-run", save_every=2))
        train(config(file, folder / "file-run"))
    return folder, report


@pytest.mark.programs
def test_a_run_has_the_losses_of_the_file(runs: tuple[Path, Report]) -> None:
    folder, report = runs
    assert report["data"]["train"]["rows"] == 27
    assert losses(folder / "set-run") == losses(folder / "file-run")
    assert len(losses(folder / "set-run")) >= 4


@pytest.mark.programs
def test_the_run_is_found_from_another_folder_and_goes_on_with_the_same_rows_only(
    runs: tuple[Path, Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = runs
    monkeypatch.chdir(tmp_path)
    recorded = yaml.safe_load((folder / "set-run/config.yaml").read_text())
    assert recorded["task_options"]["data"] == f"{folder}/set@train"
    assert main(["eval", str(folder / "set-run")]) == 0
    rows = CASES["pairs"][1]
    save(tmp_path / "copy", rows)
    save(tmp_path / "changed", [*rows[:-1], {"source": "read", "target": "another"}])
    resumed = {"resume": str(folder / "set-run/checkpoints/step-00000002")}
    with pytest.raises(
        DataError, match=r"data-00000-of-00001.arrow: is not set/train/.*: rows 1 to 15 of data; "
    ):
        train(config("changed", tmp_path / "refused", **resumed))
    train(config("copy", tmp_path / "goes-on", **resumed))
    assert losses(tmp_path / "goes-on")[-1] == pytest.approx(
        losses(folder / "set-run")[-1], rel=1e-6
    )


@pytest.mark.programs
def test_a_split_is_predicted_like_a_file(
    runs: tuple[Path, Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = runs
    monkeypatch.chdir(tmp_path)
    by_source: dict[str, list[dict[str, Any]]] = {}
    for source in (
        f"{folder}/set@validation",
        write_lines(tmp_path / "rows.jsonl", CASES["pairs"][1][:6]),
    ):
        out = tmp_path / f"of{len(by_source)}.jsonl"
        assert main(["predict", str(folder / "set-run"), "--data", source, "--out", str(out)]) == 0
        by_source[source] = list(map(json.loads, out.read_text().splitlines()))
    assert [{line["file"] for line in lines} for lines in by_source.values()] == [
        {source} for source in by_source
    ]
    split, file = ([line | {"file": ""} for line in lines] for lines in by_source.values())
    assert split == file
    assert len(split) == 6


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_ranks_map_the_same_rows(runs: tuple[Path, Report]) -> None:
    folder, _ = runs
    launch(train, config(str(folder / "set"), folder / "ranks", nproc=2, strategy="ddp"), nproc=2)
    assert losses(folder / "ranks") == pytest.approx(losses(folder / "set-run"), rel=1e-5)
