"""The training time of a process, and the speed that follows from it."""

from __future__ import annotations

import pytest

from distcore import Progress
from distcore.engine import meter


def test_the_speed_counts_time_up_to_now_but_for_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    measured = meter.Meter(Progress(step=1, samples=10))
    assert measured.samples_per_second(Progress(step=1, samples=10)) == 0.0  # no time has passed
    now[0] += 4
    assert measured.samples_per_second(Progress(step=2, samples=18)) == 2.0
    with measured.pause():
        now[0] += 50
    now[0] += 4
    assert measured.samples_per_second(Progress(step=3, samples=26)) == 2.0
    assert measured.seconds == 8.0
