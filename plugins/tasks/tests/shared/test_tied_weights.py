"""A head that a config ties: what the files have decides, in a whole load and in slices alike."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from distcore import MetaModelError, ModelSource, RunConfig
from distcore.model.model_source import source_of
from distcore.testing.task_comparison import differing_weights
from distcore_tasks.shared import tied_weights
from distcore_tasks.shared.matched_weights import say_once
from distcore_tasks.shared.pretrained import load_model

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
T5: dict[str, Any] = {
    "vocab_size": 60,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 20,
    "num_layers": 1,
    "num_heads": 2,
}
GPT2: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": (
        "AutoModelForCausalLM",
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
        ),
    ),
    "gpt2": (
        "AutoModelForCausalLM",
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=60, bos_token_id=1, eos_token_id=2, **GPT2)
        ),
    ),
    "bert": (
        "AutoModelForMaskedLM",
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    ),
    "t5": (
        "AutoModelForSeq2SeqLM",
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    ),
}
"""A family, to its loading class and how to make a small model."""
HEADS = {"gpt2": "lm_head.weight", "llama": "lm_head.weight", "t5": "lm_head.weight"}
CASES = ("embedding alone", "head alone", "both, equal", "both, different")


@pytest.fixture(autouse=True)
def says_all() -> None:
    say_once.cache_clear()


def tensors_of(model: Any, family: str, case: str) -> tuple[dict[str, torch.Tensor], str, str]:
    """What the file has; the names of head and embedding."""
    head = HEADS.get(family, "cls.predictions.decoder.weight")
    embedding = model.all_tied_weights_keys[head]
    others = model.all_tied_weights_keys.keys() - {head}
    tensors = {
        name: value.clone() for name, value in model.state_dict().items() if name not in others
    }
    if case == "embedding alone":
        del tensors[head]
    elif case == "head alone":
        del tensors[embedding]
    elif case == "both, different":
        tensors[head] = torch.randn_like(tensors[head])
    return tensors, head, embedding


def folder_of(
    tmp_path: Path, family: str, case: str, file: str = "model.safetensors"
) -> tuple[Path, str, str]:
    torch.manual_seed(0)
    model = MODELS[family][1]()
    tensors, head, embedding = tensors_of(model, family, case)
    model.config.save_pretrained(tmp_path)
    if file.endswith(".bin"):
        torch.save(tensors, tmp_path / file)
    else:
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    return tmp_path, head, embedding


def source(family: str, folder: Path) -> ModelSource:
    make = partial(load_model, MODELS[family][0], "model", folder, None)
    return source_of(RunConfig(seed=0), make, folder)


def assert_slices_are_the_whole(loaded: ModelSource, model: Any) -> None:
    assert loaded.replay is not None
    assert differing_weights(*loaded.replay(), model) == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", MODELS)
def test_a_head_is_tied_where_the_files_have_one_or_two_equal_ones(
    family: str, case: str, tmp_path: Path
) -> None:
    folder, head, embedding = folder_of(tmp_path, family, case)
    loaded = source(family, folder)
    whole: Any = loaded.build()
    expected = type(whole).from_pretrained(folder)
    assert [name for name, _ in whole.named_parameters()] == [
        name for name, _ in expected.named_parameters()
    ]
    for name, value in expected.named_parameters():
        assert torch.equal(whole.get_parameter(name), value), name
    is_tied = whole.get_parameter(head) is whole.get_parameter(embedding)
    assert is_tied == (case != "both, different")
    meta_model = loaded.meta_model()
    assert (meta_model.get_parameter(head) is meta_model.get_parameter(embedding)) == is_tied
    assert_slices_are_the_whole(loaded, whole)


def test_pickled_weights_have_the_same_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    for case in ("both, equal", "both, different"):
        (tmp_path / case).mkdir()
        folder, _, _ = folder_of(tmp_path / case, "llama", case, "pytorch_model.bin")
        loaded = source("llama", folder)
        assert_slices_are_the_whole(loaded, loaded.build())


def test_a_model_with_two_says_so_once_and_its_config_no_longer_ties(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _, _ = folder_of(tmp_path, "llama", "both, different")
    with caplog.at_level(logging.INFO, "distcore"):
        loaded = source("llama", folder)
        models: list[Any] = [loaded.meta_model(), loaded.build()]
    assert [model.config.tie_word_embeddings for model in models] == [False, False]
    lines = [record.message for record in caplog.records if "config.json ties" in record.message]
    assert lines == [
        "model model: config.json ties lm_head.weight to model.embed_tokens.weight, but its files"
        " have two that differ: both are kept, and each is trained by itself"
    ]


def test_a_t5_whose_config_says_that_its_head_is_its_own_has_it_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _, _ = folder_of(tmp_path, "t5", "both, different")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    del config["scale_decoder_outputs"]  # which older files, such as those of T5 v1.1, do not have
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "distcore"):
        loaded = source("t5", folder)
        whole: Any = loaded.build()
    assert_slices_are_the_whole(loaded, whole)
    # An encoder still has the embedding of the decoder, which no config may untie.
    assert whole.config.tie_word_embeddings is True
    assert whole.config.scale_decoder_outputs is False
    assert caplog.records == []


def test_large_weights_are_compared_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tied_weights, "COMPARED_AT_ONCE", 7 * 16)
    monkeypatch.setattr("distcore.model.pretrained_slices.COMPARED_AT_ONCE", 7 * 16)
    folder, head, embedding = folder_of(tmp_path, "gpt2", "both, equal")
    assert_slices_are_the_whole(loaded := source("gpt2", folder), loaded.build())
    tensors, _, _ = tensors_of(MODELS["gpt2"][1](), "gpt2", "both, equal")
    tensors[head][59, 15] += 1  # the last of all
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    meta_model = source("gpt2", folder).meta_model()
    assert meta_model.get_parameter(head) is not meta_model.get_parameter(embedding)


def test_weights_under_unknown_names_are_left_to_a_whole_load(tmp_path: Path) -> None:
    folder, _, _ = folder_of(tmp_path, "llama", "both, different")
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    with pytest.raises(MetaModelError, match=r"^lm_head.weights has another name in the files"):
        tied_weights.differ_in_files(model, folder, "lm_head.weights", "model.embed_tokens.weight")
