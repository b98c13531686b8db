"""A streamed corpus: documents are read and tokenized when their step comes, and
nothing of them is stored.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shard_cases as shards
import torch
from row_cases import is_streamed

from distcore import ConfigError, DataError, RunConfig, launch, train
from distcore.plugin.batching.sampling import rank_sampler, training_plan
from distcore_data import IndexedRows, MixedRows, remote
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.rows import lazy_table
from distcore_tasks.shared.options import Order
from distcore_tasks.shared.streams import values

WORDS = ["red", "green", "blue", "tree", "sky", "sun", "moon"]
WINDOW = 16
IGNORED = -100


def texts(count: int, seed: int = 0) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(1, 40))) for _ in range(count)]


def write(file: Path, some: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    return file


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "held.jsonl", texts(20, seed=1))
    return write(tmp_path / "rows.jsonl", texts(120))


def task(corpus: Path, **options: Any) -> Any:
    given: dict[str, Any] = {
        "data": str(corpus),
        "eval_data": str(corpus.with_name("held.jsonl")),
        "stream": True,
    }
    return CausalLM(**(given | {"max_seq_len": WINDOW} | options))


def predicted(batch: dict[str, Any], row: int) -> list[int]:
    """The targets of a row, window by window."""
    targets: list[int] = batch["labels"][
        (batch["row"] == row) & (batch["labels"] != IGNORED)
    ].tolist()
    return targets


@pytest.mark.parametrize("padding_free", ["off", "on"])
@pytest.mark.parametrize("end", [True, False])
def test_each_token_of_a_document_but_its_first_is_predicted_once(
    corpus: Path, padding_free: str, end: bool
) -> None:
    write(corpus, ["red", *texts(50)])
    data = task(corpus, end_documents=end).prepare(RunConfig(padding_free=padding_free))
    rows, tokenizer = data.train, data.loaded_tokenizer
    numbers = np.array([0, 7, 33, 2])
    batch = rows.batch(numbers)
    assert batch["input_ids"].shape[1] <= WINDOW
    for place, number in enumerate(numbers.tolist()):
        tokens = (
            tokenizer(["red", *texts(50)][number])["input_ids"] + [tokenizer.eos_token_id] * end
        )
        assert sorted(predicted(batch, place)) == sorted(tokens[1:])
        assert rows.items[numbers][place] == len(tokens) - 1
        assert rows.lengths[numbers][place] == batch["lengths"][place] == max(1, len(tokens) - 1)
    assert ("position_ids" in batch) == (padding_free == "on") == (not rows.pads)
    again = rows.padded().batch(numbers)
    assert "attention_mask" in again
    assert [sorted(predicted(again, row)) for row in range(4)] == [
        sorted(predicted(batch, row)) for row in range(4)
    ]


def test_windows_of_a_document_follow_each_other(corpus: Path) -> None:
    write(corpus, [" ".join(WORDS * 20)])
    data = task(corpus).prepare(RunConfig(padding_free="off"))
    tokens = [*data.loaded_tokenizer(" ".join(WORDS * 20))["input_ids"], data.end]
    batch = data.train.batch(np.array([0]))
    read = [
        line[mask.bool()].tolist()
        for line, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert read == [
        tokens[start : start + WINDOW][: len(tokens) - 1 - start]
        for start in range(0, len(tokens) - 1, WINDOW)
    ]
    assert predicted(batch, 0) == tokens[1:]


@pytest.mark.parametrize("padding_free", ["off", "on"])
def test_each_token_has_its_place_in_the_document(corpus: Path, padding_free: str) -> None:
    """Dropout masks follow from it, whichever rows share a micro-batch."""
    rows = task(corpus).prepare(RunConfig(padding_free=padding_free)).train
    for indices in ([3, 8, 1], [8], [5, 3]):
        batch = rows.batch(np.array(indices))
        for number, row in enumerate(indices):
            here = (batch["row"] == number) & (batch["labels"] != IGNORED)
            places = batch.get("place", torch.arange(batch["row"].shape[1]).expand_as(here))[
                here
            ].tolist()
            assert sorted(places) == list(range(len(places)))
            tokens = [
                token
                for _, token in sorted(zip(places, batch["input_ids"][here].tolist(), strict=True))
            ]
            [whole] = rows.table.take(np.array([row])).each("tokens")
            assert tokens == whole.tolist()[: len(tokens)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that are read by number."""
    seen, get = list[int](), IndexedRows.__getitem__

    def counting(rows: IndexedRows, numbers: Any) -> Any:
        seen.extend(np.asarray(numbers).tolist())
        return get(rows, numbers)

    monkeypatch.setattr(IndexedRows, "__getitem__", counting)
    return seen


def test_a_stream_reads_the_rows_of_a_step_and_stores_none(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "SAMPLE", 10)
    seen, config = (
        counted(monkeypatch),
        RunConfig(global_batch_size=8, micro_batch_size=8, padding_free="on"),
    )
    rows = task(corpus, order=Order(kind="windows", window_shards=1)).prepare(config).train
    assert len(seen) == 10 + 20 + 20, (
        "the vocabulary is trained on 10; 20 are evaluated: counted, and stored"
    )
    assert (seen[0], seen[9]) == (0, 119)
    assert not list((tmp_path / "cache/sequences").glob("*/train/*"))
    seen.clear()
    plan = training_plan(config, rows)
    for micro in rank_sampler(plan, 0, 1)(0, 14):
        rows.batch(micro.indices)
    assert sorted(seen) == sorted(plan.rows(0, 14).tolist()), "each of them once"


def test_few_tokens_are_kept(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = task(corpus).prepare(RunConfig()).train
    before = [rows.lengths[np.arange(start, start + 8)].tolist() for start in range(0, 120, 8)]
    monkeypatch.setattr(lazy_table, "KEPT_TOKENS", 30)
    again = task(corpus).prepare(RunConfig()).train
    assert [
        again.lengths[np.arange(start, start + 8)].tolist() for start in range(0, 120, 8)
    ] == before
    assert 0 < sum(len(row["tokens"]) for row in again.table._kept.values()) <= 30


def test_a_mixture_has_the_rows_of_its_sources(corpus: Path) -> None:
    write(corpus.with_name("more.jsonl"), texts(30, seed=2))
    both = f"{corpus},{corpus.with_name('more.jsonl')}"
    order = Order(mix={"rows": 0.5, "more": 0.5})
    rows = task(corpus, data=both, order=order).prepare(RunConfig()).train
    assert isinstance(rows.row_order, MixedRows)
    assert [(source.start, source.stop) for source in rows.row_order.sources] == [
        (0, 120),
        (120, 150),
    ]


def test_a_resume_knows_other_documents_and_tokens(corpus: Path) -> None:
    changed: list[dict[str, Any]] = [{}, {"end_documents": False}, {"max_seq_len": 8}]
    contents = [task(corpus, **options).prepare(RunConfig()).train.content for options in changed]
    write(corpus, texts(120, seed=3))
    contents.append(task(corpus).prepare(RunConfig()).train.content)
    write(corpus.with_name("held.jsonl"), texts(5, seed=4))
    assert task(corpus).prepare(RunConfig()).train.content == contents[-1], (
        "evaluation rows are no training rows"
    )
    assert len({*contents}) == 4


def test_a_resume_knows_other_documents_of_the_same_vocabulary(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "SAMPLE", 1)
    before = task(corpus).prepare(RunConfig()).train.content
    write(corpus, [*texts(119), "moon moon"])
    assert task(corpus).prepare(RunConfig()).train.content != before


def test_the_cache_keeps_streams_and_stored_rows_apart(corpus: Path) -> None:
    for stream in (True, False, True):
        rows = task(corpus, stream=stream, form="documents").prepare(RunConfig()).train
        assert is_streamed(rows) == stream


def test_rows_are_documents_whatever_other_columns_they_have(corpus: Path) -> None:
    rows = [{"text": text, "prompt": "red", "completion": "sun"} for text in texts(9)]
    corpus.with_name("held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert task(corpus).prepare(RunConfig()).facts["form"] == "documents"


def test_shards_of_a_url(corpus: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    folder = shards.mds(tmp_path / "mds", [{"text": text} for text in texts(40)], {"text": "str"})
    system = fsspec.filesystem("memory")
    for file in folder.iterdir():
        system.pipe(f"/streamed/{file.name}", file.read_bytes())
    remote.copies_of.cache_clear()
    rows = task(corpus, data="memory://streamed").prepare(RunConfig()).train
    local = task(corpus, data=str(folder)).prepare(RunConfig()).train
    numbers = np.array([39, 0, 20])
    assert rows.batch(numbers)["input_ids"].tolist() == local.batch(numbers)["input_ids"].tolist()
    system.rm("/streamed", recursive=True)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"data": "stdlib-source"}, "data: stdlib-source comes with distcore and is no file"),
        (
            {"split_documents": True},
            "split_documents: each document is a row of its own already; leave it out",
        ),
    ],
)
def test_an_option_that_a_stream_cannot_have_is_one_line(
    corpus: Path, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        task(corpus, **options).prepare(RunConfig())
    assert str(error.value) == f"task_options.stream = true, {line}"


def test_a_document_that_cannot_be_used_is_named_when_its_step_comes(corpus: Path) -> None:
    write(corpus, [*texts(80), " ", *texts(20)])
    prepare = task(corpus).prepare
    with pytest.raises(
        DataError, match=r"rows.jsonl, row 81: text is empty: fill it in or remove the row$"
    ):
        prepare(RunConfig()).train.batch(np.array([80]))


def config(folder: Path, out: str, **changes: Any) -> RunConfig:
    tree = {
        "task": "causal-lm",
        "out": str(folder / out),
        "max_steps": 22,
        "global_batch_size": 8,
        "lr": 0.001,
        "micro_batch_size": 2,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
        "eval_at_epoch_end": False,
    }
    options = {
        "data": str(folder / "rows.jsonl"),
        "eval_data": str(folder / "held.jsonl"),
        "stream": True,
        "max_seq_len": WINDOW,
        "dropout": 0.0,
        "order": {"kind": "windows", "window_shards": 1},
    }
    return RunConfig.model_validate(tree | changes | {"task_options": options})


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.mark.ranks
@pytest.mark.programs
@pytest.mark.timeout(300)
def test_two_ranks_go_on_inside_an_epoch_as_one_process(corpus: Path, tmp_path: Path) -> None:
    """An epoch of 15 steps and the next in parts, the second of two ranks
    with a loader's worker.
    """
    train(config(tmp_path, "whole"))
    train(config(tmp_path, "parts", max_steps=17))
    more: dict[str, Any] = {
        "resume": "auto",
        "resume_changed": ["total_steps"],
        "nproc": 2,
        "strategy": "ddp",
    }
    launch(train, config(tmp_path, "parts", **more, loader={"workers": 1}), nproc=2)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    assert len(losses(tmp_path / "whole")) == 22
