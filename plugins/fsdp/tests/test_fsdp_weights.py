"""A model filled shard by shard is, bit for bit, the model that a whole load gives."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models_from_scratch import from_files, from_scratch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging

from distcore import RankInfo, Run, RunConfig, defaults, launch, train
from distcore.testing.problem import Classifier, Problem
from distcore_fsdp.strategy import FSDPStrategy

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
    """For each case, in a rank: whether the model was built whole, and the tensors that a
    whole load has otherwise.
    """
    rank_info = RankInfo(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    strategy, config = FSDPStrategy(), RunConfig(seed=SEED, device="cpu")
    world = strategy.setup(config, rank_info)
    differing_names: dict[Any, Any] = {}
    for name, (_, auto, labels) in cases.items():
        for kind, rank in {"whole": None, "adapter": 3}.items():
            one = from_files(folder / name, auto, SEED, rank, num_labels=labels)
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
        model = Classifier(dropout=torch.zeros(1).tolist()[0])
        model.load_state_dict(load_file(self.folder / "model.safetensors"))
        return model

    def weights_folder(self, config):
        return self.folder


def trained(folder, **changes):
    """The loss of its test rows after three steps."""
    out = folder / changes.get("strategy", "single")
    given = {
        "out": str(out),
        "max_steps": 3,
        "global_batch_size": 8,
        "lr": 0.01,
        "device": "cpu",
    } | changes
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


CASES = {
    "half precision": (lambda: BertForSequenceClassification(BERT).bfloat16(), CLASSIFIER, 5),
    "several files": (lambda: BertForSequenceClassification(BERT), CLASSIFIER, 5),
    "tied weights": (lambda: BertForMaskedLM(BERT), AutoModelForMaskedLM, 2),
    "rotary buffers": (
        lambda: LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0)),
        CLASSIFIER,
        2,
    ),
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
        make().save_pretrained(
            folder / name, max_shard_size="20KB" if name == "several files" else "5GB"
        )
    (folder / "no meta model").mkdir()
    save_file(Classifier().state_dict(), folder / "no meta model/model.safetensors")
    ranks = launch(differences, folder, CASES, nproc=2)
    return ranks, trained(folder / "no meta model")


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["whole", "adapter"])
@pytest.mark.parametrize("name", CASES)
def test_shards_read_from_files_equal_a_whole_load_that_no_rank_made(
    name, kind, differences_and_loss
):
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
