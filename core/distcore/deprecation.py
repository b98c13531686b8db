"""Deprecation: what is to go warns for two minor versions."""

import warnings
from typing import Any

KEPT = 2
"""Minor versions in which what is deprecated still works, and warns."""


class DeprecatedWarning(FutureWarning):
    """What was used goes in a later version. ``distcore`` prints it on one line."""


def deprecated(what: str, since: str, instead: str) -> None:
    """Warn, at the caller's call site, that ``what`` is deprecated;
    ``instead`` names the replacement.

    ``since`` is the first version of the distribution that warns, such as ``0.2``. A test
    holds ours to ``removal``.
    """
    message = f"{what} is deprecated since {since} and goes with {removal(since)}; use {instead}"
    warnings.warn(message, DeprecatedWarning, stacklevel=3)


def removal(since: str) -> str:
    """Return the version in which what warns ``since`` is gone."""
    major, minor = since.split(".")
    return f"{major}.{int(minor) + KEPT}"


def print_on_one_line() -> None:
    """Have these warnings printed without their place in the code, and other warnings as before."""
    warnings.formatwarning = _formatted


_formatted_by_python = warnings.formatwarning


def _formatted(message: Warning | str, category: type[Warning], *place: Any, **source: Any) -> str:
    if issubclass(category, DeprecatedWarning):
        return f"warning: {message}\n"
    return _formatted_by_python(message, category, *place, **source)
