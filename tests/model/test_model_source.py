"""A meta model is given only where nothing is lost by it; elsewhere the reason is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from distcore import Datasets, RunConfig
from distcore.errors import MetaModelError
from distcore.model.model_source import model_source
from distcore.testing.problem import Classifier, Problem


@dataclass(frozen=True, kw_only=True)
class Built(Problem):
    by: Callable[[], nn.Module]

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return self.by()


def loads_weights(folder: Path) -> nn.Module:
    model: Any = BertForSequenceClassification
    return model.from_pretrained(folder)  # type: ignore[no-any-return]


def needs_values() -> nn.Module:
    return Classifier(dropout=torch.zeros(1).tolist()[0])


def has_values() -> nn.Module:
    model = Classifier()
    model.head.weight = nn.Parameter(torch.ones(4, 16, device="cpu"))
    return model


def keeps_a_tensor() -> nn.Module:
    model = Classifier()
    model.blocks[0].factor = torch.ones(1)
    return model


def meta_model(by: Callable[[], nn.Module]) -> nn.Module:
    task = Built(by=by)
    return model_source(RunConfig(), task, task.prepare(RunConfig())).meta_model()


@pytest.mark.parametrize(
    ("by", "reason"),
    [
        (needs_values, r"^build_model\(\) fails on the meta device: \w+Error: .*meta"),
        (has_values, r"^build_model\(\) gives head.weight values, on the meta device too$"),
        (
            keeps_a_tensor,
            (
                r"^build_model\(\) keeps a tensor as blocks.0.factor, which is no parameter and no"
                r" buffer$"
            ),
        ),
    ],
)
def test_a_model_that_cannot_be_built_without_values_says_why(
    by: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(MetaModelError, match=reason) as refused:
        meta_model(by)
    assert "\n" not in str(refused.value)


def test_a_model_that_reads_its_own_weights_has_no_meta_model(tmp_path: Path) -> None:
    small: Any = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertForSequenceClassification(BertConfig(vocab_size=30, **small)).save_pretrained(tmp_path)
    with pytest.raises(
        MetaModelError, match=r"fails on the meta device: RuntimeError: .*from_pretrained"
    ):
        meta_model(lambda: loads_weights(tmp_path))


def test_a_plain_model_has_one() -> None:
    assert all(parameter.is_meta for parameter in meta_model(Classifier).parameters())
