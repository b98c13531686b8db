"""The config that is being made, with notes about the keys that were read; rules in
the tables write both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distcore import ConfigError, nearest

Tree = dict[str, Any]
Kind = Literal["none", "instead", "differs", "open", "start", "idle", "off"]
"""``none``: has no equal here. ``instead``: a flag, key or command that the user gives does
it. ``differs``: is there,
and means something else. ``open``: no source says it. ``start``: became a flag of the command
that starts the run.
``idle``: has no effect here. ``off``: asks for nothing.
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
        """Set a key of the config; raises ConfigError if another source has set
        it to another value.
        """
        self._agree(key, self.values.get(key, value), value, self.origins.get(key, ""), origin)
        before = self.origins.get(key)
        self.values[key] = value
        self.origins[key] = origin if before in (None, origin) else f"{before}, {origin}"

    def keep(self, name: str, value: Any, origin: str) -> None:
        """Keep a fact until all sources have been read; raises ConfigError if two
        sources contradict each other.
        """
        known = self.facts.get(name)
        if known is not None:
            self._agree(name, known.value, value, known.origin, origin)
            origin = known.origin if known.origin == origin else f"{known.origin}, {origin}"
        self.facts[name] = Fact(value, origin)

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a fact, and mark it as translated."""
        self.translated.add(name)
        return self.facts[name].value if name in self.facts else default

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a fact, which other keys are made of."""
        return self.facts[name].value if name in self.facts else default

    def origin(self, *names: str) -> str:
        """Return the keys that these facts were read from."""
        return ", ".join(
            dict.fromkeys(self.facts[name].origin for name in names if name in self.facts)
        )

    def note(self, kind: Kind, about: str, text: str = "") -> None:
        """Say something about a key; the same is said once."""
        if (note := Note(kind, about, text)) not in self.notes:
            self.notes.append(note)

    def about(self, kind: Kind) -> tuple[str, ...]:
        """Return the subjects of the notes of one kind."""
        return tuple(note.about for note in self.notes if note.kind == kind)

    def note_fact(self, kind: Kind, name: str, text: str = "") -> None:
        """Say something about a fact, if some source has it."""
        if name in self.facts:
            self.translated.add(name)
            fact = self.facts[name]
            self.note(
                kind, fact.origin if kind == "off" else written(fact.origin, fact.value), text
            )

    @staticmethod
    def _agree(key: str, before: Any, value: Any, its_origin: str, origin: str) -> None:
        if before != value:
            raise ConfigError(
                f"{origin} = {value!r}, but {its_origin} = {before!r}: both say {key}; make them"
                " equal or leave one out"
            )


Rule = Callable[[Draft, str, Any], None]
"""Translates one key: takes the draft, the key's name in its source, and its value."""


def to(key: str, convert: Callable[[Any], Any] | None = None, differs: str = "") -> Rule:
    """The key becomes ``key`` of the config, after ``convert``;
    ``differs`` notes another meaning.
    """

    def rule(draft: Draft, name: str, value: Any) -> None:
        if value is None or value == "":
            draft.note("off", name)
            return
        draft.set(key, converted(convert, name, value), name)
        if differs:
            draft.note("differs", written(name, value), differs)

    return rule


def fact(name: str, convert: Callable[[Any], Any] | None = None) -> Rule:
    """The value is kept as a fact until all sources are read, and is then
    combined with other keys.
    """

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value is None:
            draft.note("off", key)
        else:
            draft.keep(name, converted(convert, key, value), key)

    return rule


def none(advice: str, off: tuple[Any, ...] = ()) -> Rule:
    """The key has no equal; ``advice`` says why, or what to do. A value in
    ``off`` needs no advice.
    """
    return _asking("none", advice, off)


def instead(advice: str, off: tuple[Any, ...] = ()) -> Rule:
    """The key has an equal that the file does not have; ``advice`` names it. A value in
    ``off`` needs no advice.
    """
    return _asking("instead", advice, off)


def _asking(kind: Kind, advice: str, off: tuple[Any, ...]) -> Rule:
    def rule(draft: Draft, name: str, value: Any) -> None:
        asks = value not in (*OFF, *off)
        draft.note(
            kind if asks else "off", written(name, value) if asks else name, advice if asks else ""
        )

    return rule


def differs_if_on(meaning: str) -> Rule:
    """The key is there, and means something else: ``meaning``, where it asks for anything."""
    return _asking("differs", meaning, ())


def no_effect(why: str) -> Rule:
    """The key has no effect here, because of ``why``."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        draft.note(
            "off" if value in OFF else "idle", name if value in OFF else written(name, value), why
        )

    return rule


def start_flag(*flags: str) -> Rule:
    """Return the rule that adds ``flags`` to the command that starts the run; ``{}``
    stands for the value.
    """

    def rule(draft: Draft, name: str, value: Any) -> None:
        if value in OFF:
            draft.note("off", name)
            return
        given = [flag.replace("{}", str(value)) for flag in flags]
        draft.start += given
        draft.note("start", written(name, value), " ".join(given))

    return rule


def apply(draft: Draft, rows: Mapping[str, Rule], given: Tree, what: str, prefix: str = "") -> None:
    """Apply the rule of each given key; note a key without a rule. ``what`` names the
    owner of the keys.
    """
    for name, value in given.items():
        if row := rows.get(name):
            try:
                row(draft, f"{prefix}{name}", value)
            except (TypeError, ValueError, AttributeError):
                # of a value that is no number, no truth value, no tree
                draft.note(
                    "none", written(f"{prefix}{name}", value), "a value that is not understood"
                )
        else:
            draft.note(
                "none", written(f"{prefix}{name}", value), f"no key of {what}{nearest(name, rows)}"
            )


def converted(convert: Callable[[Any], Any] | None, name: str, value: Any) -> Any:
    """Return ``value`` as ``convert`` makes it; raises ConfigError, one line, if it cannot."""
    try:
        return convert(value) if convert else value
    except (TypeError, ValueError):
        wanted = {"int": "a whole number", "float": "a number"}.get(
            getattr(convert, "__name__", ""), "another value"
        )
        raise ConfigError(f"{name} = {value!r}: expected {wanted}") from None


def whole(value: Any) -> int:
    """Return a whole number that may have been written as ``3.0``; raises ValueError
    for a part of one.
    """
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError(value)
    return int(float(value))


whole.__name__ = "int"


def positive_or_none(value: Any) -> float | None:
    """Return a number above 0; ``None`` for others, such as -1, by which
    trainers switch clipping off.
    """
    number = float(value)
    return number if number > 0 else None


positive_or_none.__name__ = "float"


def flag(value: Any) -> bool:
    """Return a truth value that may have been written as text; raises ValueError."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if (word := str(value).lower()) not in words:
        raise ValueError(value)
    return words[word]


def written(name: str, value: Any) -> str:
    """Return a key with its value, as the notes write it."""
    word = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{name} = {word if len(word) <= 60 else word[:59] + '…'}"
