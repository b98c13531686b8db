"""Logged sums and requests of a rank between two log lines; one reduction sums all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, get_args

from distcore.errors import StrategyError, TaskError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Wish = Literal["stop", "evaluate", "save"]
"""A request of a listener, returned by an event. Ranks combine requests at the next log line.

``stop``: evaluate, save and end the run as if it were done. ``evaluate``, ``save``: do so once.
"""
Answer = Wish | Iterable[Wish] | None
"""Return value of an event: nothing, a request, or several."""
WISHES: tuple[Wish, ...] = get_args(Wish)
TAKEN = frozenset(
    {
        "step",
        "epoch",
        "samples",
        "loss",
        "lr",
        "samples_per_second",
        "peak_memory_bytes",
        "grad_norm",
    }
)
"""Names that every log line has."""


class Tally:
    """The sums and the requests of one rank since the last log line."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """``names`` are all names to log: every rank sends equally many numbers.

        Raises TaskError for a name that is not free.
        """
        self.names = tuple(names)
        """The names, in the order in which their sums are sent."""
        wrong = [name for name in self.names if name in TAKEN or self.names.count(name) > 1]
        if wrong:
            raise TaskError(
                f"logs: {wrong[0]!r} is the name of two values of a log line; choose another"
            )
        self.muted = False
        """True while values are ignored: in a micro-batch of padding.

        No argument of the loss, because who asks has none: a layer of the model whose statistics
        leave padding out, also when backward computes it again, and an extension that logs from a
        hook between two micro-batches.
        """
        self.unlogged: tuple[float, int] = (0.0, 0)
        """Of the resumed checkpoint: sum of the loss since its last log line, and its items."""
        # The get of an empty dict does nothing, at the least cost.
        self.enter: Callable[[str], object] = dict[str, object]().get
        """Called as a phase begins: ``forward``, ``backward``, ``step``, ``other``; and, around the
        proof of the first steps, ``starting`` and ``data``. An extension may replace it.
        """
        self._clear()

    def add(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add ``value``, a sum over ``weight`` items. The next log line has the mean.

        Raises TaskError for an undeclared name.
        """
        if name not in self.names:
            raise TaskError(
                f"log({name!r}): is not declared; name it in `logs` of the task or extension that"
                " logs it"
            )
        if self.muted:
            return
        total, count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (_plain(value) + total, _plain(weight) + count)

    @property
    def wishes(self) -> frozenset[Wish]:
        """The requests of listeners since the last log line."""
        return frozenset(self._wishes)

    def wish(self, event: str, answers: Iterable[Answer]) -> None:
        """Record the answers of listeners to ``event``; StrategyError for an unknown request."""
        for answer in answers:
            for wish in [answer] if isinstance(answer, str) else answer or ():
                if wish not in WISHES:
                    raise StrategyError(
                        f"a listener of {event}() answered {wish!r}; expected one of {list(WISHES)}"
                    )
                self._wishes.add(wish)

    def take(self, device: torch.device) -> Tensor:
        """Return the values to sum over ranks, float64 on ``device``, and clear the tally."""
        numbers: list[Tensor | float] = [float(wish in self._wishes) for wish in WISHES]
        for name in self.names:
            numbers += self._sums.get(name, (0.0, 0.0))
        self._clear()
        import torch  # not above: a rank is known before torch is imported

        return torch.stack(
            [torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers]
        )

    def read(self, totals: list[float]) -> tuple[frozenset[Wish], dict[str, float]]:
        """Return the wishes, and the means by name, from the sums over ranks of ``take``."""
        counts = zip(WISHES, totals, strict=False)  # the sums follow the wishes
        wishes = frozenset(wish for wish, count in counts if count)
        sums = totals[len(WISHES) :]
        pairs = zip(self.names, sums[::2], sums[1::2], strict=True)
        return wishes, {name: total / count for name, total, count in pairs if count}

    def _clear(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        self._wishes: set[Wish] = set()


def _plain(value: Tensor | float) -> Tensor | float:
    return value.detach().double() if hasattr(value, "detach") else float(value)
