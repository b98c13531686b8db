"""Models with random weights, and how a run builds them, for tests of strategies that build them part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from distcore.config import RunConfig
from distcore.model.model_source import base_source
from distcore.plugin.strategy.contract import ModelSource
from distcore.plugin.task.task import Datasets
from distcore.testing.problem import Problem


def from_scratch(make: Callable[[], nn.Module], seed: int) -> ModelSource:
    """Return how a run builds the model that ``make`` returns, whole or not, with random weights under ``seed``."""
    config, task = RunConfig(seed=seed), _Made(make=make)
    return base_source(config, task, task.prepare(config))


def small_models(vocab_size: int) -> dict[str, Callable[[], nn.Module]]:
    """Return how to make one small model of each kind, by name; ``vit`` asks for values while it is built.

    Sizes are such that two ranks share heads and hidden units evenly, and classes do not.
    """
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        ViTConfig,
        ViTForImageClassification,
    )

    sizes: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    gpt2 = GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    return {
        "bert": lambda: BertForSequenceClassification(BertConfig(**sizes | {"num_labels": 3})),
        "gpt2, tied": lambda: GPT2LMHeadModel(gpt2),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        "vit": lambda: ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4)),
    }


@dataclass(frozen=True, kw_only=True)
class _Made(Problem):
    make: Callable[[], nn.Module]

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return self.make()
