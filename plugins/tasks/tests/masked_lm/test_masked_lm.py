"""Masked language modeling as a user runs it: what it reports and exports; resumed,
and under every strategy.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategy_chain
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from distcore import Report, RunConfig, launch, train
from distcore.cli.main import main
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.shared.jagged import IGNORED

pytestmark = pytest.mark.programs  # its runs are whole ones

TEXTS = [f"after {row} comes {row + 1}" + " and on" * (row % 5) for row in range(60)]
STEPS = 10
"""Two epochs: the masks of the second are others."""
GOING_ON = {"resume": "auto", "resume_changed": ["total_steps"]}


def config(folder: Path, out: str | Path, **changes: Any) -> RunConfig:
    tree = {
        "task": "masked-lm",
        "out": str(folder / out),
        "max_steps": STEPS,
        "global_batch_size": 12,
        "lr": 0.005,
        "micro_batch_size": 3,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
    }
    options = {
        "data": str(folder / "texts.jsonl"),
        "max_seq_len": 24,
        "dropout": 0.0,
        "tokenizer": {"vocab_size": 90},
        "mask_probability": 0.3,
    }
    return RunConfig.model_validate(tree | {"task_options": options} | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    )
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Report:
    """The report of one process."""
    return train(config(folder, "single"))


@pytest.fixture(scope="module")
def exported(plain: Report, folder: Path) -> Path:
    """The model folder of the same run."""
    command = ["checkpoint", "export", str(folder / "single"), "--to", str(folder / "exported")]
    assert main(command) == 0
    return folder / "exported"


def test_a_run_reports_loss_perplexity_and_token_accuracy_and_beats_the_frequencies(
    plain: Report, folder: Path
) -> None:
    evaluation = plain["evaluation"]
    assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))
    assert evaluation["perplexity"] < plain["data"]["evaluation"]["unigram_perplexity"]
    assert 0 < evaluation["token_accuracy"] <= 1
    assert evaluation["evaluated"] == evaluation["dataset_size"] == 6
    lines = list(map(json.loads, (folder / "single/predictions.jsonl").read_text().splitlines()))
    assert [list(line) for line in lines] == [["index", "tokens", "right", "loss"]] * 6
    tokens = sum(line["tokens"] for line in lines)
    assert tokens == plain["data"]["evaluation"]["targets"]
    assert sum(line["loss"] * line["tokens"] for line in lines) / tokens == pytest.approx(
        evaluation["loss"]
    )
    assert sum(line["right"] for line in lines) / tokens == pytest.approx(
        evaluation["token_accuracy"]
    )


def test_an_exported_model_finds_in_plain_transformers_what_evaluation_says(
    plain: Report, exported: Path, folder: Path
) -> None:
    model: Any = AutoModelForMaskedLM.from_pretrained(exported).eval()
    options = config(folder, "unused").task_options | {"model": str(exported)}
    data: Any = MaskedLM(**(options | {"tokenizer": None})).prepare(RunConfig())
    batch = data.evaluation.batch(np.arange(6))
    with torch.no_grad():
        answer = model(**batch)
    assert float(answer.loss) == pytest.approx(plain["evaluation"]["loss"], rel=1e-4)
    wanted = batch["labels"] != IGNORED
    right = (answer.logits.argmax(-1)[wanted] == batch["labels"][wanted]).float().mean()
    assert float(right) == pytest.approx(plain["evaluation"]["token_accuracy"])
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    assert (
        len(pipeline("fill-mask", str(exported))(f"after 3 comes {tokenizer.mask_token} and on"))
        == 5
    )


def test_a_resume_in_the_second_epoch_is_the_same_run_bit_for_bit(
    plain: Report, exported: Path, folder: Path
) -> None:
    train(config(folder, "stopped", max_steps=7))
    train(config(folder, "stopped", **GOING_ON))
    assert strategy_chain.losses(folder / "stopped") == strategy_chain.losses(folder / "single")
    command = ["checkpoint", "export", str(folder / "stopped"), "--to", str(folder / "again")]
    assert main(command) == 0
    one, other = (load_file(place / "model.safetensors") for place in (exported, folder / "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_two_ranks_with_loader_workers_and_a_resume_see_the_same_masks(
    plain: Report, folder: Path
) -> None:
    """Stopped in the first epoch, after 3 of its 5 steps; micro-batches of other sizes, too."""
    workers = {"strategy": "ddp", "loader": {"workers": 2}, "nproc": 2, "micro_batch_size": 2}
    launch(train, config(folder, "workers", **workers, max_steps=3), nproc=2)
    launch(train, config(folder, "workers", **workers, **GOING_ON), nproc=2)
    losses, whole = (strategy_chain.losses(folder / out) for out in ("workers", "single"))
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_chain_of_checkpoints_over_all_strategies_is_one_run(plain: Report, folder: Path) -> None:
    """Each strategy goes on for two steps where another one stopped, over two epochs of masks."""
    strategy_chain.run_chain(folder / "chain", lambda **changes: config(folder, **changes))
    strategy_chain.assert_one_run(folder / "chain", folder / "single")
