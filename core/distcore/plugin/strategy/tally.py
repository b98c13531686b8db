"""What ranks collect between two log lines, and sum in the one reduction there: logged sums, and wishes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from distcore.errors import StrategyError, TaskError

Wish = Literal["stop", "evaluate", "save"]
"""What a listener may ask for by the answer of an event; the ranks agree on it at the next log line.

``stop``: evaluate, save and end the run as if it were done. ``evaluate``, ``save``: do so once.
"""
Answer = Wish | Iterable[Wish] | None
"""The answer of an event: nothing, a wish, or several."""
WISHES: tuple[Wish, ...] = get_args(Wish)
TAKEN = frozenset({
    "step", "epoch", "samples", "loss", "lr", "samples_per_second", "peak_memory_bytes", "grad_norm",
})  # fmt: skip
"""Names that a log line has anyway."""


class Tally:
    """The sums of one rank since the last log line, and what was wished for on it."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """``names``: all that will be logged, so that every rank sends as many numbers. Raises TaskError."""
        self.names = tuple(names)
        """The names, in the order in which their sums are sent."""
        if wrong := [name for name in self.names if name in TAKEN or self.names.count(name) > 1]:
            raise TaskError(f"logs: {wrong[0]!r} is the name of two values of a log line; choose another")
        self.muted = False
        """Whether nothing counts: in a micro-batch of padding."""
        self._clear()

    def add(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add ``value``, the sum of ``weight`` things, to what the next log line has as their mean.

        Raises TaskError for a name that was not declared.
        """
        if name not in self.names:
            raise TaskError(f"log({name!r}): is not declared; name it in `logs` of the task or extension that logs it")
        if self.muted:
            return
        total, count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (_plain(value) + total, _plain(weight) + count)

    def wish(self, event: str, answers: Iterable[Answer]) -> None:
        """Note what listeners answered to ``event``; raises StrategyError for what is no wish."""
        for answer in answers:
            for wish in [answer] if isinstance(answer, str) else answer or ():
                if wish not in WISHES:
                    raise StrategyError(f"a listener of {event}() answered {wish!r}; expected one of {list(WISHES)}")
                self._wishes.add(wish)

    def take(self, device: torch.device) -> Tensor:
        """Return what is to be summed over ranks, float64 on ``device``, and begin anew."""
        sums = [part for name in self.names for part in self._sums.get(name, (0.0, 0.0))]
        wishes = [float(wish in self._wishes) for wish in WISHES]
        self._clear()
        return torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device) for part in (*wishes, *sums)])

    def read(self, totals: list[float]) -> tuple[frozenset[Wish], dict[str, float]]:
        """Return the wishes and the means by name, of what ``take`` gave on all ranks, summed."""
        wishes = frozenset(wish for wish, asked in zip(WISHES, totals, strict=False) if asked)
        sums = totals[len(WISHES) :]
        pairs = zip(self.names, sums[::2], sums[1::2], strict=True)
        return wishes, {name: total / count for name, total, count in pairs if count}

    def _clear(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        self._wishes: set[Wish] = set()


def _plain(value: Tensor | float) -> Tensor | float:
    return value.detach().double() if isinstance(value, Tensor) else float(value)
