"""Dropout masks by row for tests: a run that has them, and a forward pass as the loop
begins and ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from distcore.model import current_masks

RUN: Any = SimpleNamespace(config=SimpleNamespace(dropout_masks="row"))
"""As much of a run as the masks ask for."""


def with_dropout(model: Any, p: float) -> Any:
    """Return a model of transformers whose layers drop hidden values and attention
    with the probability ``p``.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        for name in ("dropout", "attention_dropout", "attn_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, p)
    return model


@contextmanager
def forward_of(rows: np.ndarray) -> Iterator[None]:
    """Compute rows, as the loop does."""
    masks = current_masks()
    assert masks is not None
    with masks.begin_rows(rows, torch.device("cpu")):
        yield
