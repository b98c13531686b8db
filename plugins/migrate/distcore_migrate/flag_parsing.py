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
            written_name, equals, value = rest.pop(0).lstrip("-").partition("=")
            name = self._full_name(written_name.replace("-", "_"))
            if not equals:
                name_with_value = re.fullmatch(r"([A-Za-z])(\d.*)", written_name)
                if name_with_value and name_with_value[1] in self.short:
                    name, value = name_with_value.groups()
                    equals = "="
            earlier = f"{flags[name]}, " if name in REPEATED and name in flags else ""
            if equals:
                flags[name] = value_of(f"{earlier}{value}")
            elif rest and self._takes_value(name, rest):
                count = 2 if name in self.pairs else 1
                flags[name] = value_of(f"{earlier}{' '.join(rest[:count])}")
                del rest[:count]
            else:
                flags[name] = True
        return flags, rest[1:] if rest[:1] == ["--"] else rest

    def _full_name(self, name: str) -> str:
        """Return the flag that ``name`` is or abbreviates; an unknown one as it is."""
        return abbreviated(name, self.switches | self.values | self.pairs) or name

    def _takes_value(self, name: str, rest: Sequence[str]) -> bool:
        """Return True if the first of the words ``rest`` is a value of the flag."""
        if name in self.values | self.pairs:
            return True
        return name not in self.switches and _looks_like_value(rest)


def abbreviated(given: str, known: Collection[str]) -> str | None:
    """Return the one of the ``known`` flags that is ``given``, or the only one that begins so.

    ``None`` if there is none.
    """
    if given in known:
        return given
    longer = [name for name in known if name.startswith(given)]
    return longer[0] if len(longer) == 1 and len(given) > 1 else None


def parse_flags(words: Sequence[str]) -> Tree:
    """Return a script's flags with their values; raises ConfigError.

    Several words after a flag make a list, none means true.
    """
    flags: Tree = {}
    name = ""
    values: list[str] = []
    for word in [*words, "--"]:  # the last one ends the values of the last flag
        if not is_flag(word):
            if not name:
                raise ConfigError(f"argument {word!r}: expected a flag such as --learning_rate")
            values.append(word)
            continue
        if name:
            parsed = [value_of(text) for text in values]
            if not parsed:
                flags[name] = True
            elif len(parsed) == 1:
                flags[name] = parsed[0]
            else:
                flags[name] = parsed
        written_name, equals, value = word.lstrip("-").partition("=")
        name = written_name.replace("-", "_")
        values = [value] if equals else []
    return flags


def is_flag(word: str) -> bool:
    """Return True for a word that begins as a flag does, and is no negative number."""
    return word.startswith("-") and not re.fullmatch(r"-\.?\d.*", word)


def value_of(text: str) -> Any:
    """Return the value of a word: a number, a truth value, a tree, or else the word itself."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if text in ("NaN", "Infinity", "-Infinity"):  # numbers to Python's JSON, words to users
        return text
    try:
        return json.loads(text)
    except ValueError:
        pass
    # Numbers that JSON does not have, such as .5 and +1.
    if not re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text, re.IGNORECASE):
        return text
    try:
        return float(text)
    except ValueError:
        return text


def _looks_like_value(rest: Sequence[str]) -> bool:
    """Return True if the first word is no flag and names no script; False without one."""
    if not rest:
        return False
    is_script = rest[0].endswith((".py", ".sh"))
    return not is_flag(rest[0]) and not is_script
