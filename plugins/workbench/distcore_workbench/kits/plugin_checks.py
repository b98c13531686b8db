"""Measurements that the laws of several kinds of plugins share."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from distcore import DistcoreError
from distcore.hints import how_to_get
from distcore.registry import offers
from distcore.testing import needs


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
    """Return the options that take a value of another type, or NaN, without a line that names them.

    NaN is tried for numbers.
    """
    unchecked = []
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if not field.init:
            continue
        values: list[Any] = [WRONG]
        if isinstance(field.default, float):
            values.append(float("nan"))
        for value in values:
            try:
                build({field.name: value})
                unchecked.append(f"{field.name} = {value}")
            except DistcoreError as error:
                text = str(error)
                if field.name not in text or "\n" in text:
                    unchecked.append(f"{field.name}: {text!r}")
            except Exception as error:  # of the plugin
                unchecked.append(f"{field.name} = {value}: {type(error).__name__}")
    return unchecked


def drawn() -> list[str]:
    """Draw from the generators of Python, numpy and torch.

    Equal answers mean that they were in equal states.
    """
    numbers = (random.random(), np.random.random(), float(torch.rand(())))
    return [repr(number) for number in numbers]
