"""Words of a command line as flags and their values."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from distcore import ConfigError
from distcore_migrate.draft import Tree

REPEATED = ("x", "mca", "gmca", "genv", "env")
"""Flags of mpirun that may come several times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """The flags of a program that starts another one, as its parser takes them."""

    switches: frozenset[str]
    """Flags without a value, with underscores."""
    values: frozenset[str]
    """Flags with one value."""
    pairs: frozenset[str] = frozenset()
    """Flags with two values."""
    short: frozenset[str] = frozenset()
    """Flags whose value may follow without a space: ``-n2``."""

    def cut(self, words: Sequence[str]) -> tuple[Tree, list[str]]:
        """Return the flags before the first word that is none, and the words from there on.

        An abbreviated flag must fit only one flag. The word after an unknown flag is its value if
        it looks like a value and does not name a script.
        """
        flags: Tree = {}
        rest = list(words)
        while rest and is_flag(rest[0]) and rest[0] != "--":
            given, equals, value = rest.pop(0).lstrip("-").partition("=")
            name = self._named(given.replace("-", "_"))
            if (
                not equals
                and (glued := re.fullmatch(r"([A-Za-z])(\d.*)", given))
                and glued[1] in self.short
            ):
                name, equals, value = glued[1], "=", glued[2]
            count = 2 if name in self.pairs else 1
            takes = name in self.values | self.pairs or (
                name not in self.switches and _looks_like_value(rest)
            )
            before = f"{flags[name]}, " if name in REPEATED and name in flags else ""
            if equals:
                flags[name] = value_of(f"{before}{value}")
            elif takes and rest:
                taken = [rest.pop(0) for _ in range(min(count, len(rest)))]
                flags[name] = value_of(f"{before}{' '.join(taken)}")
            else:
                flags[name] = True
        return flags, rest[1:] if rest[:1] == ["--"] else rest

    def _named(self, given: str) -> str:
        return abbreviated(given, self.switches | self.values | self.pairs) or given


def abbreviated(given: str, known: Collection[str]) -> str | None:
    """Return the flag that ``given`` stands for: itself, or the only one that begins
    so; ``None`` for none.
    """
    if given in known:
        return given
    longer = [name for name in known if name.startswith(given)]
    return longer[0] if len(longer) == 1 and len(given) > 1 else None


def parse_flags(words: Sequence[str]) -> Tree:
    """Return a script's flags with their values: several words make a list, none
    means true; raises ConfigError.
    """
    flags: Tree = {}
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if not is_flag(word):
            if not name:
                raise ConfigError(f"argument {word!r}: expected a flag such as --learning_rate")
            values.append(word)
            continue
        if name:
            parsed = [value_of(text) for text in values]
            flags[name] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
        given, equals, value = word.lstrip("-").partition("=")
        name, values = given.replace("-", "_"), [value] if equals else []
    return flags


def is_flag(word: str) -> bool:
    """Return True for a word that begins as a flag does, and is no negative number."""
    return word.startswith("-") and not re.fullmatch(r"-\.?\d.*", word)


def value_of(text: str) -> Any:
    """Return the value of a word: a number, a truth value, a tree, or else the word itself."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        return json.loads(text) if text not in ("NaN", "Infinity", "-Infinity") else text
    except ValueError:
        pass
    try:
        return (
            float(text) if re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text, re.IGNORECASE) else text
        )
    except ValueError:
        return text


def _looks_like_value(rest: Sequence[str]) -> bool:
    return bool(rest) and not is_flag(rest[0]) and not rest[0].endswith((".py", ".sh"))
