"""Models whose sequences are split over ranks give the losses and gradients of
one process, with dropout.
"""

import os
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from row_mask_cases import RUN, forward_of, with_dropout
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
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
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from distcore import Clip, ConfigError, RankInfo, Run, RunConfig, StrategyError, defaults, launch
from distcore.model.row_dropout import use_row_masks
from distcore_mesh.context_parallel import split_sequences
from distcore_mesh.loss_parallel import SplitLogits
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.strategy import MeshStrategy

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA: dict[str, Any] = SMALL | {"num_key_value_heads": 4}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_key_value_heads": 2})),
    "llama, classifier": lambda: LlamaForSequenceClassification(LlamaConfig(**LLAMA)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**LLAMA)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=8)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**LLAMA)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    ),
}
ENCODERS: dict[str, Any] = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SMALL)),
    "bert, tokens": lambda: BertForTokenClassification(BertConfig(**SMALL | {"num_labels": 64})),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**SMALL)),
    "electra": lambda: ElectraForSequenceClassification(ElectraConfig(**SMALL, embedding_size=16)),
    "distilbert": lambda: DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, hidden_dim=48)
    ),
    "vit": lambda: ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=4)),
}
ALL = MODELS | ENCODERS
BLOCKS = [name for name in ALL if name != "phi3"]
"""Those whose blocks can have parts of sequences between split layers; phi3's plan gathers in
the middle of one.
"""
TWICE = ("llama, classifier", "mistral", "qwen2", "gpt2")
"""Those with a plan for tp and heads enough for both."""
BY_TOKENS: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
SPLIT_LOSS: dict[str, Any] = BY_TOKENS | {"loss_parallel": True}
WITH_HEAD = ("llama", "mistral", "qwen2", "qwen3", "gpt-neox")
"""Those whose plan splits the head by vocabulary."""
LENGTHS = (8, 7)
"""One divides by the ranks, one is padded; in both some rows are shorter."""


def inputs(name, length):
    torch.manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 1, 1])}
    tokens, mask = torch.randint(3, 64, (3, length)), torch.ones(3, length, dtype=torch.long)
    tokens[0, -2:] = 0
    mask[0, -2:] = 0
    labels = (
        tokens.masked_fill(mask == 0, -100)
        if (name in MODELS and "classifier" not in name) or "tokens" in name
        else torch.tensor([0, 1, 1])
    )
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def distance(name, strategy, world):
    """The largest relative error of losses, gradient norm and parameters after a
    step with two micro-batches.
    """
    torch.manual_seed(0)
    whole = with_dropout(ALL[name](), 0.3).eval()
    with torch.no_grad():
        # else a bias of 0 hides how it is added, and one that keys have is noise
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model = deepcopy(whole)
    config = RunConfig(device="cpu")
    run = Run(
        config=config, world=world, capabilities=strategy.capabilities, module=model, model=model
    )
    wrapped = strategy.wrap_model(
        run, model, lambda module: torch.optim.SGD(module.parameters(), lr=0.1)
    )
    errors = []
    if strategy.loss_parallel and name == "llama":
        errors.append(logits_error(whole, model))
        whole.zero_grad()
        model.zero_grad()
    for length in LENGTHS:
        expected, loss = (dropped(one, inputs(name, length)) for one in (whole, model))
        errors.append(float(abs(loss - expected) / expected))
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    reference.step()
    result = strategy.step(
        replace(run, optimizer=wrapped.optimizer, strategy_state=wrapped.state),
        Clip(norm=0.5, value=None),
    )
    errors.append(float(abs(result.grad_norm - norm) / norm))
    layout = wrapped.state.layout
    for at, parameter in whole.named_parameters():
        split = layout.splits.get(at)
        wanted = split.part_of(parameter, layout.rank, layout.ranks) if split else parameter
        held = model.get_parameter(at)
        held = held.full_tensor() if isinstance(held, DTensor) else held
        errors.append(float((held - wanted).detach().abs().max() / wanted.detach().abs().max()))
    return max(errors)


def dropped(model, batch):
    """The loss in training, for which the model computes activations again,
    after a backward pass.
    """
    model.train().gradient_checkpointing_enable()
    with use_row_masks(RUN), forward_of(np.array([5, 2, 9])):
        loss = model(**batch).loss
        loss.backward()
    return loss.detach()


def logits_error(whole, model):
    """How far from torch's the cross entropies of split logits and their gradients are; what else
    is done with them.
    """
    batch = inputs("llama", 7)
    labels = batch.pop("labels").flatten()
    worst = 0.0
    for reduction in ("sum", "mean", "none"):
        computed = []
        for one in (whole, model):
            logits = one(**batch).logits
            losses = cross_entropy(logits.float().flatten(0, 1), labels, reduction=reduction)
            one.zero_grad()
            (losses * torch.arange(1, 1 + losses.numel()).view_as(losses)).sum().backward()
            computed.append((losses, one.model.norm.weight.grad, logits))
        (losses, gradient, logits), (own, own_gradient, split) = computed
        assert isinstance(split, SplitLogits)
        assert type(own) is torch.Tensor
        assert (split.shape, split.size(-1), len(split)) == (logits.shape, 64, 3)
        assert torch.equal(split.argmax(-1), logits.argmax(-1))
        pairs = ((own, losses), (own_gradient, gradient), (split * 2, logits * 2))
        worst = max(worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    with torch.no_grad():
        assert type(model(**batch).logits) is torch.Tensor
    return worst


def distances(*layouts):
    """For each of ``layouts``, options whose data shards are the same and models, in a
    rank, what ``distance`` says.
    """
    strategies = [MeshStrategy(**options) for options, _ in layouts]
    rank_info = RankInfo(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    world = strategies[0].setup(RunConfig(device="cpu"), rank_info)
    errors = [
        {name: distance(name, strategy, world) for name in names}
        for strategy, (_, names) in zip(strategies, layouts, strict=True)
    ]
    defaults.teardown(world)
    return errors


@pytest.fixture(scope="module")
def ranks():
    return launch(
        distances, ({"cp": 2}, [*MODELS]), (BY_TOKENS, BLOCKS), (SPLIT_LOSS, WITH_HEAD), nproc=2
    )


@pytest.mark.ranks
@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_parts_of_sequences_is_that_of_one_process(name, ranks):
    assert max(by_heads[name] for by_heads, *_ in ranks) < 1e-5


@pytest.mark.ranks
@pytest.mark.parametrize("name", BLOCKS)
def test_a_model_with_parts_of_sequences_between_split_layers_is_exact(name, ranks):
    assert max(by_tokens[name] for _, by_tokens, _ in ranks) < 1e-5


@pytest.mark.ranks
@pytest.mark.parametrize("name", WITH_HEAD)
def test_a_model_whose_logits_stay_split_for_the_loss_is_exact(name, ranks):
    assert max(split[name] for *_, split in ranks) < 1e-5


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("other", ["tp", "shard", "replicate"])
def test_a_model_on_a_mesh_of_two_dimensions_is_exact(other):
    ranks = launch(distances, ({"cp": 2, other: 2}, TWICE if other == "tp" else [*MODELS]), nproc=4)
    assert max(max(rank.values()) for (rank,) in ranks) < 1e-5


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("other", ["shard", "replicate"])
def test_a_model_split_by_tokens_on_a_mesh_of_two_dimensions_is_exact(other):
    ranks = launch(distances, (BY_TOKENS | {other: 2}, TWICE), nproc=4)
    assert max(max(rank.values()) for (rank,) in ranks) < 1e-5


def split(model, ranks):
    return split_sequences(model, ParallelGroup(cast(ProcessGroup, None), 0, ranks), (0, 1))


def test_an_unknown_model_is_refused_with_the_list_of_known_ones():
    message = r"cp = 2: BertModel \(model type 'bert'\) is not known .*these are: llama"
    with pytest.raises(StrategyError, match=message):
        split(BertModel(BertConfig(**SMALL)), 2)


def test_heads_that_do_not_divide_name_the_numbers_that_do():
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_key_value_heads": 2}))
    message = r"cp = 4: must divide num_key_value_heads = 2 \(possible: 1, 2\)"
    with pytest.raises(StrategyError, match=message):
        split(model, 4)


def test_models_whose_blocks_are_not_known_to_compute_parts_of_sequences_are_refused():
    model = T5ForConditionalGeneration(
        T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64)
    )
    strategy = MeshStrategy(tp=2, sequence_parallel=True)
    with pytest.raises(
        StrategyError, match=r"sequence_parallel: T5.* is not known .*these are: llama"
    ):
        strategy.check_model(RunConfig(), model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "needs tp greater than 1"),
        ({"tp": 2, "cp": 2}, "not with cp"),
        ({"tp": 2, "pp": 2}, "not with pp"),
    ],
)
def test_parts_of_sequences_without_tp_or_with_what_excludes_them_are_refused(options, reason):
    strategy = MeshStrategy(sequence_parallel=True, **options)
    with pytest.raises(ConfigError, match=f"sequence_parallel = true: {reason}"):
        strategy.check_config(RunConfig(nproc=4))


def test_a_split_loss_is_refused_for_a_model_without_a_split_head():
    strategy = MeshStrategy(tp=2, loss_parallel=True)
    with pytest.raises(
        StrategyError,
        match="loss_parallel: the plan splits no head of BertForSequenceClassification",
    ):
        strategy.check_model(RunConfig(), ENCODERS["bert"]())
    with pytest.raises(ConfigError, match="loss_parallel = true: needs tp greater than 1"):
        MeshStrategy(loss_parallel=True).check_config(RunConfig(nproc=4))
    with pytest.raises(StrategyError, match="split logits are not traced"):
        strategy.traced()


def test_attention_that_is_not_in_the_registry_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | {"attn_implementation": "eager"}))
    with pytest.raises(StrategyError, match="cp = 2: does not go with 'eager' attention; use sdpa"):
        split(model, 2)
