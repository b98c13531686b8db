"""Weights that do not fit a model are refused by name; a new head is named and trained."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distcore import ModelError, RunConfig
from distcore.model.model_source import source_of
from distcore_tasks.shared.matched_weights import say_once
from distcore_tasks.shared.pretrained import load_model

CLASSIFIER = "AutoModelForSequenceClassification"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import BertConfig, BertForMaskedLM

    shape = BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=20,
    )
    BertForMaskedLM(shape).save_pretrained(tmp_path)
    return tmp_path


def rename(folder: Path, change: Callable[[str], str]) -> None:
    file = folder / "model.safetensors"
    save_file(
        {change(name): value for name, value in load_file(file).items()}, file, {"format": "pt"}
    )


def load(folder: Path, device: str, kind: str = CLASSIFIER) -> None:
    with torch.device(device):
        load_model(kind, "mine", folder, None, **({"num_labels": 3} if kind == CLASSIFIER else {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        (
            lambda name: f"module.{name}",
            "lack 37 of the 41 parameters .* instead: module.bert.embeddings",
        ),
        (
            lambda name: name.replace("layer.1.", "layers.1."),
            "lack 16 of the 41 .*: bert.encoder.layer.1.attention",
        ),
        (
            lambda name: name.replace("word_embeddings", "words"),
            "lack 1 of the 41 .*: bert.embeddings.word_embeddings",
        ),
    ],
    ids=["a prefix", "a layer", "an embedding"],
)
def test_weights_that_no_file_has_are_refused_by_name(
    folder: Path, device: str, change: Callable[[str], str], lacks: str
) -> None:
    rename(folder, change)
    with pytest.raises(ModelError, match=f"^model mine: its files {lacks}"):
        load(folder, device)


@pytest.mark.parametrize("files", ["safetensors", "bin"])
def test_the_names_in_the_files_are_known_without_accelerate(
    folder: Path, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if files == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    monkeypatch.setattr(
        "transformers.integrations.accelerate.is_accelerate_available", lambda: False
    )
    drawn_before = torch.get_rng_state()
    load(folder, "meta", "AutoModelForMaskedLM")
    load(folder, "meta")
    assert torch.equal(torch.get_rng_state(), drawn_before)
    refusing: Any = import_module("transformers.integrations.accelerate")
    assert not refusing.is_accelerate_available()


def test_weights_of_16_bits_make_a_model_in_fp32_whole_or_slice_by_slice(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file(
        {name: value.bfloat16() for name, value in load_file(file).items()}, file, {"format": "pt"}
    )
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    source = source_of(
        RunConfig(), lambda: load_model(CLASSIFIER, "mine", folder, None, num_labels=3), folder
    )
    assert source.replay is not None
    for model in (source.build(), source.meta_model(), source.replay()[0]):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_how_to_generate_is_read_with_the_weights(device: str, tmp_path: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=20,
        pad_token_id=0,
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[2, 7], repetition_penalty=1.3).save_pretrained(tmp_path)
    with torch.device(device):
        model: Any = load_model("AutoModelForCausalLM", "mine", tmp_path, None)
    assert model.generation_config.eos_token_id == [2, 7]
    assert model.generation_config.repetition_penalty == 1.3


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_new_head_is_named_once(
    folder: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="distcore"):
        load(folder, device)
        load(folder, device)
    assert caplog.messages == [
        "model mine: new weights for its head: bert.pooler.dense.bias, bert.pooler.dense.weight,"
        " classifier.bias and 1 more"
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_that_all_fit_say_nothing(
    folder: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="distcore"):
        load(folder, device, "AutoModelForMaskedLM")
    assert caplog.messages == []


def test_a_weight_of_another_shape_is_refused_although_the_head_is_new(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["bert.embeddings.word_embeddings.weight"] = torch.zeros(21, 16)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"bert\.embeddings\.word_embeddings\.weight"):
        load(folder, "cpu")
