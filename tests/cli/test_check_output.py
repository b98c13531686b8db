"""``distcore check`` prints each figure of a finding once."""

from __future__ import annotations

from functools import partial

import pytest

from distcore.cli.commands.check import show
from distcore.testing import LAWS, SCALE, Finding
from distcore.testing.findings import merged

LAW = next(iter(LAWS))
FINDINGS = [
    Finding(law=LAW, case="one", held=True, error=0.0, bound=1.0),
    Finding(law=LAW, case="two", held=False, error=0.75, bound=0.5, note="rank 1: in step 3"),
    Finding(law=LAW, case="three", held=False, note="ValueError: boom"),
    Finding(law=LAW, case="four", held=False, note="ValueError: boom"),
    Finding(law=LAW, case="five", held=None, note="needs two ranks"),
]


def test_a_broken_law_is_printed_once_and_what_explains_most_of_them_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(FINDINGS)
    out = capsys.readouterr().out
    assert out.count("0.75") == out.count("rank 1: in step 3") == out.count("ValueError: boom") == 1
    assert out.splitlines()[6:] == [
        "skipped: five: needs two ranks",
        "broken: three, four: ValueError: boom",
        "broken: two: rank 1: in step 3",
        "1 held, 3 broken, 1 skipped",
    ]


def test_failures_that_follow_from_wrong_gradients_are_one_line_below_their_diagnosis(
    capsys: pytest.CaptureFixture[str],
) -> None:
    diagnosis, broken = (
        f"rank 0: {SCALE}2 times too large",
        partial(Finding, held=False, error=1.0, bound=0.5),
    )
    show([
        broken(law="gradient", case="one", note="worst: a"),
        broken(law="gradient", case="two", note=diagnosis),
        broken(law="checkpoint", case="three", note="worst: b"),
        broken(law="surprise", case="four", note="17 collectives"),
        Finding(law="gradient", case="five", held=False, note="ValueError: boom"),
    ])  # fmt: skip
    assert capsys.readouterr().out.splitlines()[6:] == [
        f"broken: two: {diagnosis}",
        "broken: one, three: likely for the same reason",
        "broken: four: 17 collectives",
        "broken: five: ValueError: boom",
        "0 held, 5 broken, 0 skipped",
    ]


def test_errors_that_differ_between_ranks_are_gradients_that_nobody_sums() -> None:
    finding = partial(Finding, law="gradient", case="one", held=False, bound=0.5, note="worst: a")
    assert merged([finding(error=1.0), finding(error=1.2)]).note.startswith(
        f"{SCALE}not the same on all ranks: are"
    )
    assert merged([finding(error=1.0), finding(error=1.0)]).note == "rank 0: worst: a"
    assert merged([finding(error=1.0), finding(error=0.0, held=True)]).note == "rank 0: worst: a"
