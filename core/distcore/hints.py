"""Hints that end an error line: the word that was meant, and how to install what is missing.

The core knows its own words alone. What other libraries call a flag, and which distribution has
a plugin, is told by *providers*: entry points in the group ``distcore.hints``, each the name of a
module. They are loaded when an error is written that may need them, never at a start. They change
no run, so ``-p no:NAME`` and ``DISTCORE_LOAD_PLUGINS`` do not concern them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Protocol

from distcore.errors import with_keys

__all__ = ["how_to_get"]
"""The name that any distribution may import; ``nearest`` is in ``distcore``."""


class Provider(Protocol):
    """What a module of the group ``distcore.hints`` has."""

    FLAGS: Mapping[str, str]
    """Flags of other libraries, in small letters and with hyphens, each with the flag to use
    here; a remark may follow it.
    """
    KEYS: Mapping[str, str]
    """The config key for a flag of ``FLAGS``, where its name is not that of the flag."""
    SHIPPED: Mapping[str, Mapping[str, Sequence[str]]]
    """By distribution and group of entry points (without ``distcore.``): names of plugins."""

    def how_to_install(self, distribution: str) -> str:
        """Return the command that installs a distribution of ``SHIPPED``."""
        ...


@cache
def _providers() -> list[Provider]:
    """Load the providers. One that fails is left out: it must not hide the error that asks."""
    providers = []
    for entry in entry_points(group="distcore.hints"):
        try:
            providers.append(entry.load())
        except Exception:
            continue
    return providers


def hint_from_other_libraries(word: str, known: Container[str]) -> str:
    """Return ``" (here it is --lr)"`` for a flag or config key of another library, or an
    empty string.

    A counterpart that is not among the ``known`` flags or keys of the command is of no use.
    """
    flag = f"--{word.lstrip('-')}".replace("_", "-")
    for provider in _providers():
        counterpart = provider.FLAGS.get(flag, "")
        if not word.startswith("-"):
            counterpart = provider.KEYS.get(flag) or with_keys(counterpart)
        name = re.split("[ ,.;=]", counterpart)[0]
        if name in known:
            return f" (here it is {counterpart})"
    return ""


def how_to_get(group: str, name: str | None = None) -> str | None:
    """Return the command that installs the plugin ``name``, or any of the group without a name;
    ``None`` if no provider knows it.
    """
    for provider in _providers():
        for distribution, groups in provider.SHIPPED.items():
            names = groups.get(group, ())
            if name in names or (name is None and names):
                return provider.how_to_install(distribution)
    return None


def samples_of(names: Sequence[str]) -> Sequence[str]:
    """Return five of ``names`` for a message, spread over all: the first ones are much alike."""
    step = max(1, len(names) // 5)
    return names[::step][:5]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known word closest to ``word``,
    or an empty string.
    """
    names = list(known)
    # To difflib alone a letter that is missing is less than one that is wrong, and the hyphens of
    # flags are letters.
    match = next((name for name in names if _is_slip(word, name)), None)
    if match is None:
        bare_names = {name.lstrip("-").lower(): name for name in names}
        bare_word = word.lstrip("-").lower()
        close = difflib.get_close_matches(bare_word, bare_names, n=1, cutoff=0.7)
        match = bare_names[close[0]] if close else None
    return f" (did you mean {match!r}?)" if match else ""


def _is_slip(word: str, name: str) -> bool:
    """Return True if one letter of ``word`` is wrong, or two neighbors changed places."""
    if len(word) != len(name) or word.isdecimal():
        return False
    pairs = enumerate(zip(word, name, strict=True))
    wrong = [at for at, (typed, meant) in pairs if typed != meant]
    if not wrong or len(wrong) > 2:
        return False
    first, last = wrong[0], wrong[-1]
    if first == last:
        return True
    return last == first + 1 and word[first : last + 1] == name[last] + name[first]
