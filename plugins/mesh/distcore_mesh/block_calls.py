"""How a model calls its blocks, as far as the stages of a pipeline depend on it.

Each stage runs the model's own code, with placeholders for the blocks of other stages. So the code
must call each block once, in their order. Where two stages meet, both do what it does between two
blocks. What it gives to blocks beside the hidden state is computed by each stage, also by those
that lack the weights for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcore import StrategyError
from distcore_mesh.placeholders import StagePlaceholder

Sums = tuple[tuple[int, ...], float, float]
"""Shape of a tensor, the sum of its values, and that of their absolute values."""
CLOSE = 1e-4
"""Relative difference of sums that rounding may make between ranks."""
FINITE = 1e30
"""Replaces infinity, as in attention masks, whose sums would not be numbers."""


class StagesOfRank(Protocol):
    """What a rank knows of its stages, as ``distcore_mesh.stages.Stages`` has it."""

    received: Tensor | None
    """The hidden state of the stage before, in the running pass."""
    activations: tuple[dist.ProcessGroup, ...]
    """Groups of the ranks of all stages."""
    size: int
    """Number of these ranks."""
    blocks: int
    """Blocks of a stage."""

    @property
    def number(self) -> int:
        """Number of the stage that is being computed."""


@dataclass(eq=False)
class BlockCalls:
    """The calls of all blocks of a model, placeholders included, in one pass."""

    stages: StagesOfRank
    """This rank's stages."""
    blocks: int
    """Number of the model's blocks."""
    _called: int | None = field(default=None, init=False)
    """Blocks that were called in the running pass; ``None``: none runs."""
    _probed: int | None = field(default=None, init=False)
    """The block whose placeholder runs it to learn the form of its output."""
    _arguments: list[dict[str, Sums]] | None = field(default_factory=list, init=False)
    """What each block was given beside the hidden state, in the first pass; ``None`` after it."""
    _changed: int | None = field(default=None, init=False)
    """The block of this stage that was not given, in the first pass, what was received for it."""

    def watch(self, number: int, block: nn.Module) -> None:
        """Check each call of ``block``, which is a block of this rank or a placeholder."""
        block.register_forward_pre_hook(partial(self._check, number), with_kwargs=True)
        block.register_forward_hook(self._end_probe)

    def begin(self) -> None:
        """Begin a pass."""
        self._called, self._probed = 0, None

    def finish(self) -> None:
        """Check a complete pass; the first one is compared with those of the other stages."""
        if self._called != self.blocks:
            raise StrategyError(
                f"strategy 'mesh': with pp a model must call each of its {self.blocks} blocks; it"
                f" called {self._called}; use pp = 1"
            )
        if self._arguments is not None:
            mine, self._arguments = (self._arguments, self._changed), None
            # Together, so that no stage waits for one that has ended.
            of_all: list[Any] = [None] * self.stages.size
            dist.all_gather_object(of_all, mine, group=self.stages.activations[0])
            _refuse_changed(changed for _, changed in of_all)
            _refuse_differing([arguments for arguments, _ in of_all])

    def stop(self) -> None:
        """End a pass, complete or not: a backward pass may call blocks again, to recompute them."""
        self._called = None

    def _check(
        self, number: int, block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Raise StrategyError for a call that a pipeline cannot follow."""
        if self._called is None or number == self._probed:
            return
        if number != self._called:
            raise StrategyError(
                "strategy 'mesh': with pp a model must call its blocks once each, in their order;"
                f" it calls block {number} in the place of block {self._called}; use pp = 1"
            )
        self._called += 1
        if isinstance(block, StagePlaceholder) and block.has_unknown_form:
            self._probed = number
        if self._arguments is not None:
            given = {f"argument {place}": value for place, value in enumerate(inputs)} | named
            hidden = given.pop(next(iter(given)))
            if self._is_changed(number, hidden):
                self._changed = number
            self._arguments.append(
                {name: _sums(tensor) for name, value in given.items() for tensor in _tensors(value)}
            )

    def _end_probe(self, _block: nn.Module, _inputs: object, _output: object) -> None:
        self._probed = None

    def _is_changed(self, number: int, hidden: Tensor) -> bool:
        """Return True for the first block of a stage if it is not given what was received."""
        is_first = number == self.stages.number * self.stages.blocks
        received = self.stages.received
        if not is_first or received is None:
            return False
        return not torch.equal(hidden.detach(), received.detach())


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors of an argument. A cache of keys and values has none that blocks share."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _sums(tensor: Tensor) -> Sums:
    values = torch.nan_to_num(
        tensor.detach().to("cpu", torch.float64), nan=FINITE, posinf=FINITE, neginf=-FINITE
    )
    return tuple(tensor.shape), float(values.sum()), float(values.abs().sum())


def _refuse_changed(of_all: Iterable[int | None]) -> None:
    """Raise StrategyError for a block that was not given what its stage received."""
    for number in of_all:
        if number is not None:
            raise StrategyError(
                f"strategy 'mesh': with pp the model changes the hidden state between block"
                f" {number - 1} and block {number}, which both of two stages would do; do it in a"
                " block, or use pp = 1"
            )


def _refuse_differing(of_all: list[list[dict[str, Sums]]]) -> None:
    """Raise StrategyError if blocks are given other values on another rank."""
    first, *others = of_all
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            differing = (name for name in mine if not _is_close(mine[name], theirs.get(name)))
            if name := next(differing, None):
                raise StrategyError(
                    f"strategy 'mesh': with pp blocks must read the hidden state alone; {name!r},"
                    " which the model gives them, too, follows from weights that are on one stage"
                    " only; use pp = 1"
                )


def _is_close(mine: Sums, theirs: Sums | None) -> bool:
    if theirs is None or mine[0] != theirs[0]:
        return False
    (_, total, size), (_, their_total, their_size) = mine, theirs
    bound = CLOSE * max(size, their_size)
    return abs(total - their_total) <= bound and abs(size - their_size) <= bound
