"""Sequence to sequence as a user runs it: what it reports, writes and
exports; under every strategy.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import strategy_chain
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from distcore import Report, RunConfig, launch, train
from distcore.cli.main import main

pytestmark = pytest.mark.programs  # its runs are whole ones

ROWS = [
    {
        "source": f"after {row}" + " comes" * (row % 4),
        "target": f"{row + 1}" + " and on" * (row % 3),
    }
    for row in range(60)
]
OPTIONS = {
    "model": "t5-tiny",
    "max_seq_len": 16,
    "max_target_len": 8,
    "dropout": 0.0,
    "label_smoothing": 0.1,
    "tokenizer": {"vocab_size": 300},
    "max_new_tokens": 0,
}
STEPS = 10


def config(folder: Path, **changes: Any) -> RunConfig:
    tree = {
        "task": "seq2seq",
        "max_steps": STEPS,
        "global_batch_size": 12,
        "lr": 0.005,
        "micro_batch_size": 3,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
    }
    options = OPTIONS | {"data": str(folder / "rows.jsonl")} | changes.pop("task_options", {})
    return RunConfig.model_validate(tree | {"task_options": options} | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seq2seq")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Report:
    """The report of one process, which also lets the model write."""
    return train(config(folder, out=str(folder / "single"), task_options={"max_new_tokens": 6}))


def predictions(folder: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (folder / "predictions.jsonl").read_text().splitlines()))


def test_a_run_reports_its_loss_and_how_like_the_targets_the_answers_are(
    plain: Report,
) -> None:
    evaluation = plain["evaluation"]
    assert 1 < evaluation["perplexity"] < math.exp(evaluation["loss"])  # the loss is smoothed
    assert evaluation["perplexity"] < plain["data"]["evaluation"]["unigram_perplexity"]
    assert 0 < evaluation["token_accuracy"] <= 1
    assert 0 <= evaluation["exact_match"] <= 1
    assert 0 < evaluation["chrf"] <= 100
    assert evaluation["evaluated"] == evaluation["dataset_size"] == 6


def test_predictions_have_source_target_and_generated_text(plain: Report, folder: Path) -> None:
    lines = predictions(folder / "single")
    assert [list(line) for line in lines] == [
        ["index", "source", "target", "generated", "loss"]
    ] * 6
    assert all({"source": line["source"], "target": line["target"]} in ROWS for line in lines)
    right = sum(line["generated"] == line["target"] for line in lines)
    assert plain["evaluation"]["exact_match"] == right / 6
    corpus = [line["generated"] for line in lines], [[line["target"] for line in lines]]
    assert plain["evaluation"]["bleu"] == sacrebleu.corpus_bleu(*corpus).score
    assert plain["evaluation"]["chrf"] == sacrebleu.corpus_chrf(*corpus).score


def test_an_exported_model_writes_what_evaluation_did(plain: Report, folder: Path) -> None:
    command = ["checkpoint", "export", str(folder / "single"), "--to", str(folder / "exported")]
    assert main(command) == 0
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder / "exported").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "exported")
    for line in predictions(folder / "single"):
        source = tokenizer(line["source"], return_tensors="pt", return_token_type_ids=False)
        made = model.generate(**source, max_new_tokens=6, do_sample=False)
        assert tokenizer.decode(made[0], skip_special_tokens=True) == line["generated"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_chain_of_checkpoints_over_all_strategies_is_one_run(plain: Report, folder: Path) -> None:
    """Each strategy goes on for two steps where another one stopped: laws 2, 5 and 7
    for tokens of targets.
    """
    strategy_chain.run_chain(folder / "chain", lambda **changes: config(folder, **changes))
    strategy_chain.assert_one_run(folder / "chain", folder / "single")


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["fsdp", pytest.param("deepspeed:3", marks=pytest.mark.slow)])
def test_sharded_ranks_write_the_same_and_do_not_wait_for_each_other(
    way: str, plain: Report, folder: Path
) -> None:
    """Six rows on two ranks in micro-batches of three, whose answers end at unlike steps."""
    if not strategy_chain.is_offered(way):
        pytest.skip(f"{way} is not installed")
    changes = strategy_chain.options_of(way) | {"nproc": 2, "task_options": {"max_new_tokens": 6}}
    launch(train, config(folder, out=str(folder / way), **changes), nproc=2)
    assert strategy_chain.generated(folder / way) == strategy_chain.generated(folder / "single")


@pytest.fixture(scope="module")
def predicted(plain: Report, folder: Path) -> list[dict[str, Any]]:
    """Predictions of one process for the sources of all rows."""
    flags = ["--data", str(folder / "rows.jsonl"), "--out", str(folder / "predicted.jsonl")]
    assert main(["predict", str(folder / "single"), *flags]) == 0
    return list(map(json.loads, (folder / "predicted.jsonl").read_text().splitlines()))


def test_sources_alone_get_what_evaluation_wrote_for_them(
    predicted: list[dict[str, Any]], folder: Path
) -> None:
    assert [list(line) for line in predicted] == [["file", "row", "source", "generated"]] * 60
    assert [(line["row"], line["source"]) for line in predicted] == [
        (number, row["source"]) for number, row in enumerate(ROWS, 1)
    ]
    answers = {line["source"]: line["generated"] for line in predicted}
    assert {
        line["source"]: line["generated"] for line in predictions(folder / "single")
    }.items() <= answers.items()


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["fsdp", pytest.param("deepspeed:3", marks=pytest.mark.slow)])
def test_sharded_ranks_predict_the_same(
    way: str, predicted: list[dict[str, Any]], folder: Path
) -> None:
    """In windows of 32 x 2 rows or fewer, the answers of which end at unlike steps."""
    if not strategy_chain.is_offered(way):
        pytest.skip(f"{way} is not installed")
    flags = [
        "--data",
        str(folder / "rows.jsonl"),
        "--out",
        str(folder / f"{way}.jsonl"),
        "--set",
        "micro_batch_size=1",
    ]
    assert main(["predict", str(folder / "single"), *flags, "--strategy", way, "--nproc", "2"]) == 0
    assert list(map(json.loads, (folder / f"{way}.jsonl").read_text().splitlines())) == predicted
