"""The random states of Python, numpy and torch, for a while those of a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def change_random_state(seed: int) -> Iterator[None]:
    """Inside, the generators of Python, numpy and torch start from ``seed``; afterward
    they are as before.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
