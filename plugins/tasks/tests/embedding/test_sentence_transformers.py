"""Losses, metrics and exports are those of sentence-transformers, where it is installed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from distcore import RunConfig, train
from distcore.cli.main import main
from distcore_tasks.embedding.losses import row_losses
from distcore_tasks.embedding.retrieval import metrics, ranks
from distcore_tasks.embedding.task import Embedding

theirs: Any = pytest.importorskip(
    "sentence_transformers", "6", reason="needs sentence-transformers from 6"
)
ROWS = Path(__file__).with_name("triplets.jsonl")


class Given(torch.nn.Module):
    """A model of their losses that gives embeddings which are there."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {"sentence_embedding": features["embedding"]}

    def get_embedding_dimension(self) -> int:
        return 16


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dims", [(), (16, 4)])
def test_loss_and_gradient_are_equal(columns: int, symmetric: bool, dims: tuple[int, ...]) -> None:
    losses: Any = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    torch.manual_seed(0)
    leaves = [torch.randn(9, 16, requires_grad=True) for _ in range(columns)]
    model, kind = (
        Given(),
        "MultipleNegativesSymmetricRankingLoss" if symmetric else "MultipleNegativesRankingLoss",
    )
    loss = getattr(losses, kind)(model, scale=15.0)
    loss = losses.MatryoshkaLoss(model, loss, list(dims)) if dims else loss
    expected = loss([{"embedding": leaf} for leaf in leaves], None)
    numbers = torch.stack([torch.zeros(9 * columns), torch.arange(9.0 * columns)], -1).view(
        9, columns, 2
    )
    task = Embedding(scale=15.0, symmetric=symmetric, dims=dims)
    given = row_losses(task, [normalize(leaf, dim=-1) for leaf in leaves], numbers).mean()
    torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)
    for mine, other in zip(
        torch.autograd.grad(given, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_export_gives_the_same_embeddings_and_metrics(pooling: str, tmp_path: Path) -> None:
    evaluation: Any = importlib.import_module(
        "sentence_transformers.sentence_transformer.evaluation"
    )
    options = {
        "data": str(ROWS),
        "tokenizer": {"vocab_size": 200},
        "pooling": pooling,
        "max_seq_len": 12,
    }
    config = {
        "task": "embedding",
        "task_options": options,
        "out": str(tmp_path / "run"),
        "max_steps": 3,
    }
    train(RunConfig.model_validate({**config, "device": "cpu", "extensions": {"progress": False}}))
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    texts = tmp_path / "texts.jsonl"
    every = [
        *dict.fromkeys(row["positive"] for row in rows),
        *dict.fromkeys(row["anchor"] for row in rows),
    ]
    texts.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*every, "many words " * 30])
    )
    command = ["predict", str(tmp_path / "run"), "--data", str(texts)]
    command += ["--out", str(tmp_path / "told.jsonl")]
    assert main(command) == 0
    command = ["checkpoint", "export", str(tmp_path / "run"), "--to", str(tmp_path / "model")]
    assert main(command) == 0
    mine = [
        json.loads(line)["embedding"] for line in (tmp_path / "told.jsonl").read_text().splitlines()
    ]
    model = theirs.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling", "Normalize"]
    assert (model.max_seq_length, model[1].pooling_mode) == (12, pooling)
    assert model.encode([*every, "many words " * 30]).tolist() == [
        pytest.approx(one, abs=2e-6) for one in mine
    ]

    once = list(
        {row["anchor"]: row for row in {row["positive"]: row for row in rows}.values()}.values()
    )
    at = dict(zip(every, torch.tensor(mine), strict=False))
    asked, answers = (
        torch.stack([at[row[name]] for row in once]) for name in ("anchor", "positive")
    )
    ours = metrics(ranks(asked, answers, torch.arange(2 * len(once)).view(2, -1).T))
    evaluate = evaluation.InformationRetrievalEvaluator(
        {str(number): row["anchor"] for number, row in enumerate(once)},
        {str(number): row["positive"] for number, row in enumerate(once)},
        {str(number): {str(number)} for number in range(len(once))},
    )
    told = evaluate(model)
    for name in ("accuracy", "recall", "mrr", "ndcg"):
        at_k = 1 if name == "accuracy" else 10
        assert ours[f"{name}_at_{at_k}"] == pytest.approx(told[f"cosine_{name}@{at_k}"], abs=1e-6)
