"""Datasets beside the training rows of a stream. Few rows are stored; many are streamed, in the
order of their source.

A stored row is read once. A streamed one is read in each evaluation, and takes neither memory nor
room on a disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distcore_tasks.shared.streams.values import AT_ONCE, NumberedValues

STORED_ROWS, STORED_TOKENS = 2**20, 2**24
"""Most rows, and about most tokens, of a dataset that is stored."""


def is_large(values: NumberedValues[Any], count_tokens: Callable[[list[Any]], int]) -> bool:
    """Return True for values that are streamed; tokens are those of a sample. Raises
    DataError with a row.

    ``count_tokens`` returns the number of tokens of some values.
    """
    if len(values) > STORED_ROWS:
        return True
    sample = values.at(np.unique(np.linspace(0, len(values) - 1, AT_ONCE).astype(np.int64)))
    return count_tokens(sample) * len(values) > STORED_TOKENS * len(sample)
