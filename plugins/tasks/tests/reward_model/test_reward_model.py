"""Reward models: the loss is TRL's formula, the same under every strategy;
they predict and export.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from row_cases import row_of
from torch.nn.functional import logsigmoid

from distcore import RunConfig, train
from distcore.cli.main import main
from distcore_tasks.preference.options import Tokenizer
from distcore_tasks.reward_model.task import RewardModel

PAIRS = Path(__file__).parents[1] / "preference/pairs.jsonl"


def test_loss_and_gradient_are_trls_formula_of_answers_alone() -> None:
    task = RewardModel(
        data=str(PAIRS), max_seq_len=40, tokenizer=Tokenizer(vocab_size=400), center=0.25
    )
    data: Any = task.prepare(RunConfig())
    torch.manual_seed(0)
    model: Any = task.build_model(RunConfig(), data).eval()
    indices = np.arange(8)
    given = task.row_loss(model, data.train.batch(indices), lambda *_: None)
    losses = []
    for index in indices:
        prompt, *answers = (
            row_of(data.train, name, index) for name in ("prompt", "chosen", "rejected")
        )
        chosen, rejected = (
            model(
                input_ids=torch.tensor(np.concatenate([prompt, answer]), dtype=torch.long)[None]
            ).logits[0, 0]
            for answer in answers
        )
        losses.append(-logsigmoid(chosen - rejected) + 0.25 * (chosen + rejected) ** 2)
    expected = torch.stack(losses)
    assert torch.allclose(given, expected, rtol=1e-5, atol=1e-6)
    parameters = list(model.parameters())
    pairs = zip(
        *(torch.autograd.grad(loss.sum(), parameters) for loss in (given, expected)), strict=True
    )
    mine, theirs = (
        torch.cat([value.flatten() for value in values]) for values in zip(*pairs, strict=True)
    )
    assert float((mine - theirs).norm() / theirs.norm()) <= 1e-5


def run(out: Path, **changes: Any) -> list[dict[str, float]]:
    config: dict[str, Any] = {
        "task": "reward-model",
        "out": str(out),
        "max_steps": 3,
        "global_batch_size": 8,
        "lr": 0.01,
        "log_every": 1,
        "task_options": {
            "data": str(PAIRS),
            "max_seq_len": 40,
            "tokenizer": {"vocab_size": 400},
            "dropout": 0.1,
        },
        "device": "cpu",
        "extensions": {"progress": False},
        "optimizer": {"eps": 1e-2},
        "schedule": {"name": "constant"},
    }
    train(RunConfig.model_validate(config | changes))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


@cache
def alone(folder: Path) -> list[dict[str, float]]:
    return run(folder / "rewards-alone", micro_batch_size=8)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "options"), [("ddp", {}), ("fsdp", {}), ("deepspeed", {"stage": 3})]
)
def test_two_ranks_have_the_losses_of_one(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    one = alone(tmp_path.parent)
    two = run(
        tmp_path / "run", strategy=strategy, nproc=2, strategy_options=options, micro_batch_size=2
    )
    for name in ("train/loss", "train/accuracy", "train/margin", "train/grad_norm"):
        assert [line[name] for line in two] == pytest.approx(
            [line[name] for line in one], rel=2e-5, abs=1e-6
        )


@pytest.mark.programs
def test_a_run_predicts_and_exports_a_model_with_one_output(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run(tmp_path / "run")
    judged = tmp_path / "judged.jsonl"
    assert main(["predict", str(tmp_path / "run"), "--data", str(PAIRS), "--out", str(judged)]) == 0
    every = [json.loads(line) for line in judged.read_text().splitlines()]
    assert len(every) == 40
    command = ["checkpoint", "export", str(tmp_path / "run"), "--to", str(tmp_path / "model")]
    assert main(command) == 0
    row = json.loads(PAIRS.read_text().splitlines()[0])
    auto: Any = AutoModelForSequenceClassification
    model, tokenizer = (
        auto.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    assert model.config.num_labels == 1
    again = run(
        tmp_path / "on",
        lr=1e-12,
        task_options={
            "data": str(PAIRS),
            "model": str(tmp_path / "model"),
            "max_seq_len": 40,
            "dropout": 0.0,
        },
    )
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert json.loads((tmp_path / "on/report.json").read_text())["evaluation"][
        "loss"
    ] == pytest.approx(report["evaluation"]["loss"], rel=1e-5)
    assert again
    assert tokenizer(row["prompt"])["input_ids"]
