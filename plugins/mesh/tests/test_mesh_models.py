"""Models of transformers, split over two ranks, give the losses and gradients of the whole
ones, with dropout, too.
"""

import os
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from row_mask_cases import RUN, forward_of, with_dropout
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DeiTConfig,
    DeiTForImageClassification,
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
    MT5Config,
    MT5ForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from distcore import RankInfo, Run, RunConfig, defaults, launch
from distcore.model.row_dropout import use_row_masks
from distcore_lora.adapter import inject
from distcore_mesh.strategy import MeshStrategy

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
LLAMA: dict[str, Any] = SMALL | {"num_key_value_heads": 2}
IMAGES: dict[str, Any] = SMALL | {"image_size": 8, "patch_size": 4}
DISTIL: dict[str, Any] = {
    "vocab_size": 64,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
}
GPT2: dict[str, Any] = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
}
T5: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SMALL)),
    "bert, tied": lambda: BertForMaskedLM(BertConfig(**SMALL)),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**SMALL)),
    "electra": lambda: ElectraForSequenceClassification(ElectraConfig(**SMALL, embedding_size=16)),
    "distilbert": lambda: DistilBertForSequenceClassification(DistilBertConfig(**DISTIL)),
    "gpt2, tied": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "t5, tied": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "mt5, gated": lambda: MT5ForConditionalGeneration(MT5Config(**T5)),
    "vit": lambda: ViTForImageClassification(ViTConfig(**IMAGES)),
    "deit": lambda: DeiTForImageClassification(DeiTConfig(**IMAGES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "llama, odd vocabulary": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | {"vocab_size": 65})),
    "llama, classifier": lambda: LlamaForSequenceClassification(LlamaConfig(**LLAMA)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=8)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**LLAMA)),
}
ADAPTED: dict[str, Any] = {
    "bert": "all-linear",
    "gpt2, tied": "all-linear",
    "t5, tied": "all-linear",
    "llama": r".*(_proj|lm_head)",
    "qwen3": "all-linear",
}
"""The layers that an adapter is put into."""
STORED = {"bert", "llama", "qwen3"}
WHOLE = {"llama, odd vocabulary": {"model.embed_tokens.weight", "lm_head.weight"}}
"""Modules of a plan that stay whole on every rank."""


def inputs(name):
    torch.manual_seed(1)
    tokens = torch.randint(3, 64, (3, 7))
    if name in ("vit", "deit"):
        return {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 1, 1])}
    if "t5" in name:
        return {"input_ids": tokens, "labels": tokens.flip(1)}
    generates = (
        any(kind in name for kind in ("gpt", "llama", "qwen3", "phi3", "tied"))
        and "classifier" not in name
    )
    labels = tokens if generates else torch.tensor([0, 1, 1])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def losses(model, batch):
    """The losses in evaluation and in training, which has dropout
    and computes activations again.
    """
    plain = model.eval()(**batch).loss
    model.train().gradient_checkpointing_enable()
    with use_row_masks(RUN), forward_of(np.array([5, 2, 9])):
        dropped = model(**batch).loss
        (plain + dropped).backward()
    assert abs(plain - dropped) > 1e-5
    return plain.detach(), dropped.detach()


def adapted(folder, name):
    """A model with an adapter, which does something and has dropout of its own, and a base in bf16
    if that can be.
    """
    model = MODELS[name]().bfloat16().float()
    config = RunConfig(lora={"rank": 3, "alpha": 6, "dropout": 0.2, "targets": ADAPTED[name]})
    inject(config, model, folder / name)
    assert (torch.bfloat16 in {parameter.dtype for parameter in model.parameters()}) is (
        name in STORED
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def distances(folder):
    """For each model, in a rank: relative errors of loss and worst gradient, and
    which weights are split.
    """
    strategy, config = MeshStrategy(tp=2), RunConfig(device="cpu")
    rank_info = RankInfo(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    world = strategy.setup(config, rank_info)
    by_model = {}
    makers = MODELS | {f"{name}, adapter": partial(adapted, folder, name) for name in ADAPTED}
    for name, make in makers.items():
        torch.manual_seed(0)
        whole = with_dropout(make(), 0.3)
        split = deepcopy(whole)
        run = Run(
            config=config,
            world=world,
            capabilities=strategy.capabilities,
            module=split,
            model=split,
        )
        wrapped = strategy.wrap_model(run, split, None)
        batch = inputs(name)
        expected, made = losses(whole, batch), losses(split, batch)
        layout = wrapped.state.layout
        errors = {
            f"loss {at}": float(abs(a - b) / a)
            for at, (a, b) in enumerate(zip(expected, made, strict=True))
        }
        largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
        for at, parameter in whole.named_parameters():
            if parameter.grad is not None:
                layer = layout.splits.get(at)
                wanted = layer.part_of(parameter.grad, layout.rank, 2) if layer else parameter.grad
                errors[at] = float((split.get_parameter(at).grad - wanted).abs().max()) / largest
        worst = max(errors, key=lambda at: errors[at])
        by_model[name] = (
            errors[worst],
            worst,
            {*layout.splits},
            len({id(p) for p in split.parameters()}),
        )
        assert by_model[name][3] == len({id(p) for p in whole.parameters()})
    defaults.teardown(world)
    return by_model


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ADAPTED:
        MODELS[name]().bfloat16().save_pretrained(folder / name)  # whose dtype an adapter asks for
    return launch(distances, folder, nproc=2)


@pytest.mark.parametrize("name", [*MODELS, *(f"{name}, adapter" for name in ADAPTED)])
def test_loss_and_gradients_are_those_of_the_whole_model(name, ranks):
    for error, where, splits, _ in (rank[name] for rank in ranks):
        assert error < 1e-5, where
        assert splits
        matrices = {
            part for part in ("lora_A", "lora_B") if any(f".{part}." in at for at in splits)
        }
        assert matrices == ({"lora_A", "lora_B"} if name.endswith(", adapter") else set())
        assert not splits & WHOLE.get(name, set())
