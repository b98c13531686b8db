"""The subject of a measurement: a strategy under test, and its cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from distcore.config import RunConfig
from distcore.errors import DistcoreError
from distcore.plugin.strategy.capabilities import Capabilities, ChecksModel
from distcore.resolve import strategies
from distcore.testing.findings import Case
from distcore.testing.problem import ModelShape, meta_model

FEWEST_RANKS = {"bit-for-bit": 3}
"""Ranks with which a case can fail, by name, where it needs more than two.

Only the order of a sum makes such a case fail, and that of two ranks has but one.
"""

SHAPES = (
    *(ModelShape(blocks) for blocks in (2, 4, 6, 8)),
    *(ModelShape(blocks, experts) for experts in (4, 8) for blocks in (2, 4)),
)
"""Shapes of the model of the laws, in the order in which they are tried.

Stages of a pipeline must divide the blocks, and ranks that share experts the experts.
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A strategy under test, as ``config`` names it or as ``make`` builds it, and
    the cases to measure.

    ``config.nproc`` is the number of ranks.
    """

    config: RunConfig
    """The config that every case starts from; it names the strategy and its options."""
    cases: tuple[Case, ...]
    """The cases to measure, in order."""
    make: Callable[[RunConfig], object] | None = None
    """Builds the strategy from the config; ``None``: the strategy that the
    config names is built.
    """

    def strategy(self) -> strategies.Strategy:
        """Build a new object of the strategy; raises DistcoreError where it is
        not installed or misconfigured.
        """
        if self.make is None:
            return strategies.load_strategy(self.config)
        return strategies.bind(self.config.strategy, self.make(self.config))

    @cached_property
    def declared(self) -> Capabilities:
        """The strategy's declaration."""
        return self.strategy().capabilities

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases and laws that the strategy declares not to keep, with reasons."""
        return self.declared.exempt

    def must_break(self, case: str) -> bool:
        """Return True if ``case``, if it is exempt, must fail.

        It may hold where timing decides, and where ranks are too few to differ.
        """
        fewest = FEWEST_RANKS.get(case, 2)
        has_ranks = int(self.config.nproc) >= fewest or self.declared.processes == "one"
        return self.declared.deterministic and has_ranks

    @cached_property
    def shape(self) -> ModelShape:
        """Blocks and experts of the model of the laws: the first shape that the strategy accepts.

        Without one it is that of a strategy that accepts any model, so that its refusal is shown.
        """
        strategy = self.strategy().plugin
        if isinstance(strategy, ChecksModel):
            for shape in SHAPES:
                with suppress(DistcoreError):
                    strategy.check_model(self.config, meta_model(shape))
                    return shape
        return SHAPES[0]
