"""Buffers that are state, and buffers that are the same for ever."""

from __future__ import annotations

from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from distcore_ddp import has_state_in_buffers


def test_only_buffers_that_are_saved_are_state() -> None:
    bert = BertForSequenceClassification(BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1))
    assert dict(bert.named_buffers())  # position numbers, the same for ever
    assert not has_state_in_buffers(bert)
    assert has_state_in_buffers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
