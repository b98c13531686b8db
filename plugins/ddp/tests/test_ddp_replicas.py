"""Buffers that are state, and buffers that are the same for ever."""

from __future__ import annotations

from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from distcore_ddp import has_state_in_buffers, rebuild_gradient_buckets


def test_only_buffers_that_are_saved_are_state() -> None:
    bert = BertForSequenceClassification(BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1))
    assert dict(bert.named_buffers())  # position numbers, the same for ever
    assert not has_state_in_buffers(bert)
    assert has_state_in_buffers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_a_forward_that_a_wrapper_has_replaced_is_there_after_the_dummy_pass() -> None:
    module = nn.Linear(2, 2)
    rebuild_gradient_buckets(lambda given: module.forward(given), module)  # type: ignore[arg-type]
    assert "forward" not in vars(module)
    module.forward = replaced = lambda given: given  # type: ignore[method-assign]
    rebuild_gradient_buckets(lambda given: module.forward(given), module)  # type: ignore[arg-type]
    assert vars(module)["forward"] is replaced
    assert module.weight.grad is None
