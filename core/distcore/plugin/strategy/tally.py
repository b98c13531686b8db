"""Logged sums and requests of a rank between two log lines; one reduction sums all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, get_args

from distcore.errors import StrategyError, TaskError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Request = Literal["stop", "evaluate", "save"]
"""A request of a listener, returned by an event. Ranks combine requests at the next log line.

``stop``: evaluate, save and end the run as if it were done. ``evaluate``, ``save``: do so once.
"""
Answer = Request | Iterable[Request] | None
"""Return value of an event: nothing, a request, or several."""
REQUESTS: tuple[Request, ...] = get_args(Request)
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
        twice = {name for name in self.names if self.names.count(name) > 1}
        wrong = [name for name in self.names if name in TAKEN or name in twice]
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
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        self._requests: set[Request] = set()

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
    def sums(self) -> Mapping[str, tuple[Tensor | float, Tensor | float]]:
        """The sums since the last log line, by name, each with its items."""
        return dict(self._sums)

    @sums.setter
    def sums(self, sums: Mapping[str, tuple[Tensor | float, Tensor | float]]) -> None:
        """Forget what was added since ``sums`` were read: it is computed again."""
        self._sums = dict(sums)

    @property
    def requests(self) -> frozenset[Request]:
        """The requests of listeners since the last log line."""
        return frozenset(self._requests)

    def add_requests(self, event: str, answers: Iterable[Answer]) -> None:
        """Record the answers of listeners to ``event``; StrategyError for an unknown request."""
        for answer in answers:
            requests = [answer] if isinstance(answer, str) else answer or ()
            for request in requests:
                if request not in REQUESTS:
                    raise StrategyError(
                        f"a listener of {event}() answered {request!r}; expected one of"
                        f" {list(REQUESTS)}"
                    )
                self._requests.add(request)

    def take(self, device: torch.device) -> Tensor:
        """Return the values to sum over ranks, float64 on ``device``, and clear the tally."""
        import torch  # not above: a rank is known before torch is imported

        numbers: list[Tensor | float] = [float(request in self._requests) for request in REQUESTS]
        for name in self.names:
            numbers += self._sums.get(name, (0.0, 0.0))
        self._clear()
        scalars = []
        for number in numbers:
            # Sums on the device stay there: reading one would wait for all its work.
            scalars.append(torch.as_tensor(number, dtype=torch.float64, device=device))
        return torch.stack(scalars)

    def read(self, totals: list[float]) -> tuple[frozenset[Request], dict[str, float]]:
        """Return the requests, and the means by name, from the sums over ranks of ``take``."""
        ranks_that_request = totals[: len(REQUESTS)]
        pairs = zip(REQUESTS, ranks_that_request, strict=True)
        requests = frozenset(request for request, ranks in pairs if ranks)
        # Then two numbers for each name: the sum of its values and the sum of their weights.
        sums = totals[len(REQUESTS) :]
        means = {}
        for name, total, weight in zip(self.names, sums[::2], sums[1::2], strict=True):
            if weight:
                means[name] = total / weight
        return requests, means

    def _clear(self) -> None:
        self._sums = {}
        self._requests = set()


def _plain(value: Tensor | float) -> Tensor | float:
    """Return a number, or a tensor in float64 without gradient."""
    return value.detach().double() if hasattr(value, "detach") else float(value)
