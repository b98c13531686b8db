"""The config that is being made, and notes about the keys that were read; rules write both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distcore import ConfigError, nearest

Tree = dict[str, Any]
Kind = Literal["none", "instead", "differs", "open", "start", "idle", "off"]
"""``none``: has no equal here. ``instead``: a flag, key or command that the user gives does it.

``differs``: is there, and means something else. ``open``: no source says it. ``start``: became a
flag of the command that starts the run. ``idle``: has no effect here. ``off``: asks for nothing.
"""
OFF: tuple[Any, ...] = (None, False, "", "no", "none", "None", [], {})
"""Values by which a key asks for nothing."""


@dataclass(frozen=True, slots=True)
class Note:
    """A remark about one key, or about the whole config."""

    kind: Kind
    """Kind of remark."""
    about: str
    """The key with its value, or another subject of the note."""
    text: str = ""
    """The reason or the remedy; empty if the key needs no words."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A value that is no key of the config by itself, such as the rows of a device."""

    value: Any
    """The value that was read."""
    origin: str
    """The key that it was read from."""


@dataclass(slots=True)
class Draft:
    """Keys of the config by their dotted name, each with its origin, and notes."""

    values: Tree = field(default_factory=dict)
    """Keys of the config by their dotted name."""
    origins: dict[str, str] = field(default_factory=dict)
    """The same names, to the keys that the values were read from."""
    facts: dict[str, Fact] = field(default_factory=dict)
    """Values, by name, that were read and are no keys of the config by themselves."""
    notes: list[Note] = field(default_factory=list)
    """Remarks, in the order in which they came up."""
    translated: set[str] = field(default_factory=set)
    """Facts that a key or a note was made of."""
    start: list[str] = field(default_factory=list)
    """Flags of ``distcore train`` that start the ranks, and that a config cannot have."""
    opaque: set[str] = field(default_factory=set)
    """Dotted keys whose value is one tree, however deep."""
    rows: dict[str, list[Tree]] = field(default_factory=dict)
    """Rows that are written to a file beside the config, by the key that names the file."""

    def set(self, key: str, value: Any, origin: str) -> None:
        """Set a key of the config.

        Raises ConfigError if another source has set it to another value.
        """
        origin_before = self.origins.get(key)
        value_before = self.values.get(key, value)
        self._agree(key, value_before, value, origin_before or "", origin)
        self.values[key] = value
        self.origins[key] = _joined(origin_before, origin)

    def keep(self, name: str, value: Any, origin: str) -> None:
        """Keep a fact until all sources have been read.

        Raises ConfigError if two sources contradict each other.
        """
        fact_before = self.facts.get(name)
        if fact_before is None:
            self.facts[name] = Fact(value, origin)
            return
        self._agree(name, fact_before.value, value, fact_before.origin, origin)
        self.facts[name] = Fact(value, _joined(fact_before.origin, origin))

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a fact, and mark it as translated."""
        self.translated.add(name)
        return self.facts[name].value if name in self.facts else default

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a fact, which other keys are made of."""
        return self.facts[name].value if name in self.facts else default

    def origin(self, *names: str) -> str:
        """Return the keys that these facts were read from."""
        origins = [self.facts[name].origin for name in names if name in self.facts]
        return ", ".join(dict.fromkeys(origins))

    def note(self, kind: Kind, about: str, text: str = "") -> None:
        """Add a note about a key, unless the same note is there already."""
        note = Note(kind, about, text)
        if note not in self.notes:
            self.notes.append(note)

    def about(self, kind: Kind) -> tuple[str, ...]:
        """Return the subjects of the notes of one kind."""
        return tuple(note.about for note in self.notes if note.kind == kind)

    def note_fact(self, kind: Kind, name: str, text: str = "") -> None:
        """Add a note about a fact, if a source has it."""
        if name not in self.facts:
            return
        self.translated.add(name)
        fact = self.facts[name]
        about = fact.origin if kind == "off" else written(fact.origin, fact.value)
        self.note(kind, about, text)

    @staticmethod
    def _agree(
        key: str,
        before: Any,
        value: Any,
        origin_before: str,
        origin: str,
    ) -> None:
        """Raise ConfigError unless two sources give ``key`` the same value."""
        if before != value:
            raise ConfigError(
                f"{origin} = {value!r}, but {origin_before} = {before!r}: both say {key}; make them"
                " equal or leave one out"
            )


def _joined(origin_before: str | None, origin: str) -> str:
    """Return the origins of a value that another source has given, too, each origin once."""
    if origin_before in (None, origin):
        return origin
    return f"{origin_before}, {origin}"


Rule = Callable[[Draft, str, Any], None]
"""Translates one key: takes the draft, the key's name in its source, and its value."""


def to(key: str, convert: Callable[[Any], Any] | None = None, differs: str = "") -> Rule:
    """The key becomes ``key`` of the config, after ``convert``; ``differs``: its other meaning."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        if value is None or value == "":
            draft.note("off", name)
            return
        draft.set(key, converted(convert, name, value), name)
        if differs:
            draft.note("differs", written(name, value), differs)

    return rule


def fact(name: str, convert: Callable[[Any], Any] | None = None) -> Rule:
    """The value is kept as a fact until all sources are read, to be combined with other keys."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value is None:
            draft.note("off", key)
        else:
            draft.keep(name, converted(convert, key, value), key)

    return rule


def none(advice: str, off: tuple[Any, ...] = ()) -> Rule:
    """The key has no equal; ``advice`` says why, or what to do.

    A value in ``off`` needs no advice.
    """
    return _asking("none", advice, off)


def instead(advice: str, off: tuple[Any, ...] = ()) -> Rule:
    """The key has an equal that the file does not have; ``advice`` names it.

    A value in ``off`` needs no advice.
    """
    return _asking("instead", advice, off)


def _asking(kind: Kind, advice: str, off: tuple[Any, ...]) -> Rule:
    """Return the rule that notes ``advice``, unless the value is in ``off`` or asks for nothing."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        if value in (*OFF, *off):
            draft.note("off", name)
        else:
            draft.note(kind, written(name, value), advice)

    return rule


def differs_if_on(meaning: str) -> Rule:
    """The key is there, and means something else: ``meaning``, where it asks for anything."""
    return _asking("differs", meaning, ())


def no_effect(why: str) -> Rule:
    """The key has no effect here, because of ``why``."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        if value in OFF:
            draft.note("off", name, why)
        else:
            draft.note("idle", written(name, value), why)

    return rule


def start_flag(*flags: str) -> Rule:
    """Return the rule that adds ``flags`` to the command that starts the run.

    ``{}`` in a flag is replaced by the value.
    """

    def rule(draft: Draft, name: str, value: Any) -> None:
        if value in OFF:
            draft.note("off", name)
            return
        flags_with_value = [flag.replace("{}", str(value)) for flag in flags]
        draft.start += flags_with_value
        draft.note("start", written(name, value), " ".join(flags_with_value))

    return rule


def apply(
    draft: Draft,
    rows: Mapping[str, Rule],
    given: Tree,
    what: str,
    prefix: str = "",
) -> None:
    """Apply the rule of each given key; note a key without a rule.

    ``rows`` are the rules by key; ``what`` names the owner of the keys, and ``prefix`` is written
    before each of them.
    """
    for name, value in given.items():
        rule = rows.get(name)
        key = f"{prefix}{name}"
        if rule is None:
            draft.note("none", written(key, value), f"no key of {what}{nearest(name, rows)}")
            continue
        try:
            rule(draft, key, value)
        except (TypeError, ValueError, AttributeError):
            # of a value that is no number, no truth value, no tree
            draft.note("none", written(key, value), "a value that is not understood")


def converted(convert: Callable[[Any], Any] | None, name: str, value: Any) -> Any:
    """Return ``value`` as ``convert`` makes it; raises ConfigError, one line, if it cannot."""
    if convert is None:
        return value
    try:
        return convert(value)
    except (TypeError, ValueError):
        words = {"int": "a whole number", "float": "a number"}
        expected = words.get(getattr(convert, "__name__", ""), "another value")
        raise ConfigError(f"{name} = {value!r}: expected {expected}") from None


def whole(value: Any) -> int:
    """Return a whole number, which may have been written as ``3.0``; raises ValueError."""
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError(value)
    return int(float(value))


# By this name, ``converted`` knows what to ask for.
whole.__name__ = "int"


def positive_or_none(value: Any) -> float | None:
    """Return a number above 0; ``None`` for others, such as -1, which switches clipping off."""
    number = float(value)
    return number if number > 0 else None


positive_or_none.__name__ = "float"


def flag(value: Any) -> bool:
    """Return a truth value that may have been written as text; raises ValueError."""
    word = str(value).lower()
    if word in ("true", "yes", "1"):
        return True
    if word in ("false", "no", "0"):
        return False
    raise ValueError(value)


def written(name: str, value: Any) -> str:
    """Return a key with its value, as the notes write it."""
    word = str(value).lower() if isinstance(value, bool) else str(value)
    if len(word) > 60:
        word = word[:59] + "…"
    return f"{name} = {word}"
