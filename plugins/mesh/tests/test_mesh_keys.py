"""Each key of each type of model that the mesh splits is followed by the parts, or refused."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from config_keys import changes
from torch import Tensor, nn

from distcore import MicroBatch, RankInfo, Run, RunConfig, StrategyError, defaults, launch
from distcore_mesh.context_parallel import MODEL_TYPES as BY_SEQUENCE
from distcore_mesh.sequence_parallel import MODEL_TYPES as BY_TOKENS
from distcore_mesh.strategy import MeshStrategy
from distcore_mesh.tp_plans import FAMILIES

pytestmark = pytest.mark.ranks

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
DECODER = SMALL | {"num_key_value_heads": 2}
EXPERTS = DECODER | {
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
IMAGES = SMALL | {"image_size": 8, "patch_size": 4}
T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SIZES: dict[str, dict[str, Any]] = {
    "distilbert": {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "t5": T5,
    "mt5": T5,
    "vit": IMAGES,
    "deit": IMAGES | {"architectures": ["DeiTForImageClassification"]},
    "gpt_neox": SMALL,
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": SMALL,
    "deberta-v2": SMALL
    | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
    "gemma2": DECODER | {"head_dim": 8},
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24},
    "gpt_oss": EXPERTS,
    "modernbert": SMALL | {"cls_token_id": 1, "sep_token_id": 2},
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "cohere"), DECODER),
}
IMAGE_TYPES, PAIRS = ("vit", "deit"), ("t5", "mt5")
STAGED_DECODERS = (
    *("bloom", "cohere", "falcon", "gemma2", "gpt2", "gpt_neox", "gpt_oss", "llama", "mistral"),
    *("mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3"),
)
"""Some of the decoders that a pipeline splits: it has no list of them."""
DECODERS = (*BY_SEQUENCE, *STAGED_DECODERS)
STAGED = (
    *STAGED_DECODERS,
    *("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta"),
    *IMAGE_TYPES,
)
UNBUILT = {
    "add_cross_attention",
    "layer_types",
    "per_layer_config",
    "pooler_hidden_size",
    "rope_parameters",
}
"""Keys of which transformers itself refuses some value, in some types of models."""
OWN_PLANS = ("llama", "qwen3", "gpt_neox", "phi3")
"""Some of the types that have a plan of their own."""
SPLITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "tp": ({"tp": 2}, [*(kind for kinds in FAMILIES for kind in kinds), *OWN_PLANS]),
    "sequence_parallel": ({"tp": 2, "sequence_parallel": True}, [*BY_TOKENS]),
    "cp": ({"cp": 2}, [*BY_SEQUENCE]),
    "pp": ({"pp": 2}, [*STAGED]),
}
FEW = {
    "tp": ["t5", "llama"],
    "sequence_parallel": ["bert"],
    "cp": ["gpt2"],
    "pp": ["albert", "mixtral"],
}


def model_of(kind: str, **values: Any) -> Any:
    """A model in double precision, where nothing but another computation makes a difference."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES.get(kind, SMALL) | values)
    heads = dict.fromkeys(DECODERS, "CausalLM") | dict.fromkeys(PAIRS, "Seq2SeqLM")
    heads |= dict.fromkeys(IMAGE_TYPES, "ImageClassification")
    name = f"AutoModelFor{heads.get(kind, 'SequenceClassification')}"
    model = getattr(transformers, name).from_config(config).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def inputs_of(kind: str, config: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if kind in IMAGE_TYPES:
        shape = (3, config.num_channels, config.image_size, config.image_size)
        images = torch.randn(shape, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.tensor([0, 1, 1])}
    tokens = torch.randint(5, 64, (3, 7))
    labels = tokens.flip(1) if kind in (*DECODERS, *PAIRS) else torch.tensor([0, 1, 1])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    loss.backward()
    return loss.detach()


def loss_of_stages(strategy: MeshStrategy, run: Run, batch: dict[str, Tensor]) -> Tensor:
    """The loss of two micro-batches, so that each stage computes one while another has the other;
    it is 0 but on the last stage.
    """
    micros = [MicroBatch(indices=np.arange(3), last=is_last) for is_last in (False, True)]
    halves = [(micro, batch) for micro in micros]
    train_step: Any = strategy.train_step  # type: ignore[attr-defined]
    loss: Tensor = train_step(run, halves, lambda model, _, given: model(**given).loss / 2)
    return loss


def in_single_precision(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: part.float() if part.is_floating_point() else part for name, part in batch.items()
    }


def wrong_keys(options: dict[str, Any], kinds: list[str]) -> dict[str, list[str]]:
    """Return, in a rank, the keys of each type that the parts do not follow, or cannot be tried."""
    strategy, config = MeshStrategy(**options), RunConfig(device="cpu")
    rank_info = RankInfo(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    world = strategy.setup(config, rank_info)
    wrong: dict[str, list[str]] = {}
    # Two stages cannot share a weight, and compute in the precision of the run.
    own = {"tie_word_embeddings": False} if strategy.pp > 1 else {}
    bound = 1e-6 if strategy.pp > 1 else 1e-9
    for kind in kinds:
        wrong[kind] = []
        for key, value in changes(model_of(kind, **own).config):
            try:
                whole = model_of(kind, **own | {key: value})
                batch = inputs_of(kind, whole.config)
                if strategy.pp > 1:
                    whole, batch = whole.float(), in_single_precision(batch)
                expected = loss_of(whole, batch)
            except Exception:  # of the model itself, of whatever class
                if key not in UNBUILT:
                    wrong[kind].append(f"{key} = {value!r}: no such model")
                continue
            split = deepcopy(whole)
            split.zero_grad()
            run = Run(
                config=config,
                world=world,
                capabilities=strategy.capabilities,
                module=split,
                model=split,
            )
            try:
                state = strategy.wrap_model(run, split, None).state
                if strategy.pp > 1:
                    loss = loss_of_stages(strategy, replace(run, strategy_state=state), batch)
                else:
                    loss = loss_of(split, batch)
            except StrategyError:
                continue
            computes_loss = state.stages is None or world.is_shard_leader
            error = float(abs(loss - expected) / expected) if computes_loss else 0.0
            if max(error, gradient_error(whole, split, state)) > bound:
                wrong[kind].append(f"{key} = {value!r}")
    defaults.teardown(world)
    return wrong


def gradient_error(whole: nn.Module, split: nn.Module, state: Any) -> float:
    """Return the largest error of a rank's gradients, relative to the largest of all gradients."""
    gradients = {at: p.grad for at, p in split.named_parameters() if p.grad is not None}
    if state.sequences is not None:
        state.sequences.sum_gradients(gradients)
    expected = {at: p.grad for at, p in whole.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    if state.stages is not None:
        expected = {at: g for at, g in expected.items() if at in state.layout.of_stage}
    assert expected.keys() == gradients.keys()
    errors = []
    for at, gradient in expected.items():
        part = state.layout.splits.get(at)
        wanted = part.part_of(gradient, state.layout.rank, 2) if part else gradient
        errors.append(float((gradients[at] - wanted).abs().max()))
    return max(errors) / largest


@pytest.mark.parametrize("name", SPLITS)
def test_each_key_of_a_few_types_is_followed_by_the_parts(name: str) -> None:
    options, _ = SPLITS[name]
    for rank in launch(wrong_keys, options, FEW[name], nproc=2):
        assert rank == {kind: [] for kind in FEW[name]}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
def test_each_key_of_all_types_is_followed_by_the_parts(name: str) -> None:
    options, kinds = SPLITS[name]
    for rank in launch(wrong_keys, options, kinds, nproc=2):
        assert rank == {kind: [] for kind in kinds}
