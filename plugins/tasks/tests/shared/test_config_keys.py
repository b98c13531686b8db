"""Each key that all configs of transformers have has an owner; those of form leave an
answer as it is.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_keys import OTHERS, UNDECLARED
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedConfig,
    masking_utils,
    modeling_layers,
)
from transformers.integrations import sdpa_attention

from distcore import RunConfig
from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece
from distcore_tasks.text_classification.task import TextClassification

OWNERS = {
    "the model, which transformers makes of the same config": "model_type is_encoder_decoder",
    "the task, which compares it with its own or sets it": (
        "architectures id2label label2id problem_type"
    ),
    "the load: weights are those of the files in fp32, outputs have names, no layer is cut": (
        "dtype return_dict chunk_size_feed_forward"
    ),
    "nobody: outputs that no task reads": "output_attentions output_hidden_states",
    "nobody: no answer follows from it": "transformers_version _name_or_path",
}
"""The keys of every config; the others are those of one type of model, which
its model reads itself.
"""
OF_ANY = {
    "the tests that walk over the keys of each type": [*OTHERS, *UNDECLARED, "hidden_dropout"],
    "nobody: several tokens at once, which no task predicts": [
        "logits_mup_width_multiplier",
        "mtp_hidden_states_first",
        "unpadded_vocab_size",
    ],
}
"""Keys that code of all models reads where a config has them, whether its class declares them."""
LINES = ["a red pig", "the blue cat sleeps", "a cat", "the pig sleeps on a red mat"]


def test_every_key_that_all_configs_have_has_an_owner() -> None:
    owned = " ".join(OWNERS.values()).split()
    assert len(owned) == len({*owned})
    assert {*PreTrainedConfig().to_dict()} - {*owned} == set()


def test_every_key_that_code_of_all_models_reads_has_an_owner() -> None:
    sources = map(inspect.getsource, (masking_utils, modeling_layers, sdpa_attention))
    read = re.findall(r'getattr\((?:self\.)?config, "(\w+)"', "".join(sources))
    assert "is_causal" in read
    assert {*read} - {key for keys in OF_ANY.values() for key in keys} == set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    as_transformers(train_wordpiece(LINES * 3, 80)).save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 80,
    }
    shape = BertConfig(
        **sizes, intermediate_size=16, id2label={0: "a", 1: "b"}, initializer_range=0.3
    )
    BertForSequenceClassification(shape).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "said",
    [
        {"return_dict": False},
        {"torchscript": True},
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"chunk_size_feed_forward": 2},
        {"problem_type": "regression"},
        {"dtype": "bfloat16"},
    ],
    ids=lambda said: next(iter(said)),
)
def test_a_key_of_form_leaves_answers_as_they_are(
    said: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    rows = [{"text": line, "label": "ab"[number % 2]} for number, line in enumerate(LINES)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file, answers = folder / "config.json", []
    for more in ({}, said):
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
        source = str(tmp_path / "rows.jsonl")
        task = TextClassification(model=str(folder), data=source, eval_data=source, max_seq_len=16)
        data: Any = task.prepare(RunConfig())
        model = task.build_model(RunConfig(), data).eval()
        with torch.no_grad():
            answers.append(task.loss(model, data.evaluation.batch(np.arange(len(LINES)))))
    torch.testing.assert_close(*answers, rtol=0, atol=1e-6)
