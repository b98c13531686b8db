"""Embeddings train as one plain PyTorch process does with the whole batch, under every strategy
and cut of rows.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from distcore import RunConfig, train
from distcore.cli.main import main
from distcore_tasks.embedding.options import Columns, Tokenizer
from distcore_tasks.embedding.task import Embedding

ROWS = Path(__file__).with_name("triplets.jsonl")
NEGATIVE = {"columns": {"negative": "negative"}}
STEPS, RATE = 3, 0.05


def task_of(**options: Any) -> Embedding:
    settings: dict[str, Any] = {
        "data": str(ROWS),
        "tokenizer": Tokenizer(vocab_size=200),
        "dropout": 0.0,
    }
    return Embedding(**settings | options)


def run(out: Path, **changes: Any) -> list[dict[str, float]]:
    options = {
        "data": str(ROWS),
        "eval_data": str(ROWS),
        "tokenizer": {"vocab_size": 200},
        "dropout": 0.0,
    }
    config: dict[str, Any] = {
        "task": "embedding",
        "task_options": options | changes.pop("task_options", {}),
        "out": str(out),
        "max_steps": STEPS,
        "global_batch_size": 20,
        "lr": RATE,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
        "clip": {"norm": 1e6},
        "optimizer": {"name": "sgd", "weight_decay": 0.0},
    }
    train(RunConfig.model_validate(config | changes))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def same_text(one: str, other: str) -> bool:
    return one.lower() == other.lower()


@cache
def plain(symmetric: bool) -> tuple[list[float], list[float]]:
    """The losses and gradient norms of a loop of plain PyTorch: triplets, sizes 128 and 32,
    all rows at once.
    """
    task = task_of(eval_data=str(ROWS), columns=Columns(negative="negative"))
    data: Any = task.prepare(RunConfig())
    torch.manual_seed(RunConfig().seed)
    model: Any = task.build_model(RunConfig(), data).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    anchors, positives, negatives = (
        [row[name] for row in rows] for name in ("anchor", "positive", "negative")
    )
    texts = [*positives, *negatives]
    hidden = torch.zeros(20, 40, dtype=torch.bool)
    for at, text in ((at, text) for at in range(20) for text in range(40)):
        known = [p for a, p in zip(anchors, positives, strict=True) if same_text(a, anchors[at])]
        hidden[at, text] = at != text and any(
            same_text(texts[text], one) for one in [*known, anchors[at]]
        )
    assert hidden.sum() > 4  # the file has such rows
    losses, norms = [], []
    for _ in range(STEPS):
        loss = torch.zeros(())
        embeddings = []
        for some in (anchors, positives, negatives):
            inputs = data.loaded_tokenizer(some, padding=True, return_tensors="pt")
            mask, states = inputs["attention_mask"][..., None], model(**inputs).last_hidden_state
            embeddings.append((states * mask).sum(1) / mask.sum(1))
        for size in (128, 32):
            one, *others = (
                each[:, :size] / each[:, :size].norm(dim=-1, keepdim=True) for each in embeddings
            )
            logits = (20 * one @ torch.cat(others).T).masked_fill(hidden, -torch.inf)
            part = cross_entropy(logits, torch.arange(20))
            loss = loss + (
                (part + cross_entropy(logits[:, :20].T, torch.arange(20))) / 2
                if symmetric
                else part
            )
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(
            float(
                torch.nn.utils.get_total_norm(
                    [p.grad for p in model.parameters() if p.grad is not None]
                )
            )
        )
        optimizer.step()
    return losses, norms


WAYS = [
    ("single", 1, {}),
    ("ddp", 2, {}),
    ("fsdp", 2, {}),
    ("deepspeed", 2, {"stage": 3}),
    ("mesh", 2, {"shard": 2}),
]


@pytest.mark.ranks
@pytest.mark.parametrize("padding_free", ["off", "on"])
@pytest.mark.parametrize(("strategy", "nproc", "options"), WAYS)
def test_losses_and_gradients_are_those_of_plain_pytorch(
    strategy: str, nproc: int, options: dict[str, Any], padding_free: str, tmp_path: Path
) -> None:
    symmetric = strategy != "fsdp"
    lines = run(
        tmp_path / "run",
        strategy=strategy,
        nproc=nproc,
        strategy_options=options,
        micro_batch_size=5,
        padding_free=padding_free,
        task_options={"dims": [128, 32], "symmetric": symmetric, **NEGATIVE},
    )
    losses, norms = plain(symmetric)
    assert [line["train/loss"] for line in lines] == pytest.approx(losses, rel=2e-5)
    assert [line["train/grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-4)


@pytest.mark.ranks
def test_two_ranks_have_the_losses_of_one_with_dropout(tmp_path: Path) -> None:
    one = run(tmp_path / "one", task_options={"dropout": 0.1})
    two = run(
        tmp_path / "two", task_options={"dropout": 0.1}, strategy="ddp", nproc=2, micro_batch_size=5
    )
    assert [line["train/loss"] for line in two] == pytest.approx(
        [line["train/loss"] for line in one], rel=2e-5
    )


@pytest.mark.ranks
def test_an_evaluation_has_each_row_once_under_any_number_of_ranks(tmp_path: Path) -> None:
    wishes: dict[str, Any] = {"task_options": {"dims": [128, 16]}, "max_steps": 1}
    run(tmp_path / "one", **wishes)
    run(tmp_path / "two", **wishes, strategy="fsdp", nproc=2, micro_batch_size=5)
    one, two = (
        json.loads((tmp_path / name / "report.json").read_text())["evaluation"]
        for name in ("one", "two")
    )
    for name in ("loss", "accuracy_at_1", "recall_at_10", "mrr_at_10", "ndcg_at_10"):
        assert two[name] == pytest.approx(one[name], rel=1e-5)
    assert (one["evaluated"], two["unique"]) == (20, 20)
    assert one["sizes"].keys() == {"128", "16"}
    assert one["sizes"]["128"]["mrr_at_10"] == pytest.approx(one["mrr_at_10"])
    lines = [
        json.loads(line) for line in (tmp_path / "two/predictions.jsonl").read_text().splitlines()
    ]
    assert sum(line["rank"] <= 10 for line in lines) / 20 == pytest.approx(two["recall_at_10"])


def test_the_loss_of_an_evaluation_is_over_parts_of_the_size_of_a_batch() -> None:
    task = task_of(eval_data=str(ROWS))
    data: Any = task.prepare(RunConfig(global_batch_size=6))
    outputs = task.outputs(
        task.build_model(RunConfig(), data).eval(), data.evaluation.batch(np.arange(20))
    )
    outputs = {name: value.detach() for name, value in outputs.items()}
    parts = [torch.arange(20)[at::3] for at in range(3)]
    losses = [
        task.batch_loss({name: value[at] for name, value in outputs.items()}, at) * len(at)
        for at in parts
    ]
    assert task.report(outputs, data)["loss"] == pytest.approx(float(sum(losses)) / 20, rel=1e-6)


@pytest.mark.programs
def test_an_embedding_predicts_exports_and_goes_on_from_its_export(tmp_path: Path) -> None:
    run(tmp_path / "run", task_options={"pooling": "cls"})
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("what is rain for?", "salt"))
    )
    for out, words in (("one.jsonl", []), ("two.jsonl", ["--text-column", "text"])):
        told = [
            "predict",
            str(tmp_path / "run"),
            "--data",
            str(texts),
            "--out",
            str(tmp_path / out),
            *words,
        ]
        assert main(told) == 0
    lines = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [1, 2]
    assert all(len(line["embedding"]) == 128 for line in lines)
    assert [np.linalg.norm(line["embedding"]) for line in lines] == pytest.approx([1, 1], rel=1e-5)
    command = ["checkpoint", "export", str(tmp_path / "run"), "--to", str(tmp_path / "model")]
    assert main(command) == 0
    assert 'SentenceTransformer("model")' in (tmp_path / "model/README.md").read_text()
    task = task_of(model=str(tmp_path / "model"))
    assert task.pools == "cls"  # as the folder says
    data: Any = task.prepare(RunConfig())
    model = task.build_model(RunConfig(), data).eval()
    with torch.no_grad():
        inputs = data.loaded_tokenizer(["what is rain for?"], return_tensors="pt")
        states = model(**inputs).last_hidden_state[0, 0]
    assert lines[0]["embedding"] == pytest.approx((states / states.norm()).tolist(), abs=1e-5)


@pytest.mark.programs
def test_an_embedding_has_data_of_its_own() -> None:
    data: Any = Embedding().prepare(RunConfig())
    assert len(data.train) > 1000
    assert not data.warnings
