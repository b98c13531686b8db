"""A rank that is slower than the others is named, with the part of its steps; jitter names none."""

from __future__ import annotations

import os
from multiprocessing import Event, Process
from multiprocessing.synchronize import Event as EventType
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import pytest
from text_task import TEXTS

from distcore import launch, load_config, train
from distcore_workbench.observe.clock import PhaseClock, RunQueue
from distcore_workbench.observe.stragglers import Stragglers, spread_of
from distcore_workbench.observe.times import attempts_of

SIZES = [(2, 1), (2, 25), (3, 10), (8, 1), (64, 10), (64, 25)]
"""Ranks, and steps between log lines."""


def lines_of(
    ranks: int, steps: int, every: int, slow: dict[str, float], seed: int = 0
) -> list[tuple[int, str]]:
    """Simulate ranks that send every so many steps; from step 500 on rank 1 is slower in some
    parts. Return the lines.

    Steps jitter by 5 %, and one of a hundred takes three times as long.
    """
    random, stragglers, lines = np.random.default_rng(seed), Stragglers(), list[tuple[int, str]]()
    for end in range(every, steps + 1, every):
        news = {}
        for rank in range(ranks):
            jitter = random.lognormal(0, 0.05, every) * np.where(random.random(every) < 0.01, 3, 1)
            usual = {"data": 0.02, "compute": 0.08}
            factor = slow if rank == 1 and end > 500 else {}
            news[rank] = {
                part: float(np.median(jitter * each * factor.get(part, 1)))
                for part, each in usual.items()
            }
        lines += [(end, line) for line in stragglers.add(news, every)]
    return lines


@pytest.mark.parametrize(("ranks", "every"), SIZES)
def test_a_rank_slowed_by_15_percent_is_named_within_30_steps(ranks: int, every: int) -> None:
    lines = lines_of(ranks, 700, every, {"data": 1.15, "compute": 1.15})
    assert {line.partition(" is slow")[0] for _, line in lines} == {"rank 1"}
    assert 500 < lines[0][0] <= 500 + max(30, 2 * every)
    assert f"above the median of {ranks} ranks over 30 steps, most of it in compute" in lines[0][1]


@pytest.mark.parametrize(("ranks", "every"), SIZES)
def test_a_thousand_steps_of_jitter_name_nobody(ranks: int, every: int) -> None:
    assert not lines_of(ranks, 1000, every, {})


def test_ranks_that_are_slow_in_turns_on_a_busy_machine_are_not_named() -> None:
    stragglers = Stragglers()
    # of ten steps each: now this rank is held up for two lines, now that one
    for line in range(200):
        slow = {"data": 0.0, "compute": 1.4}
        turns = {
            rank: slow if line // 2 % 3 == rank else {"data": 0.0, "compute": 1.0}
            for rank in range(2)
        }
        assert not stragglers.add(turns, 10)


def shared_machine(slowed: float, every: int, seed: int) -> list[tuple[int, str]]:
    """Simulate two ranks for a thousand steps on a machine that others use, too; from step 500 on
    rank 1 is slower.

    Steps vary by 12 %, and what the others do slows now this rank and now that one by some percent,
    for some 30 steps.
    """
    random, stragglers, lines = np.random.default_rng(seed), Stragglers(), list[tuple[int, str]]()
    drifts = np.zeros((2, 1000))
    for step in range(1, 1000):
        drifts[:, step] = 0.97 * drifts[:, step - 1] + random.normal(0, 0.004, 2)
    own = 0.03 * np.exp(drifts + random.normal(0, 0.12, (2, 1000)))
    own[1, 500:] *= 1 + slowed
    for end in range(every, 1001, every):
        last = own[:, end - every : end]
        news = {
            rank: {
                "data": 0.0,
                "compute": float(np.median(last[rank])),
                "spread": spread_of(last[rank].tolist()),
            }
            for rank in range(2)
        }
        lines += [(end, line) for line in stragglers.add(news, every)]
    return lines


@pytest.mark.parametrize("every", [1, 10, 25])
def test_a_slow_rank_is_named_once_on_a_shared_machine_and_no_other(every: int) -> None:
    for seed in range(5):
        assert not shared_machine(0.0, every, seed)
        ((step, line),) = shared_machine(0.15, every, seed)
        assert 500 < step <= 500 + 2 * 150
        assert line.startswith("rank 1 is slow: ")
        assert "over 150 steps" in line


def test_a_rank_at_the_threshold_is_named_once() -> None:
    stragglers, usual = Stragglers(), {"data": 0.0, "compute": 1.0}
    factors = [1.0, *(1.12, 1.08) * 20]
    said = [stragglers.add({0: usual, 1: usual | {"compute": factor}}, 30) for factor in factors]
    assert sum(map(len, said)) == 1


def test_the_time_in_which_another_process_has_the_core_is_not_the_ranks_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RunQueue, "seconds", lambda _: 0.0)
    clock = PhaseClock(0.0)
    for phase, slept, taken in (
        ("data", 0.02, 0.015),
        ("forward", 0.04, 0.03),
        ("backward", 0.02, 0.0),
    ):
        clock.enter(phase)
        monkeypatch.setattr(RunQueue, "seconds", lambda _, taken=taken: taken)
        sleep(slept)
    clock.enter("step")
    monkeypatch.setattr(RunQueue, "seconds", lambda _: 0.0)
    clock.end_step()
    clock.seconds()
    (step,) = clock.steps()
    # the last backward pass waits for other ranks
    assert (step.data_taken, step.compute_taken) == (0.015, 0.03)
    assert step.data >= 0.005
    assert step.compute >= 0.01


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="Linux alone counts it"
)
def test_the_run_queue_counts_what_a_busy_core_takes() -> None:
    """Two processes on one core: each waits while the other runs."""
    cores = os.sched_getaffinity(0)
    stop = Event()
    rival = Process(target=_spin, args=(min(cores), stop), daemon=True)
    rival.start()
    sleep(0.5)
    os.sched_setaffinity(0, {min(cores)})
    try:
        queue, began = RunQueue(), perf_counter()
        while perf_counter() - began < 0.5:
            pass
        taken, elapsed = queue.seconds(), perf_counter() - began
    finally:
        os.sched_setaffinity(0, cores)
        stop.set()
        rival.join()
    assert 0.1 < taken <= elapsed


def _spin(core: int, stop: EventType) -> None:
    os.sched_setaffinity(0, {core})
    while not stop.is_set():
        pass


def test_the_part_is_that_with_the_excess() -> None:
    ((_, line),) = lines_of(4, 700, 10, {"data": 2.0})
    assert line.endswith("most of it in data")


def test_a_rank_is_named_again_after_it_was_as_fast_as_others() -> None:
    stragglers, usual = Stragglers(), {"data": 0.0, "compute": 1.0}
    said = [
        bool(stragglers.add({0: usual, 1: usual, 2: usual | {"compute": slow}}, 30))
        for slow in (1.0, 1.2, 1.2, 1.0, 1.2, 1.05)
    ]
    assert said == [False, True, False, False, True, False]


def test_a_millisecond_is_not_worth_a_line() -> None:
    assert not Stragglers().add(
        {0: {"data": 0.0, "compute": 0.001}, 1: {"data": 0.0, "compute": 0.002}}, 30
    )


SLOW = """
from time import sleep
from distcore import hookimpl

class Slow:
    @hookimpl(wrapper=True)
    def accumulate(self, run):
        sleep(0.15 * (1.15 if run.world.rank == 1 else 1))
        return (yield)
"""


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_a_slow_rank_of_a_run_is_named(work_folder: Path) -> None:
    (work_folder / "slow.py").write_text(SLOW)
    config = {
        "task": TEXTS,
        "strategy": "ddp",
        "nproc": 2,
        "max_steps": 40,
        "global_batch_size": 8,
        "device": "cpu",
        "log_every": 10,
        "log_level": "warning",
        "out": "run",
        "checkpoints.best": None,
        "eval_at_epoch_end": False,
        "extensions.slow.py:Slow": True,
        "extensions.observe": True,
    }
    launch(train, load_config(None, config), nproc=2)
    (attempt,) = attempts_of(Path("run"))
    (said,) = [(moment.step, line) for moment in attempt for line in moment.slow]
    assert said[0] in (30, 40)
    assert said[1].startswith("rank 1 is slow: its own part of a step takes ")
    assert said[1].endswith(" above the median of 2 ranks over 30 steps, most of it in compute")
