"""Small models, and how a run builds them from scratch or from files, for tests of strategies that
do it in parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distcore.config import RunConfig
from distcore.model.model_source import base_source, model_source
from distcore.plugin.strategy.contract import ModelSource
from distcore.plugin.task.task import Datasets
from distcore.testing.problem import Problem


def from_scratch(make: Callable[[], nn.Module], seed: int) -> ModelSource:
    """Return how a run builds the model that ``make`` returns, whole or not, with
    random weights under ``seed``.
    """
    config, task = RunConfig(seed=seed), _Made(make=make)
    return base_source(config, task, task.prepare(config))


def from_files(
    folder: Path, auto: Any, seed: int, lora: int | None = None, **shape: Any
) -> ModelSource:
    """Return how a run builds the model of ``folder`` by the class ``auto``, with an
    adapter of rank ``lora``.

    ``shape`` has fields of the model's config, such as another number of classes.
    """
    config, task = (
        RunConfig(seed=seed, lora={"rank": lora, "alpha": 6}),
        _Saved(folder=folder, auto=auto, shape=shape),
    )
    return model_source(config, task, task.prepare(config))


def small_models(vocab_size: int) -> dict[str, Callable[[], nn.Module]]:
    """Return how to make one small model of each kind, by name; ``vit`` asks for values
    while it is built.

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
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
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


@dataclass(frozen=True, kw_only=True)
class _Saved(Problem):
    folder: Path
    auto: Any
    shape: dict[str, Any]

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        from transformers import AutoConfig

        shape = AutoConfig.from_pretrained(self.folder, **self.shape)
        if torch.get_default_device().type == "meta":
            return self.auto.from_config(shape)  # type: ignore[no-any-return]
        return self.auto.from_pretrained(  # type: ignore[no-any-return]
            self.folder, config=shape, ignore_mismatched_sizes=True
        ).float()

    def weights_folder(self, config: RunConfig) -> Path:
        return self.folder
