"""Classes are numbered as the head of a model with weights numbers them, and a head
for others is said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForSequenceClassification

from distcore import RunConfig
from distcore_tasks.shared.classification.heads import in_order_of_head, other_head
from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece
from distcore_tasks.text_classification.options import TextOptions
from distcore_tasks.text_classification.task import TextClassification

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def options_of(folder: Path, *classes: str) -> TextOptions:
    """Options of a model whose head is for these classes."""
    names = dict(enumerate(classes))
    shape = BertConfig(**SIZES, max_position_embeddings=32, id2label=names)
    BertForSequenceClassification(shape).save_pretrained(folder / "model")
    as_transformers(train_wordpiece(["a few words of food"], 64)).save_pretrained(folder / "model")
    rows = [[f"{name} food", name] for name in ("food", "money", "sport") for _ in range(4)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return TextOptions(data=str(folder / "rows.json"), model=str(folder / "model"), max_seq_len=16)


def test_classes_have_the_order_of_the_head(tmp_path: Path) -> None:
    options = options_of(tmp_path, "sport", "food", "money")
    assert in_order_of_head(["food", "money", "sport"], options) == ["sport", "food", "money"]
    task = TextClassification(data=options.data, model=options.model, max_seq_len=16)
    data: Any = task.prepare(RunConfig())
    assert data.classes == ("sport", "food", "money")
    assert not [line for line in data.warnings if "head" in line]
    model: Any = task.build_model(RunConfig(), data)
    assert model.config.id2label == {0: "sport", 1: "food", 2: "money"}


@pytest.mark.parametrize(
    ("head", "classes", "said"),
    [
        (("sport", "aaa", "money"), ["food", "money", "sport"], True),
        (("sport", "food", "money"), ["b", "a", "c"], True),
        (("sport", "food", "money"), ["0", "1", "2"], False),  # numbers are the places in the head
        (("LABEL_0", "LABEL_1", "LABEL_2"), ["food", "money", "sport"], False),
        # a new head, which is said elsewhere
        (("sport", "food"), ["food", "money", "sport"], False),
    ],
)
def test_a_head_for_other_classes_is_said(
    head: tuple[str, ...], classes: list[str], said: bool, tmp_path: Path
) -> None:
    options = options_of(tmp_path, *head)
    assert in_order_of_head(classes, options) == classes
    assert bool(list(other_head(classes, options))) is said


def test_a_built_in_model_has_no_head_of_its_own() -> None:
    assert in_order_of_head([1, 0], TextOptions(model="bert-tiny")) == [1, 0]
    assert not list(other_head(["b", "a"], TextOptions(model="bert-tiny")))
