"""A kit: the laws of one kind of plugin, each a function of a laboratory with the plugin in it."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distcore import ConfigError, DistcoreError, nearest
from distcore.hints import how_to_get
from distcore.registry import offers
from distcore.testing import Case, Finding, Measured, needs

EXACT = 0.0
"""No error at all."""
FP32 = 1e-5
"""Relative error of a tensor that other sums in fp32 may cause."""
MakeLab = Callable[[str, Mapping[str, Any], Path], Any]
Law = Callable[[Any], Measured]


class Kit:
    """The laws of a kind of plugin; an entry point of the group ``distcore.kits`` by the
    name of the kind.

    ``make_lab(name, settings, folder)`` returns the laboratory: ``settings`` are config keys by
    dotted name, ``folder`` is empty. Its attribute ``exempt`` has the cases that the plugin
    declares not to keep, with reasons.
    """

    def __init__(self, kind: str, make_lab: MakeLab) -> None:
        self.kind, self._make_lab = kind, make_lab
        self.cases: dict[str, Case] = {}

    def law(self, name: str) -> Callable[[Law], Law]:
        """Return a decorator that registers a function as a case of the law ``name``: a key of
        the laws of strategies.

        The case has the function's name with ``-`` for ``_``; its title is the first
        paragraph of the docstring.
        """

        def register(function: Law) -> Law:
            case = function.__name__.replace("_", "-")
            paragraph = (function.__doc__ or "").strip().partition("\n\n")[0]
            self.cases[case] = Case(name, case, " ".join(paragraph.split()), function)
            return function

        return register

    def __call__(
        self, name: str, settings: Mapping[str, Any] | None = None, only: Iterable[str] = ()
    ) -> list[Finding]:
        """Measure the plugin ``name``; one finding per case, or of the cases ``only``.

        Raises DistcoreError for a plugin that cannot be built, and for a case that does not exist.
        """
        wanted = list(only)
        self._check_known(wanted, f"check --{self.kind} {name}: --case")
        with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
            lab = self._make_lab(name, settings or {}, Path(folder))
            self._check_known(lab.exempt, f"{self.kind} {name!r}: exempt")
            cases = [case for case in self.cases.values() if not wanted or case.name in wanted]
            return [case.measure_in(lab).excused(lab.exempt) for case in cases]

    def _check_known(self, names: Iterable[str], where: str) -> None:
        for name in names:
            if name not in self.cases:
                listed = ", ".join(self.cases)
                raise ConfigError(
                    f"{where}: no case {name!r}{nearest(name, self.cases)} (cases: {listed})"
                )


def none_of(wrong: Iterable[str], what: str, then: str) -> Measured:
    """Return a measurement that holds if nothing is ``wrong``: ``what`` that would be, and
    what to do ``then``.
    """
    names = list(wrong)
    note = f"{what}: {', '.join(names[:3])}; {then}" if names else f"{what}: none"
    return Measured(error=len(names), bound=EXACT, note=note)


def needs_two_ranks() -> None:
    """Leave out the case where no strategy is installed that two ranks train under, and say
    how to get one.
    """
    if "ddp" not in offers("strategies"):
        command = how_to_get("strategies", "ddp")
        needs(False, f"ddp is not installed{f': {command}' if command else ''}")


WRONG = {"no": ["value"]}
"""Fits no option that has a type."""


def unchecked_options(cls: type, build: Callable[[dict[str, Any]], object]) -> list[str]:
    """Return the options that take a value of no fitting type, or NaN for a number, without a
    line that names them.
    """
    unchecked = []
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        values: list[Any] = [WRONG, float("nan")] if isinstance(field.default, float) else [WRONG]
        for value in values if field.init else ():
            try:
                build({field.name: value})
                unchecked.append(f"{field.name} = {value}")
            except DistcoreError as error:
                text = str(error)
                unchecked += (
                    [] if field.name in text and "\n" not in text else [f"{field.name}: {text!r}"]
                )
            except Exception as error:  # of the plugin
                unchecked.append(f"{field.name} = {value}: {type(error).__name__}")
    return unchecked


def drawn() -> list[str]:
    """Draw from the generators of Python, numpy and torch; equal answers mean that they
    were in equal states.
    """
    return [repr(random.random()), repr(np.random.random()), repr(float(torch.rand(())))]
