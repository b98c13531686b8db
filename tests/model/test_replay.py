"""Random weights that are drawn one tensor at a time are those of the model built whole, or
the reason is said.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    ModernBertConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
    ResNetConfig,
    T5Config,
    ViTConfig,
)

from distcore.errors import MetaModelError
from distcore.model.deferred_init import recording, replay
from distcore.plugin.strategy.contract import LocalRange

SEED = 3
SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
IMAGES: dict[str, Any] = SMALL | {"image_size": 8, "patch_size": 4}
TEXT: Any = AutoModelForSequenceClassification
CAUSAL: Any = AutoModelForCausalLM
IMAGE: Any = AutoModelForImageClassification
SEQ2SEQ: Any = AutoModelForSeq2SeqLM
MODELS: dict[str, tuple[Any, PretrainedConfig]] = {
    "bert": (TEXT, BertConfig(**SMALL)),
    "gpt2": (
        CAUSAL,
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=200, bos_token_id=1, eos_token_id=2),
    ),
    "llama": (CAUSAL, LlamaConfig(**SMALL)),
    "llama, tied": (CAUSAL, LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "qwen3": (CAUSAL, Qwen3Config(**SMALL)),
    "neox": (CAUSAL, GPTNeoXConfig(**SMALL)),
    "opt": (CAUSAL, OPTConfig(**SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32})),
    "mixtral": (CAUSAL, MixtralConfig(**SMALL)),
    "mamba": (CAUSAL, MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=200)),
    "t5": (
        SEQ2SEQ,
        T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=200),
    ),
    "resnet": (
        IMAGE,
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
    ),
}
WHOLE: dict[str, tuple[Any, PretrainedConfig]] = {
    "modernbert": (TEXT, ModernBertConfig(**SMALL)),
    "vit": (IMAGE, ViTConfig(**IMAGES)),
}
"""Types of models whose code asks for values while they are built."""


def of_torch() -> nn.Module:
    """Layers of torch, with a tied weight, and one that is written in part a second time."""
    layers = nn.Sequential(
        nn.Linear(5, 7),
        nn.TransformerEncoderLayer(8, 2),
        nn.GRU(3, 4),
        nn.BatchNorm1d(4),
        nn.Conv2d(2, 3, 3),
        nn.Embedding(5, 3, padding_idx=0),
        nn.Linear(3, 5, bias=False),
    )
    layers[6].weight = layers[5].weight
    with torch.no_grad():
        first = cast(nn.Linear, layers[0])
        first.weight[2:4].normal_()
        first.bias.copy_(first.weight[:, 0])
    return layers


def has_values() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.from_numpy(np.ones((2, 2), np.float32)))
    return layer


def meta_model(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def all_of(module: nn.Module) -> LocalRange:
    return lambda name: (0, module.get_parameter(name).numel())


def check_replayed(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(SEED)
    whole = build()
    state = torch.get_rng_state()
    module, values = replay.replay_build(build, meta_model(build), SEED)
    for _ in range(2):  # as often as one likes
        drawn = {name: value.clone() for name, value in values(all_of(whole))}
        assert torch.equal(torch.get_rng_state(), state)
        assert drawn.keys() == dict(whole.named_parameters()).keys()
        for name, parameter in whole.named_parameters():
            assert torch.equal(drawn[name], parameter.flatten()), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer), name
    assert module.state_dict().keys() == whole.state_dict().keys()


def test_layers_of_torch_get_the_weights_of_a_whole_build() -> None:
    check_replayed(of_torch)


def large() -> nn.Module:
    """Tensors that are drawn in parts: with one that is changed afterward, and
    one that another reads.
    """
    layers = nn.Sequential(
        nn.Linear(400, 500), nn.Embedding(300, 700, padding_idx=3), nn.Linear(600, 501)
    )
    with torch.no_grad():
        first = cast(nn.Linear, layers[0])
        first.bias.copy_(first.weight[:, 0])
        nn.init.normal_(first.weight)
    return layers


def test_a_part_of_each_tensor_is_that_of_a_whole_build() -> None:
    torch.manual_seed(SEED)
    whole = large()
    _, values = replay.replay_build(large, meta_model(large), SEED)
    check_replayed(large)
    for part in range(3):
        for name, drawn in values(lambda name: (part * 100, part * 77)):  # noqa: B023
            assert torch.equal(
                drawn, whole.get_parameter(name).flatten()[part * 100 :][: part * 77]
            ), name


def test_values_that_are_not_drawn_are_kept() -> None:
    check_replayed(has_values)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_gets_the_weights_of_a_whole_build(name: str) -> None:
    auto, config = MODELS[name]
    check_replayed(lambda: auto.from_config(copy.deepcopy(config)))


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_whose_code_asks_for_values_is_noticed(name: str) -> None:
    auto, config = WHOLE[name]
    with pytest.raises(MetaModelError, match="needs the values of tensors"):
        recording.record(lambda: auto.from_config(copy.deepcopy(config)))


def sets_the_seed() -> nn.Module:
    layer = nn.Linear(2, 2)
    torch.manual_seed(0)
    return nn.Sequential(layer, nn.Linear(2, 2))


def restores_the_seed() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        layer = nn.Linear(2, 2)
    return nn.Sequential(layer, nn.Linear(2, 2))


def has_a_generator() -> nn.Module:
    layer = nn.Linear(2, 2)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return layer


def has_a_random_buffer() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_buffer("noise", torch.randn(3))
    return layer


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (sets_the_seed, "sets the state of torch's random numbers"),
        (restores_the_seed, "sets the state of torch's random numbers"),
        (has_a_generator, "a generator of its own"),
        (has_a_random_buffer, "gives a buffer random values"),
    ],
)
def test_a_build_that_cannot_be_repeated_is_refused_with_the_reason(
    build: Callable[[], nn.Module], reason: str
) -> None:
    module = meta_model(build)
    before = torch.get_rng_state()
    with pytest.raises(MetaModelError, match=reason):
        replay.replay_build(build, module, SEED)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_replay_holds_one_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though torch gives each layer weights when it is made, and transformers again
    when all are there.
    """
    auto, config = MODELS["gpt2"]
    _, values = replay.replay_build(
        lambda: auto.from_config(config), meta_model(lambda: auto.from_config(config)), SEED
    )
    held: list[int] = []
    run = replay.Replay._run

    def counted(
        self: replay.Replay, operation: recording.Operation, storages: replay.Storages
    ) -> None:
        run(self, operation, storages)
        held.append(len(storages))

    monkeypatch.setattr(replay.Replay, "_run", counted)
    count = sum(1 for _ in values(lambda name: (0, 0)))
    assert max(held) < count / 3
    assert held
