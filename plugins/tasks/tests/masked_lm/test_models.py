"""The model families: a row's loss alone and in a batch, and what transformers makes of
it; what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from distcore.config import RunConfig
from distcore.errors import ModelError
from distcore_tasks.masked_lm.models import build_model
from distcore_tasks.masked_lm.options import MaskedOptions
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.shared.bert import SHAPES
from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

TEXTS = [f"text number {row} " + "and so on " * (row % 5) for row in range(12)]
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 70,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "roberta": SMALL,
    "electra": SMALL | {"embedding_size": 32},
    "distilbert": {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
}


def saved(kind: str, folder: Path) -> str:
    """A model folder with random, large weights and a WordPiece tokenizer."""
    torch.manual_seed(0)
    model: Any = AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, **FAMILIES[kind]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / kind)
    as_transformers(train_wordpiece(TEXTS, 100)).save_pretrained(folder / kind)
    return str(folder / kind)


def task_of(folder: Path, **options: Any) -> MaskedLM:
    (folder / "texts.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    file = str(folder / "texts.json")
    given: dict[str, Any] = {
        "data": file,
        "eval_data": file,
        "dropout": 0.0,
        "mask_probability": 0.4,
    }
    return MaskedLM(**(given | options))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_row_has_one_loss_alone_and_padded_and_it_is_that_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    task = task_of(tmp_path, model=saved(kind, tmp_path), max_seq_len=64)
    data: Any = task.prepare(RunConfig())
    model: Any = task.build_model(RunConfig(), data).eval()
    assert model.config.model_type == kind
    rows = np.arange(len(data.evaluation))
    whole = data.evaluation.batch(rows)
    with torch.no_grad():
        together = task.outputs(model, whole)
        alone = [
            float(task.outputs(model, data.evaluation.batch(rows[row : row + 1]))["loss"])
            for row in rows
        ]
        assert together["tokens"].tolist() == data.evaluation.items.tolist()
        assert together["loss"].tolist() == pytest.approx(alone, rel=1e-5)
        total = float(task.loss(model, whole))
        mean = model(**whole).loss  # over the labels that are not ignored
    assert total == pytest.approx(sum(alone), rel=1e-5)
    assert total == pytest.approx(float(mean) * data.evaluation.items.sum(), rel=1e-5)
    assert 0 <= int(together["right"].sum()) <= data.evaluation.items.sum()


def change_config(folder: str, **changes: Any) -> str:
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (
            "gpt2",
            (
                "gpt2 does not find masked tokens; take a model such as BERT or RoBERTa, or another"
                " --task"
            ),
        ),
        ("convbert", "convbert lets padding take part in its answers"),
    ],
)
def test_a_model_that_does_not_serve_is_named(kind: str, problem: str, tmp_path: Path) -> None:
    model = change_config(saved("bert", tmp_path), model_type=kind)
    with pytest.raises(ModelError, match=problem):
        task_of(tmp_path, model=model, max_seq_len=64).prepare(RunConfig())


def test_a_tokenizer_without_a_mask_is_named(tmp_path: Path) -> None:
    model = saved("bert", tmp_path)
    tokenizer = as_transformers(train_wordpiece(TEXTS, 100))
    tokenizer.mask_token = None
    tokenizer.save_pretrained(model)
    with pytest.raises(
        ModelError, match="its tokenizer has no mask token, so nothing can be masked"
    ):
        task_of(tmp_path, model=model, max_seq_len=64).prepare(RunConfig())


@pytest.mark.parametrize("name", SHAPES)
def test_a_built_in_model_has_its_layers_and_width(name: str) -> None:
    with torch.device("meta"):
        config: Any = build_model(MaskedOptions(model=name), vocab_size=300, pad=0).config
    assert (config.num_hidden_layers, config.hidden_size) == (
        SHAPES[name].layers,
        SHAPES[name].hidden,
    )
