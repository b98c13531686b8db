import json
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from distcore.config import RunConfig
from distcore.errors import ConfigError, ModelError
from distcore_tasks.shared.bert import SHAPES
from distcore_tasks.shared.pretrained import check_length, load_tokenizer
from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece
from distcore_tasks.text_classification.models import build_classifier
from distcore_tasks.text_classification.options import TextOptions

CLASSES = ["sad", "glad", "mad"]


def build(**changes):
    return build_classifier(
        TextOptions(**({"model": "bert-tiny"} | changes)), CLASSES, vocab_size=100, pad=0
    )


@pytest.fixture
def folder(tmp_path):
    """A complete Hugging Face folder of a model with two classes."""
    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 24,
        "num_labels": 2,
    }
    shape = BertConfig(**sizes)
    BertForSequenceClassification(shape).save_pretrained(tmp_path / "model")
    as_transformers(train_wordpiece(["a few words"], 64)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", sorted(set(SHAPES) - {"bert-medium", "bert-base"}))
def test_a_built_in_model_has_its_layers_and_width(name):
    shape = build(model=name).config
    assert (shape.num_hidden_layers, shape.hidden_size) == (
        SHAPES[name].layers,
        SHAPES[name].hidden,
    )
    assert (shape.num_attention_heads, shape.intermediate_size) == (
        shape.hidden_size // 64,
        shape.hidden_size * 4,
    )


def test_a_built_in_model_names_its_classes_and_attends_with_sdpa():
    shape = build().config
    assert shape.id2label == {0: "sad", 1: "glad", 2: "mad"}
    assert shape.label2id["mad"] == 2
    assert shape._attn_implementation == "sdpa"


def test_a_built_in_model_has_positions_for_long_rows():
    assert build().config.max_position_embeddings == 512
    assert build(max_seq_len=700).config.max_position_embeddings == 700


def test_the_seed_makes_the_weights():
    def weights():
        torch.manual_seed(3)
        return torch.cat([parameter.flatten() for parameter in build().parameters()])

    assert torch.equal(weights(), weights())


def test_dropout_overrides_every_dropout_of_the_model():
    rates = {
        module.p for module in build(dropout=0.0).modules() if isinstance(module, torch.nn.Dropout)
    }
    assert rates == {0.0}
    assert {module.p for module in build().modules() if isinstance(module, torch.nn.Dropout)} == {
        0.1
    }


def test_only_built_in_models_start_from_scratch():
    assert TextOptions(model="bert-base").from_scratch
    assert not TextOptions(model="bert-base-chinese").from_scratch


@pytest.mark.parametrize(
    ("model", "lr"),
    [("bert-tiny", 5e-4), ("bert-mini", 5e-4), ("bert-small", 1e-4), ("bert-base-chinese", 3e-5)],
)
def test_a_model_has_the_rate_that_it_learns_at(model, lr):
    assert TextOptions(model=model).suggest(RunConfig()) == {"lr": lr}


def test_a_folder_keeps_its_encoder_and_gets_a_head_for_the_classes(folder):
    saved = BertForSequenceClassification.from_pretrained(folder)
    model = build(model=str(folder))
    assert torch.equal(
        model.bert.embeddings.word_embeddings.weight, saved.bert.embeddings.word_embeddings.weight
    )
    assert model.classifier.weight.shape == (3, 16)
    assert model.config.id2label[2] == "mad"


def test_a_folder_in_half_precision_is_loaded_in_fp32(folder):
    BertForSequenceClassification.from_pretrained(folder).bfloat16().save_pretrained(folder)
    assert {parameter.dtype for parameter in build(model=str(folder)).parameters()} == {
        torch.float32
    }


def test_loading_a_folder_prints_nothing(folder, capfd, caplog):
    caplog.set_level("WARNING", logger="distcore")  # the log names a new head
    build(model=str(folder), dropout=0.2)
    load_tokenizer(str(folder), folder)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (["config.json"], "the folder has no config.json"),
        (["model.safetensors"], r"the folder has no weights \(any of model.safetensors"),
        (["tokenizer.json"], r"the folder has no tokenizer \(any of tokenizer.json"),
    ],
)
def test_an_incomplete_folder_is_one_line(folder, removed, message):
    for name in removed:
        (folder / name).unlink()
    with pytest.raises(ModelError, match=message):
        TextOptions(model=str(folder)).model_folder()


def test_a_checkpoint_says_how_it_becomes_a_model_folder(folder):
    (folder / "manifest.json").touch()
    with pytest.raises(
        ModelError, match=r"is a checkpoint; make .*: distcore checkpoint export \S+ --to DIR"
    ):
        TextOptions(model=str(folder)).model_folder()


@pytest.mark.parametrize(
    ("content", "message"), [("{", "cannot be read"), ("{}", "has no 'model_type'")]
)
def test_a_broken_config_is_one_line(folder, content, message):
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=f"config.json {message}"):
        TextOptions(model=str(folder)).model_folder()


def test_a_config_of_an_unknown_architecture_is_one_line(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelError, match=r"^model .* cannot be loaded: .*no-such-model") as caught:
        build(model=str(folder))
    assert "\n" not in str(caught.value)


def test_damaged_weights_are_one_line(folder):
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"cannot be loaded: SafetensorError"):
        build(model=str(folder))


def test_a_damaged_tokenizer_is_one_line(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        load_tokenizer(str(folder), folder)


def test_a_missing_tokenizer_is_named(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        ModelError, match=r"tokenizer cannot be loaded from .*, which has no tokenizer\.json: "
    ):
        load_tokenizer(str(folder), folder)


def test_rows_longer_than_the_model_are_refused_before_any_work(folder):
    with pytest.raises(
        ConfigError, match=r"max_seq_len = 64: .* positions for 24 tokens; use --max-seq-len 24"
    ):
        check_length(str(folder), folder, 64)


def test_a_path_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="is a file, expected a folder"):
        TextOptions(model=str(tmp_path / "file")).model_folder()
    with pytest.raises(ModelError, match=r"\./nowhere: no such folder"):
        TextOptions(model="./nowhere").model_folder()


def test_a_misspelled_built_in_model_is_one_line_that_names_the_nearest(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError, match=r"model 'bert-tny': not built in .*\(did you mean 'bert-tiny'\?\)"
    ) as caught:
        TextOptions(model="bert-tny").model_folder()
    assert "\n" not in str(caught.value)


def test_an_impossible_hub_name_is_one_line():
    with pytest.raises(ModelError, match=r"not built in .* not a valid hub name"):
        TextOptions(model="not a name!").model_folder()
