"""A register of strategies that are broken on purpose, and what the laws find out about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distcore import RunConfig, load_config
from distcore.testing import STRATEGIES
from distcore.testing.findings import Finding
from distcore.testing.subject import Subject


@dataclass(frozen=True)
class Mutant:
    make: Callable[[], object]
    breaks: str
    """The law that must be named."""
    case: str
    says: str = ""
    """A pattern of the finding's text."""


class Mutants(dict[str, Mutant]):
    """Mutants by the names of their classes."""

    def register(self, breaks: str, case: str, says: str = "") -> Callable[[type], type]:
        """Return a decorator that takes the class in."""

        def take(cls: type) -> type:
            self[cls.__name__] = Mutant(cls, breaks, case, says)
            return cls

        return take

    def measure(self, nproc: int, *right: Subject) -> dict[str, Finding]:
        """Return what the case of each mutant finds, measured in one launch of ranks.

        Strategies that are ``right`` are measured beside them; each must hold.
        """
        subjects = [subject(each.make, each.case, nproc=nproc) for each in self.values()]
        measured = STRATEGIES.measure_all([*subjects, *right])
        for findings in measured[len(subjects) :]:
            assert all(finding.held for finding in findings), findings
        of_mutants = measured[: len(subjects)]
        return {name: finding for name, (finding,) in zip(self, of_mutants, strict=True)}


def subject(make: Callable[[], object], *cases: str, nproc: int = 2) -> Subject:
    """Return a strategy to measure in these cases, in the place of ddp."""
    config = load_config(None, {"strategy": "ddp", "nproc": nproc})
    required = STRATEGIES.required

    def build(_: RunConfig) -> object:
        return make()

    return Subject(config=config, cases=tuple(required[case] for case in cases), make=build)
