"""Weights that are read slice by slice are, bit for bit, those of a whole load, or
the reason is said.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from models_from_scratch import from_files
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
)
from transformers.utils import logging

from distcore import ModelSource
from distcore.model import build_in_parts, pretrained_slices
from distcore.model.pretrained_slices import NotSliceable, find_weights

SEED = 3
SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 50,
}
BERT = BertConfig(**(SMALL | {"num_labels": 3}))
CLASSIFIER: Any = AutoModelForSequenceClassification
IMAGES: Any = AutoModelForImageClassification
CONVOLUTIONS = "running statistics in half precision"
RESNET = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1])
logging.set_verbosity_error()
logging.disable_progress_bar()


def old_names(model: nn.Module) -> dict[str, Tensor]:
    """As files of 2019 have them."""
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): value
        for name, value in model.state_dict().items()
    }


def roberta() -> nn.Module:
    """As files of the hub have it: with a pooler that the classifier has
    not, and position numbers.
    """
    model: Any = RobertaForMaskedLM(RobertaConfig(**SMALL))
    model.roberta.pooler = RobertaModel(RobertaConfig(**SMALL)).pooler
    model.roberta.embeddings.register_buffer("position_ids", torch.arange(512)[None])
    return model  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[], Any], Any, int]] = {
    "the same head": (lambda: BertForSequenceClassification(BERT), CLASSIFIER, 3),
    "a head for more classes": (lambda: BertForSequenceClassification(BERT), CLASSIFIER, 5),
    "a base model": (lambda: BertModel(BERT), CLASSIFIER, 5),
    "another task, no pooler": (lambda: BertForMaskedLM(BERT), CLASSIFIER, 5),
    "half precision": (lambda: BertForSequenceClassification(BERT).bfloat16(), CLASSIFIER, 5),
    "several files": (lambda: BertForSequenceClassification(BERT), CLASSIFIER, 5),
    "old names": (lambda: BertForSequenceClassification(BERT), CLASSIFIER, 3),
    "tied weights": (lambda: BertForMaskedLM(BERT), AutoModelForMaskedLM, 2),
    "a part without use, old buffers": (roberta, CLASSIFIER, 5),
    CONVOLUTIONS: (lambda: ResNetForImageClassification(RESNET).bfloat16(), IMAGES, 5),
    "rotary buffers": (
        lambda: LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0)),
        CLASSIFIER,
        2,
    ),
}


def saved(folder: Path, case: str, lora: int | None) -> ModelSource:
    make, auto, labels = CASES[case]
    torch.manual_seed(0)
    model = make()
    state = old_names(model) if case == "old names" else None
    model.save_pretrained(
        folder, state_dict=state, max_shard_size="20KB" if case == "several files" else "5GB"
    )
    return from_files(folder, auto, SEED, lora, num_labels=labels)


def joined(source: ModelSource, ranks: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The meta model of ``source`` and its parameters, each read in ``ranks`` runs that do
    not end with rows.
    """
    assert source.replay is not None
    model, values = source.replay()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    runs: dict[str, dict[int, Tensor]] = {name: {} for name in sizes}
    for rank in range(ranks):
        # The original of a trained copy, which has the same values, is read elsewhere.
        places = {name: ranks - 1 - rank if "original_module" in name else rank for name in sizes}
        starts = {name: sizes[name] * place // ranks for name, place in places.items()}
        counts = {
            name: sizes[name] * (place + 1) // ranks - starts[name]
            for name, place in places.items()
        }
        for name, run in values(lambda name, at=starts, of=counts: (at[name], of[name])):  # type: ignore[misc]
            assert run.shape == (counts[name],)
            runs[name][places[name]] = run
    return model, {
        name: torch.cat([parts[place] for place in range(ranks)]) for name, parts in runs.items()
    }


def differing(source: ModelSource, ranks: int) -> list[str]:
    """The tensors that ``ranks`` ranks together have otherwise than a whole load."""
    model, values = joined(source, ranks)
    whole = source.build()
    dtypes = {name: tensor.dtype for name, tensor in whole.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dtypes
    own = {
        name: value.to(dtypes[name]).view_as(whole.get_parameter(name))
        for name, value in values.items()
    }
    own |= dict(model.named_buffers())
    wanted = dict(whole.named_parameters()) | dict(whole.named_buffers())
    assert list(own) == list(wanted)
    return [name for name, value in wanted.items() if not torch.equal(own[name], value)]


@pytest.mark.programs
@pytest.mark.parametrize("case", CASES)
def test_slices_of_any_length_are_those_of_a_whole_load(case: str, tmp_path: Path) -> None:
    assert differing(saved(tmp_path, case, None), ranks=3) == []


@pytest.mark.needs("distcore-lora")
@pytest.mark.programs
@pytest.mark.parametrize("case", [case for case in CASES if case not in CONVOLUTIONS])
def test_slices_of_a_model_with_an_adapter_are_those_of_a_whole_load(
    case: str, tmp_path: Path
) -> None:
    assert differing(saved(tmp_path, case, lora=3), ranks=3) == []


READ = pretrained_slices.Weights.read


def in_whole_rows(self: Any, name: str, start: int, count: int, shape: tuple[int, ...]) -> Tensor:
    return READ(self, name, start - start % prod(shape[1:]), count, shape)


def test_a_read_that_begins_with_its_row_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained_slices.Weights, "read", in_whole_rows)
    assert "bert.pooler.dense.weight" in differing(saved(tmp_path, "the same head", None), ranks=3)


def test_unknown_names_in_the_file_are_not_taken_for_missing_weights(tmp_path: Path) -> None:
    model = BertForSequenceClassification(BERT)
    renamed = {name.replace("query", "ask"): value for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=renamed)
    with pytest.raises(
        NotSliceable, match=r"query.weight is not in the files under that name and shape"
    ):
        find_weights(from_files(tmp_path, CLASSIFIER, SEED).meta_model(), tmp_path, SEED)


class Adapter(nn.Module):
    """A layer with a low-rank addition, named as PEFT names it."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})


class Wrapper(nn.Module):
    """Puts a model where PEFT puts it, and answers for it as PEFT does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model: Any = nn.Module()
        self.base_model.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model.model, name)


def adapted(model: Any) -> nn.Module:
    for layer in model.bert.encoder.layer:
        layer.attention.self.query = Adapter(layer.attention.self.query)
    return Wrapper(model)


def every_second_layer(model: Any) -> nn.Module:
    model.bert.encoder.layer = model.bert.encoder.layer[1::2]
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("saved_as", [BertForSequenceClassification, BertModel])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (adapted, "base_model.model.bert.embeddings.word_embeddings.weight is not in the files"),
        (Wrapper, "base_model.model.bert.embeddings.word_embeddings.weight is not in the files"),
        (every_second_layer, r"encoder.layer.1.\S+ of the files is not in the model"),
    ],
)
def test_a_model_changed_after_it_was_built_is_built_whole(
    tmp_path: Path, saved_as: Any, change: Callable[[nn.Module], nn.Module], reason: str
) -> None:
    saved_as(BERT).save_pretrained(tmp_path)
    with torch.device("meta"):
        meta_model = change(BertForSequenceClassification(BERT))
    with pytest.raises(NotSliceable, match=reason):
        find_weights(meta_model, tmp_path, SEED)


def test_a_dtype_that_a_whole_load_would_round_to_is_left_to_it(tmp_path: Path) -> None:
    BertForSequenceClassification(BERT).save_pretrained(tmp_path)
    source = from_files(tmp_path, CLASSIFIER, SEED, dtype=torch.bfloat16)
    assert source.replay is not None
    with pytest.raises(NotSliceable, match=r"is torch.bfloat16 in the model and F32 in the file"):
        source.replay()


def test_files_of_another_format_are_read_whole(tmp_path: Path) -> None:
    source = saved(tmp_path, "the same head", None)
    (file,) = tmp_path.glob("*.safetensors")
    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    file.unlink()
    assert source.replay is not None
    with pytest.raises(NotSliceable, match=f"^{tmp_path} has no safetensors files$"):
        source.replay()
    built = build_in_parts(source, "some", source.replay)
    assert not any(parameter.is_meta for parameter in built.model.parameters())
