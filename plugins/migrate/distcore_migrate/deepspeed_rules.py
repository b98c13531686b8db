"""Rules that several sections of DeepSpeed's JSON share: an option of the strategy, a key as it
is, the word auto.
"""

from __future__ import annotations

from typing import Any

from distcore_migrate.draft import OFF, Draft, Kind, Rule, converted, none

AUTO = "auto"
"""DeepSpeed's word for what the Trainer's arguments say."""
OPTIONS = "strategy_options."
"""Where the strategy takes its options."""
CONFIG = "strategy_options.config."
"""Where the strategy takes keys of DeepSpeed as they are."""
GONE = none("DeepSpeed has dropped it, in 0.19.7 at the latest")


def option(name: str, convert: Any = None, auto: bool = False) -> Rule:
    """The option of that name; ``auto``: it knows the word, otherwise
    ``"auto"`` is DeepSpeed's own default.
    """

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value is None or (value == AUTO and not auto):
            draft.note("off", key)
        else:
            draft.set(
                f"{OPTIONS}{name}", AUTO if value == AUTO else converted(convert, key, value), key
            )

    return rule


def as_it_is(draft: Draft, name: str, value: Any) -> None:
    """Keep the key for DeepSpeed."""
    if value is None or value == AUTO:
        draft.note("off", name)
        return
    draft.set(f"{CONFIG}{name}", value, name)
    draft.opaque.add(f"{CONFIG}{name}")


def unless_auto(rule: Rule) -> Rule:
    """The rule, but nothing for ``"auto"``."""

    def inner(draft: Draft, name: str, value: Any) -> None:
        if value == AUTO:
            draft.note("off", name)
        else:
            rule(draft, name, value)

    return inner


def enabled(why: str, kind: Kind = "none") -> Rule:
    """A section that the strategy refuses where it is on."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        on = value.get("enabled") if isinstance(value, dict) else value
        draft.note(kind if on not in OFF else "off", name, why if on not in OFF else "")

    return rule
