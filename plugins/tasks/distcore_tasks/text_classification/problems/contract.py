"""The protocol of problem types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from distcore import Direction
from distcore_tasks.rows.label_kind import LabelKind

if TYPE_CHECKING:
    from torch import Tensor

Origins = Iterable[Mapping[str, object]]
"""Origin of each row, for predictions."""


class Problem(LabelKind, Protocol):
    """Labels, loss, outputs and metrics of a problem type, without state."""

    metrics: ClassVar[dict[str, Direction]]
    """Metrics of every report, with the better direction."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over rows.

        ``logits``: fp32 ``(n, outputs)``. ``labels``: encoded, ``(n, …)``.
        """
        ...

    def outputs(self, logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        """Return ``prediction`` of each row, ``(n, …)``; with labels also
        ``loss``, ``(n,)``, and ``label``.
        """
        ...

    def report(
        self, outputs: Mapping[str, Tensor], classes: Sequence[str], trained: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return the metrics, each ``None`` without rows.

        ``trained``: the ``facts`` of the training rows.
        """
        ...

    def lines(
        self, outputs: Mapping[str, Tensor], labels: Sequence[int | str], origins: Origins
    ) -> Iterator[dict[str, object]]:
        """Yield index, origin, label (if any) and prediction of each row.

        ``labels`` name the classes in predictions.
        """
        ...
