"""Decoders whose sequences are split over ranks give the losses and gradients of one process."""

import os
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from distcore import Clip, RankInfo, Run, RunConfig, StrategyError, launch
from distcore_mesh.group import Group
from distcore_mesh.mesh import MeshStrategy
from distcore_mesh.sequences import split_sequences

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA: dict[str, Any] = SMALL | {"num_key_value_heads": 4}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_key_value_heads": 2})),
    "llama, classifier": lambda: LlamaForSequenceClassification(LlamaConfig(**LLAMA)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**LLAMA)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=8)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**LLAMA)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)),
}
TWICE = ("llama, classifier", "mistral", "qwen2", "gpt2")
"""Those with a plan for tp and heads enough for both."""
LENGTHS = (8, 7)
"""One divides by the ranks, one is padded; in both some rows are shorter."""


def inputs(name, length):
    torch.manual_seed(1)
    tokens, mask = torch.randint(3, 64, (3, length)), torch.ones(3, length, dtype=torch.long)
    tokens[0, -2:] = 0
    mask[0, -2:] = 0
    labels = torch.tensor([0, 1, 1]) if "classifier" in name else tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def distance(name, strategy, world):
    """The largest relative error of losses, gradient norm and parameters after a step with two micro-batches."""
    torch.manual_seed(0)
    whole = MODELS[name]().eval()
    model = deepcopy(whole)
    config = RunConfig(device="cpu")
    run = Run(config=config, world=world, capabilities=strategy.capabilities, module=model, model=model)
    wrapped = strategy.wrap_model(run, model, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    errors = []
    for length in LENGTHS:
        expected, loss = whole(**inputs(name, length)).loss, model(**inputs(name, length)).loss
        expected.backward()
        loss.backward()
        errors.append(float(abs(loss - expected) / expected))
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    reference.step()
    result = strategy.step(replace(run, optimizer=wrapped.optimizer), Clip(norm=0.5, value=None))
    errors.append(float(abs(result.grad_norm - norm) / norm))
    layout = vars(model)["distcore_layout"]
    for at, parameter in whole.named_parameters():
        split = layout.splits.get(at)
        wanted = split.part_of(parameter, layout.rank, layout.ranks) if split else parameter
        held = model.get_parameter(at)
        held = held.full_tensor() if isinstance(held, DTensor) else held
        errors.append(float((held - wanted).detach().abs().max() / wanted.detach().abs().max()))
    return max(errors)


def distances(options):
    strategy = MeshStrategy(**options)
    rank_info = RankInfo(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    world = strategy.setup(RunConfig(device="cpu"), rank_info)
    names = TWICE if strategy.tp > 1 else MODELS
    found = {name: distance(name, strategy, world) for name in names}
    strategy.teardown(world)
    return found


@pytest.fixture(scope="module")
def found():
    return launch(distances, {"cp": 2}, nproc=2)


@pytest.mark.ranks
@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_parts_of_sequences_is_that_of_one_process(name, found):
    assert max(rank[name] for rank in found) < 1e-5


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("other", ["tp", "shard", "replicate"])
def test_so_is_one_on_a_mesh_of_two_dimensions(other):
    found = launch(distances, {"cp": 2, other: 2}, nproc=4)
    assert max(max(rank.values()) for rank in found) < 1e-5


def split(model, ranks):
    return split_sequences(model, Group(cast(ProcessGroup, None), 0, ranks), 1)


def test_other_models_are_refused_with_those_that_go():
    message = r"cp = 2: BertModel \(model type 'bert'\) is not known .*these are: llama"
    with pytest.raises(StrategyError, match=message):
        split(BertModel(BertConfig(**SMALL)), 2)


def test_heads_that_do_not_divide_name_the_numbers_that_do():
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_key_value_heads": 2}))
    message = r"cp = 4: must divide num_key_value_heads = 2 \(possible: 1, 2\)"
    with pytest.raises(StrategyError, match=message):
        split(model, 4)


def test_attention_that_is_not_in_the_registry_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | {"attn_implementation": "eager"}))
    with pytest.raises(StrategyError, match="cp = 2: does not go with 'eager' attention; use sdpa"):
        split(model, 2)
