"""Evaluation blocks of streamed documents are those that a run would store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_cases import is_streamed
from stream_cases import check_same, words, write

from distcore import DataError, RunConfig, launch, train
from distcore_data import IndexedRows
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.rows import lazy_table
from distcore_tasks.rows.blocks import write_streamed_blocks
from distcore_tasks.shared.options import Filter
from distcore_tasks.shared.streams import held_out

pytestmark = pytest.mark.programs
WINDOW = 16
CASES: dict[str, dict[str, Any]] = {
    "short documents": {"max_seq_len": 64},
    "long documents": {"max_seq_len": 3},
    "without ends": {"end_documents": False},
    "some": {"filter": Filter("kind", "^(1|2)$"), "skip_bad_rows": 3, "eval_fraction": 0.3},
    "prompts": {"max_new_tokens": 4, "samples": 3},
}


def rows(count: int) -> list[dict[str, Any]]:
    return [{"text": words(n, 40), "kind": n % 4} for n in range(count)]


def prepared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, most: int, config: RunConfig, **options: Any
) -> Any:
    """The datasets, in a cache of their own, of a stream that stores evaluation sets of at
    most so many tokens.
    """
    monkeypatch.setenv("DISTCORE_CACHE", str(folder / f"cache-{most}"))
    monkeypatch.setattr(held_out, "STORED_TOKENS", most)
    given: dict[str, Any] = {
        "data": str(folder / "rows.jsonl"),
        "stream": True,
        "max_seq_len": WINDOW,
    } | options
    return CausalLM(**given).prepare(config)


@pytest.mark.parametrize(
    ("held", "padding_free"), [(False, "off"), (True, "on")], ids=["fraction", "eval_data"]
)
@pytest.mark.parametrize("case", CASES)
def test_streamed_blocks_are_the_stored_ones(
    case: str, held: bool, padding_free: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rows.jsonl", rows(90), (7,) if case == "some" else ())
    options = CASES[case]
    if held:
        options = options | {"eval_data": {"one": str(write(tmp_path / "one.jsonl", rows(30)))}}
    config = RunConfig.model_validate({"padding_free": padding_free})
    streamed, stored = (
        prepared(tmp_path, monkeypatch, most, config, **options) for most in (0, 2**24)
    )
    one, other = streamed.evaluation, stored.evaluation
    assert is_streamed(one)
    assert not is_streamed(other)
    check_same(one, other, np.arange(len(other)))
    check_same(one, other, np.random.default_rng(0).permutation(len(other))[:7])
    if case == "prompts":
        assert [one.completion(row).tolist() for row in range(3)] == [
            other.completion(row).tolist() for row in range(3)
        ]
    kinds = ("documents", "rows", "tokens", "targets", "rows_cut")
    name = "evaluation.one" if held else "evaluation"
    assert [streamed.facts[name][kind] for kind in kinds] == [
        stored.facts[name][kind] for kind in kinds
    ]


@pytest.mark.parametrize(
    "sizes", [[9], [8], [4, 4], [4, 5], [0, 9, 0], [1, 1, 1, 1, 1, 1], [1], [20, 1, 0, 3, 1]]
)
def test_a_block_begins_where_the_one_before_ends(sizes: list[int], tmp_path: Path) -> None:
    tokens = np.arange(sum(sizes))
    documents = np.split(tokens, np.cumsum(sizes)[:-1])
    lengths = write_streamed_blocks(sizes, 4, tmp_path / "blocks")
    assert lengths.entries == len(tokens) - 1
    places = zip(
        *(np.load(tmp_path / f"blocks/{name}.npy").tolist() for name in ("firsts", "offsets")),
        strict=True,
    )
    begins = [int(documents[document][offset]) for document, offset in places]
    assert begins == [*range(0, len(tokens) - 1, 4), len(tokens) - 1]
    assert lengths[np.arange(len(lengths))].tolist() == np.diff(begins).tolist()


def test_a_long_document_is_read_once_for_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rows.jsonl", rows(20))
    write(tmp_path / "held.jsonl", [{"text": " ".join(["red"] * 500)}, *rows(5)])
    monkeypatch.setattr(lazy_table, "KEPT_TOKENS", 100)
    held = str(tmp_path / "held.jsonl")
    blocks = prepared(tmp_path, monkeypatch, 0, RunConfig(), eval_data=held).evaluation
    seen, get = list[int](), IndexedRows.__getitem__

    def counting(rows: IndexedRows, numbers: Any) -> Any:
        seen.extend(np.asarray(numbers).tolist())
        return get(rows, numbers)

    monkeypatch.setattr(IndexedRows, "__getitem__", counting)
    for block in range(20):
        blocks.batch(np.array([block]))
    assert seen == [0]


def test_a_document_that_cannot_be_used_is_named_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rows.jsonl", rows(20))
    held = str(write(tmp_path / "held.jsonl", [*rows(9), {"text": " "}]))
    with pytest.raises(
        DataError, match=r"held.jsonl, row 10: text is empty: fill it in or remove the row$"
    ):
        prepared(tmp_path, monkeypatch, 0, RunConfig(), eval_data=held)


@pytest.mark.ranks
def test_two_ranks_report_what_one_process_reports_of_stored_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rows.jsonl", rows(90))
    reports = []
    for most, ranks in ((2**24, 1), (0, 1), (0, 2)):
        options = {
            "data": str(tmp_path / "rows.jsonl"),
            "stream": True,
            "max_seq_len": WINDOW,
            "dropout": 0.0,
        }
        config = RunConfig.model_validate(
            {
                "task": "causal-lm",
                "task_options": options,
                "out": str(tmp_path / f"{most}-{ranks}"),
                "max_steps": 1,
                "global_batch_size": 8,
                "micro_batch_size": 4,
                "device": "cpu",
                "extensions": {"progress": False},
                "nproc": ranks,
                "strategy": "ddp" if ranks > 1 else "single",
            }
        )
        # of the cache entry that the ranks open
        prepared(tmp_path, monkeypatch, most, config, dropout=0.0)
        launch(train, config, nproc=ranks)
        reports.append(
            json.loads((tmp_path / f"{most}-{ranks}/report.json").read_text())["evaluation"]
        )
    stored, streamed, apart = reports
    assert streamed == stored
    assert apart["evaluated"] == stored["evaluated"] > 8
    for name in ("loss", "perplexity", "token_accuracy"):
        assert apart[name] == pytest.approx(stored[name], rel=1e-6)
