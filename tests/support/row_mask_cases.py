"""Dropout masks by row for tests: a run that has them, and a forward pass as the loop begins and ends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from distcore import current_masks

RUN: Any = SimpleNamespace(config=SimpleNamespace(dropout_masks="row"))
"""As much of a run as the masks ask for."""


@contextmanager
def forward_of(rows: np.ndarray) -> Iterator[None]:
    """Compute rows, as the loop does."""
    masks = current_masks()
    assert masks is not None
    masks.begin_rows(rows, torch.device("cpu"))
    yield
    if masks.is_new:
        masks.end_rows()
