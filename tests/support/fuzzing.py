"""Random files for fuzz tests, which must give a result or a one-line error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from distcore.errors import DistcoreError

HUGE = [2**31, 2**53, 2**63, 2**64, 10**12, 10**30, -1, -(2**63)]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from(HUGE),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [
            "auto",
            "\x00",
            "\u2028",
            "a\nb",
            "../x",
            "/etc/passwd",
            "~",
            "1e400",
            "model/weight",
            "cpu",
        ]
    ),
)
"""Candidates for random values."""
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
"""The same, with lists and mappings."""


def outcome(action: Callable[[], object]) -> str | None:
    """Run ``action``; return the line in which it was refused, ``None`` if it was not.
    Other errors come through.
    """
    try:
        action()
    except DistcoreError as error:
        line = str(error)
        assert line.strip(), "an error without a word"
        assert len(line.splitlines()) == 1, f"more than one line: {line!r}"
        line.encode()  # a message is written to files
        return line
    return None


@st.composite
def edited(draw: st.DrawFn, originals: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """Some original with a few places cut out, repeated, overwritten, or with ``words`` put in."""
    data = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(0, 3))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 12))
        new = draw(st.sampled_from([*words, data[at : at + 40]]) | st.binary(max_size=4))
        data = data[:at] + new + data[at + length :]
    return data


@st.composite
def changed(draw: st.DrawFn, original: Any) -> Any:
    """A copy of a tree of JSON values in which a few values are others, are missing, or are new."""
    tree = json.loads(json.dumps(original))
    for _ in range(draw(st.integers(1, 3))):
        tree = _changed(draw, tree)
    return tree


def _changed(draw: st.DrawFn, tree: Any) -> Any:
    if not isinstance(tree, dict | list) or not tree or draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    key = draw(st.sampled_from(sorted(tree) if isinstance(tree, dict) else range(len(tree))))
    what = draw(st.integers(0, 9))
    if what == 0:
        del tree[key]
    elif what == 1 and isinstance(tree, dict):
        tree[draw(st.text(max_size=6))] = tree[key]
    elif what == 1 and isinstance(tree, list):
        tree.insert(key, tree[key])
    else:
        tree[key] = _changed(draw, tree[key])
    return tree
