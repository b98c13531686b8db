"""The members of a dataset: four required ones, and optional ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from distcore.plugin.batching.columns import Column
    from distcore.plugin.task.task import Batch, Dataset


class DatasetSpec:
    """The members that a dataset may have. Nothing inherits from it; ``datasets.py`` asks for the optional ones."""

    def __len__(self) -> int:
        """Return the number of rows."""
        raise NotImplementedError

    @property
    def lengths(self) -> Column:
        """Length of each row in tokens, or 1: rows of like length share a micro-batch."""
        raise NotImplementedError

    @property
    def items(self) -> Column:
        """Weight of each row in the mean loss: 1, or for example its number of tokens."""
        raise NotImplementedError

    def batch(self, indices: np.ndarray) -> Batch:
        """Collate these rows, in this order and padded to the longest of them: any nesting of tensors.

        ``indices`` is int64, shape ``(n,)``. ``distcore.Dataset`` has the other rules.
        """
        raise NotImplementedError

    @property
    def counts(self) -> Mapping[str, Column]:
        """Weight of each row in the mean of a further loss term, by the term's name; default: ``items``."""
        raise NotImplementedError

    def at(self, epoch: int) -> Dataset:
        """Return the rows as they are in ``epoch``, counted from 0, for rows that vary: masking, augmentation.

        Number, lengths and order of rows stay the same; ``items`` and the values of ``batch`` may differ. Called at the
        start of an epoch, and again if a run resumes inside it: the answer must depend on ``epoch`` alone.
        ``distcore.row_random`` makes random numbers for a row of an epoch.
        """
        raise NotImplementedError

    @property
    def content(self) -> str:
        """Digest of the content of all rows, in order, so that a resume on other rows is refused. Must not read rows.

        A dataset whose columns are no arrays must have it: then it covers length and items of each row, too.
        """
        raise NotImplementedError

    @property
    def pads(self) -> bool:
        """True if ``batch`` pads rows for every model; False if, for example, short rows share a sequence.

        A micro-batch without padding costs its tokens, and is not split to reduce padding. Without this member the
        model decides: it may skip the padding of padded rows.
        """
        raise NotImplementedError

    def padded(self) -> Dataset | None:
        """Return the same rows, padded. Before the first step, the losses of some are compared in both forms.

        ``None`` if they are not the same then. A dataset without this method is compared as it is.
        """
        raise NotImplementedError
