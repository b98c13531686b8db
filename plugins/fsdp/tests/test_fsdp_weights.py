"""A model filled shard by shard is, bit for bit, the model that a whole load gives."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models_from_scratch import from_scratch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
)
from transformers.utils import logging

from distcore import ModelSource, RankInfo, Run, RunConfig, World, defaults, launch, train
from distcore.testing.problem import Classifier, Problem
from distcore_fsdp.strategy import FSDPStrategy
from distcore_fsdp.weights import NotSliceable, find_weights
from distcore_lora.adapter import inject

SEED = 3
SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 50,
}
BERT = BertConfig(**(SMALL | {"num_labels": 3}))
CLASSIFIER = AutoModelForSequenceClassification
logging.set_verbosity_error()
logging.disable_progress_bar()


def source(folder, auto, labels):
    shape = AutoConfig.from_pretrained(folder, num_labels=labels)

    def build():
        torch.manual_seed(SEED)
        return auto.from_pretrained(folder, config=shape, ignore_mismatched_sizes=True).float()

    def meta_model():
        with torch.device("meta"):
            return auto.from_config(shape)

    return ModelSource(build=build, meta_model=meta_model, folder=Path(folder))


def with_lora(base):
    """The same model with an adapter; what its files lack is trained whole."""
    config = RunConfig(seed=SEED, lora={"rank": 3, "alpha": 6})

    def put_in(model):
        return inject(config, model, base.folder)

    def build():
        model = base.build()
        put_in(model)
        return model

    return ModelSource(build=build, meta_model=build, base=base, adapt=put_in)


def sharded(strategy, config, world, origin):
    """The model as ``strategy`` shards it, and whether it was ever whole."""
    built = strategy.build_model(config, world, origin)
    model = built.model
    whole = not any(parameter.is_meta for parameter in model.parameters())
    run = Run(
        config=config, world=world, capabilities=strategy.capabilities, module=model, model=model,
        strategy_state=built.state,
    )  # fmt: skip
    return strategy.wrap_model(run, model, None).model, whole


def differences(folder, cases):
    """For each case, in a rank: whether the model was built whole, and the tensors that a whole load has otherwise."""
    rank_info = RankInfo(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    strategy, config = FSDPStrategy(), RunConfig(seed=SEED, device="cpu")
    world = strategy.setup(config, rank_info)
    differing_names: dict[Any, Any] = {}
    for name, (_, auto, labels) in cases.items():
        origin = source(folder / name, auto, labels)
        for kind, one in {"whole": origin, "adapter": with_lora(origin)}.items():
            model, whole = sharded(strategy, config, world, one)
            differing_names[name, kind] = whole, differing(model, one.build())
    for name, make in FROM_SCRATCH.items():
        origin = from_scratch(make, SEED)
        model, whole = sharded(strategy, config, world, origin)
        differing_names[name] = whole, differing(model, origin.build())
    defaults.teardown(world)
    differing_names["no meta model"] = trained(folder / "no meta model", strategy="fsdp", nproc=2)
    return differing_names


@dataclass(frozen=True, kw_only=True)
class WithoutMetaModel(Problem):
    """A task whose model has weights in files, and cannot be built on the meta device."""

    folder: Path

    def build_model(self, config, data):
        return Classifier(dropout=torch.zeros(1).tolist()[0])

    def weights_folder(self, config):
        return self.folder


def trained(folder, **changes):
    """The loss of its test rows after three steps."""
    out = folder / changes.get("strategy", "single")
    given = {"out": str(out), "max_steps": 3, "global_batch_size": 8, "lr": 0.01, "device": "cpu"} | changes
    config = RunConfig.model_validate(given | {"extensions": {"progress": False}})
    return train(config, WithoutMetaModel(folder=folder))["evaluation"]["loss"]


def differing(model, expected):
    wanted = dict(expected.named_parameters()) | dict(expected.named_buffers())
    got = dict(model.named_parameters()) | dict(model.named_buffers())
    if list(got) != list(wanted):
        return ["names"]
    return [name for name in wanted if not torch.equal(gathered(got[name]), wanted[name])]


def gathered(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def old_names(model):
    """As files of 2019 have them."""
    return {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in model.state_dict().items()}


def roberta():
    """As files of the hub have it: with a pooler that the classifier has not, and position numbers."""
    model = RobertaForMaskedLM(RobertaConfig(**SMALL))
    model.roberta.pooler = RobertaModel(RobertaConfig(**SMALL)).pooler
    model.roberta.embeddings.register_buffer("position_ids", torch.arange(512)[None])
    return model


CASES = {
    "the same head": (lambda: BertForSequenceClassification(BERT), CLASSIFIER, 3),
    "a head for more classes": (lambda: BertForSequenceClassification(BERT), CLASSIFIER, 5),
    "a base model": (lambda: BertModel(BERT), CLASSIFIER, 5),
    "another task, no pooler": (lambda: BertForMaskedLM(BERT), CLASSIFIER, 5),
    "half precision": (lambda: BertForSequenceClassification(BERT).bfloat16(), CLASSIFIER, 5),
    "several files": (lambda: BertForSequenceClassification(BERT), CLASSIFIER, 5),
    "old names": (lambda: BertForSequenceClassification(BERT), CLASSIFIER, 3),
    "tied weights": (lambda: BertForMaskedLM(BERT), AutoModelForMaskedLM, 2),
    "a part without use, old buffers": (roberta, CLASSIFIER, 5),
    "rotary buffers": (lambda: LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0)), CLASSIFIER, 2),
}


FROM_SCRATCH = {
    "random": lambda: BertForSequenceClassification(BERT),
    "random, tied": lambda: BertForMaskedLM(BERT),
    "random, rotary buffers": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0)),
}


@pytest.fixture(scope="module")
def differences_and_loss(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, (make, _, _) in CASES.items():
        torch.manual_seed(0)
        model = make()
        state = old_names(model) if name == "old names" else None
        model.save_pretrained(
            folder / name, state_dict=state, max_shard_size="20KB" if name == "several files" else "5GB"
        )
    (folder / "no meta model").mkdir()
    save_file(Classifier().state_dict(), folder / "no meta model/model.safetensors")
    ranks = launch(differences, folder, CASES, nproc=2)
    return ranks, trained(folder / "no meta model")


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["whole", "adapter"])
@pytest.mark.parametrize("name", CASES)
def test_shards_read_from_files_equal_a_whole_load(name, kind, differences_and_loss):
    ranks, _ = differences_and_loss
    assert [rank[name, kind] for rank in ranks] == [(False, []), (False, [])]


@pytest.mark.ranks
@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_shards_of_random_weights_equal_a_whole_build_that_no_rank_made(name, differences_and_loss):
    ranks, _ = differences_and_loss
    assert [rank[name] for rank in ranks] == [(False, []), (False, [])]


@pytest.mark.ranks
def test_a_model_that_cannot_be_built_without_storage_is_built_whole(differences_and_loss):
    ranks, alone = differences_and_loss
    assert [rank["no meta model"] for rank in ranks] == pytest.approx([alone, alone], rel=1e-5)


def saved(folder, model):
    model.save_pretrained(folder)
    return source(folder, CLASSIFIER, 3)


def test_other_names_in_the_file_are_not_taken_for_missing_weights(tmp_path):
    model = BertForSequenceClassification(BERT)
    renamed = {name.replace("query", "ask"): value for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=renamed)
    with pytest.raises(NotSliceable, match=r"query.weight is not in the files under that name and shape"):
        find_weights(source(tmp_path, CLASSIFIER, 3).meta_model(), tmp_path, SEED)


class Adapter(nn.Module):
    """A layer with a low-rank addition, named as PEFT names it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})


class Wrapper(nn.Module):
    """Puts a model where PEFT puts it, and answers for it as PEFT does."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model.model, name)


def adapted(model):
    for layer in model.bert.encoder.layer:
        layer.attention.self.query = Adapter(layer.attention.self.query)
    return Wrapper(model)


def every_second_layer(model):
    model.bert.encoder.layer = model.bert.encoder.layer[1::2]
    return model


@pytest.mark.parametrize("saved_as", [BertForSequenceClassification, BertModel])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (adapted, "base_model.model.bert.embeddings.word_embeddings.weight is not in the files"),
        (Wrapper, "base_model.model.bert.embeddings.word_embeddings.weight is not in the files"),
        (every_second_layer, r"encoder.layer.1.\S+ of the files is not in the model"),
    ],
)
def test_a_model_changed_after_it_was_built_is_built_whole(tmp_path, saved_as, change, reason):
    saved_as(BERT).save_pretrained(tmp_path)
    with torch.device("meta"):
        meta_model = change(BertForSequenceClassification(BERT))
    with pytest.raises(NotSliceable, match=reason):
        find_weights(meta_model, tmp_path, SEED)


def test_a_dtype_that_a_whole_load_would_round_to_is_left_to_it(tmp_path):
    origin = saved(tmp_path, BertForSequenceClassification(BERT))
    with pytest.raises(NotSliceable, match=r"is torch.bfloat16 in the model and F32 in the file"):
        find_weights(origin.meta_model().bfloat16(), tmp_path, SEED)


def test_a_folder_without_safetensors_is_built_whole(tmp_path):
    origin = replace(saved(tmp_path, BertForSequenceClassification(BERT)), folder=tmp_path / "none")
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    model = FSDPStrategy().build_model(RunConfig(), world, origin).model
    assert not any(parameter.is_meta for parameter in model.parameters())
