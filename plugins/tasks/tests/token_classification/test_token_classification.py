"""Token classification as a user runs it: what it reports, predicts and
exports; under every strategy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import strategy_chain
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from distcore import Report, RunConfig, launch, train
from distcore.cli.main import main

pytestmark = pytest.mark.programs  # its runs are whole ones

WORDS = Path(__file__).with_name("words.jsonl")
ROWS = list(map(json.loads, WORDS.read_text().splitlines()))
STEPS = 10


def config(folder: Path, out: str | Path, **changes: Any) -> RunConfig:
    tree = {
        "task": "token-classification",
        "out": str(folder / out),
        "max_steps": STEPS,
        "global_batch_size": 12,
        "micro_batch_size": 3,
        "lr": 0.003,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
    }
    options = {
        "data": str(WORDS),
        "max_seq_len": 14,
        "dropout": 0.0,
        "tokenizer": {"vocab_size": 120},
    }
    return RunConfig.model_validate(tree | {"task_options": options} | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Report:
    """The report of one process."""
    return train(config(folder, "single"))


def lines(file: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, file.read_text().splitlines()))


def test_a_run_reports_entities_and_the_words_that_were_not_judged(plain: Report) -> None:
    evaluation, facts = plain["evaluation"], plain["data"]["evaluation"]
    assert evaluation["accuracy"] > facts["majority_share"]
    assert 0 < evaluation["f1"] <= 1
    assert {"precision", "recall"} < evaluation.keys()
    assert "PER" in evaluation["classification_report"]
    assert evaluation["words_cut"] == facts["words_cut"] > 0
    assert evaluation["evaluated"] == evaluation["dataset_size"] == 6


def test_predictions_have_a_tag_for_each_word(plain: Report, folder: Path) -> None:
    predictions = lines(folder / "single/predictions.jsonl")
    assert [list(line) for line in predictions] == [
        ["index", "file", "row", "label", "prediction"]
    ] * 6
    right = judged = 0
    for line in predictions:
        row = ROWS[line["row"] - 1]
        assert len(line["label"]) == len(line["prediction"]) == len(row["tokens"])
        for tag, label, prediction in zip(
            row["tags"], line["label"], line["prediction"], strict=True
        ):
            assert label in (tag, None)
            assert (label is None) == (prediction is None)
            right += label == prediction is not None
            judged += label is not None
    assert right / judged == pytest.approx(plain["evaluation"]["accuracy"])


def test_an_exported_model_tags_the_same_in_plain_transformers(plain: Report, folder: Path) -> None:
    command = ["checkpoint", "export", str(folder / "single"), "--to", str(folder / "exported")]
    assert main(command) == 0
    model: Any = AutoModelForTokenClassification.from_pretrained(folder / "exported").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "exported")
    for line in lines(folder / "single/predictions.jsonl"):
        words = ROWS[line["row"] - 1]["tokens"]
        read = tokenizer(words, is_split_into_words=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            tags = model(**read).logits[0].argmax(-1).tolist()
        answers: list[str | None] = [None] * len(words)
        for tag, word in reversed(list(zip(tags, read.word_ids(0), strict=True))):
            if word is not None:
                # the last one written is that of its first token
                answers[word] = model.config.id2label[tag]
        assert answers == line["prediction"]


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_predict_tags_the_words_of_a_file_in_order(plain: Report, folder: Path) -> None:
    """By two ranks, with ids: the tags are those that the run wrote for the same rows."""
    tested = lines(folder / "single/predictions.jsonl")
    rows = [
        {"key": f"r-{line['row']}", "tokens": ROWS[line["row"] - 1]["tokens"]} for line in tested
    ]
    (folder / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / "predicted.jsonl"
    where = f"--data {folder}/new.jsonl --out {out} --id-column key --strategy ddp --nproc 2"
    assert main(f"predict {folder}/single {where}".split()) == 0
    for number, (line, row, old) in enumerate(zip(lines(out), rows, tested, strict=True), 1):
        expected = {"row": number, "id": row["key"], "prediction": old["prediction"]}
        assert line == {"file": f"{folder}/new.jsonl"} | expected


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_two_ranks_and_a_resume_are_one_run(plain: Report, folder: Path) -> None:
    ranks = {"strategy": "ddp", "nproc": 2, "micro_batch_size": 2}
    launch(train, config(folder, "ranks", **ranks, max_steps=7), nproc=2)
    going_on = {"resume": "auto", "resume_changed": ["total_steps"]}
    launch(train, config(folder, "ranks", **ranks, **going_on), nproc=2)
    losses, whole = (strategy_chain.losses(folder / out) for out in ("ranks", "single"))
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_chain_of_checkpoints_over_all_strategies_is_one_run(plain: Report, folder: Path) -> None:
    """Each strategy goes on for two steps where another one stopped: laws 2, 5 and 7 for words."""
    strategy_chain.run_chain(folder / "chain", lambda **changes: config(folder, **changes))
    strategy_chain.assert_one_run(folder / "chain", folder / "single")
