"""A language model's task on the rows of the laws, for strategies that split
sequences or a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from distcore import Datasets, RunConfig
from distcore.testing.problem import VOCABULARY, Problem

LENGTH = 12
"""Tokens of a row, so that two ranks can share them."""
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Sentences(Problem):
    """A small Llama predicts the next token of each row, whose mean loss
    over tokens counts once.
    """

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model."""
        llama = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=self.blocks,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=24,
            pad_token_id=0,
        )
        return LlamaForCausalLM(llama)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the sum of the rows' losses, each of ``LENGTH`` tokens."""
        losses, _ = self._losses(model, batch)
        return losses.sum()

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return each row's loss, and the guess after its first token."""
        losses, logits = self._losses(model, batch)
        return {"loss": losses, "prediction": logits[:, 0].argmax(-1), "label": batch["labels"]}

    def _losses(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        tokens = F.pad(batch["tokens"], (0, LENGTH - batch["tokens"].shape[1]), value=1)
        following = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
        logits: Tensor = model(input_ids=tokens).logits
        losses = F.cross_entropy(
            logits.flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return losses.view(len(tokens), LENGTH).mean(1), logits
