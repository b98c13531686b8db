"""The optional members of a dataset; ``distcore.Dataset`` has the four required ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from distcore.plugin.batching.columns import Column
    from distcore.plugin.task.task import Batch, Dataset


class DatasetSpec(Protocol):
    """The members that a dataset may have. Nothing inherits from it;
    ``datasets.py`` asks for them.
    """

    @property
    def counts(self) -> Mapping[str, Column]:
        """Weight of each row in the mean of a further loss term, by the
        term's name; default: ``items``.
        """

    def at(self, epoch: int) -> Dataset:
        """Return the rows as they are in ``epoch``, counted from 0, for rows
        that vary: masking, augmentation.

        Number, lengths and order of rows stay the same; ``items`` and the values of ``batch`` may
        differ. Called at the start of an epoch, and again if a run resumes inside it: the answer
        must depend on ``epoch`` alone. ``distcore.row_random`` makes random numbers for a row of an
        epoch.
        """

    def row_order(self, seed: int, epoch: int) -> Column:
        """Return the row at each position of ``epoch``, counted from 0; ``None``, or no such
        member: a random order.

        It must depend on its arguments alone. A row may come up several times or not at all, as in
        a mixture; the number of positions is that of the rows. ``content`` must cover how rows are
        ordered.
        """

    @property
    def content(self) -> str:
        """Digest of the content of all rows, in order, so that a resume on other rows is refused.
        Must not read rows.

        A dataset whose columns are no arrays must have it: then it covers length and items
        of each row, too.
        """

    @property
    def pads(self) -> bool:
        """True if ``batch`` pads rows for every model; False if, for example, short
        rows share a sequence.

        A micro-batch without padding costs its tokens, and is not split to reduce padding. Without
        this member the model decides: it may skip the padding of padded rows.
        """

    def made_anew(self, indices: np.ndarray) -> Batch:
        """Return the batch of some rows, each made from its source again, last first and with few
        others.

        ``distcore check`` compares it with that of ``batch``: rows that are kept, such as in a
        cache, must be those that the task's code makes now, whatever rows come with them.
        """

    def padded(self) -> Dataset | None:
        """Return the same rows, padded. Before the first step, the losses of some are
        compared in both forms.

        ``None`` if they are not the same then. A dataset without this method is compared as it is.
        """
