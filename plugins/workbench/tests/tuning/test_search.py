"""The search alone, with measurements that a function gives: what is tried, what wins, and
what is thrown out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from distcore_workbench.tuning.agreement import TOLERANCES, difference
from distcore_workbench.tuning.fallbacks import fallback_settings, frontier, larger_micro_batches
from distcore_workbench.tuning.outcome import Kind, Outcome, Spending
from distcore_workbench.tuning.racing import ROUNDS, Finalist, choose_final, is_told_apart, race
from distcore_workbench.tuning.search import FINALISTS, SCREENING, Search, fit, speedup
from distcore_workbench.tuning.settings import Axis, Setting, name_of, setting_key

STRATEGIES = [
    [{"strategy": "wide", "strategy_options": {"size": size}, "nproc": 2} for size in (5, 25)],
    [{"strategy": "slow", "strategy_options": {"deep": deep}, "nproc": 2} for deep in (1, 2, 3)],
]
AXES = [
    Axis("strategy", STRATEGIES),
    Axis("micro-batch", [[{"micro_batch_size": size}] for size in (4, 8, 16)]),
    Axis("compile", [[{"compile": "on"}]]),
]


def speed_of(setting: Setting) -> float:
    """Of a machine on which micro-batches of 8 rows are best, but of 16 where
    there are two ranks.
    """
    speed = {"wide": 150.0, "slow": 40.0}.get(setting.get("strategy", ""), 100.0)
    best = 16 if "strategy" in setting else 8
    return speed * (1.3 if setting.get("micro_batch_size") == best else 1.0)


def took(speed: float, seconds: float = 1.0) -> Outcome:
    """A trial of two rows in each of ten steps, some of which are longer than others."""
    times = tuple((1 + step % 3) / 9.5 * 10 / speed for step in range(10))
    return Outcome(result="ok", seconds=seconds, speed=speed, times=times, peak=100)


class Machine:
    """Measures by ``speed_of``, and keeps what it was asked."""

    def __init__(
        self,
        seconds: float = 10.0,
        ends: Callable[[Kind, Setting], Outcome | None] = lambda *_: None,
    ) -> None:
        self.seconds, self.ends = seconds, ends
        self.asked: list[tuple[Kind, str, int]] = []

    def measure(self, kind: Kind, setting: Setting, number: int) -> Outcome:
        self.asked.append((kind, name_of(setting), number))
        return self.ends(kind, setting) or took(speed_of(setting), self.seconds)

    def names(self, kind: Kind) -> list[str]:
        return [name for asked, name, _ in self.asked if asked == kind]


def fails(result: Any, **where: object) -> Callable[[Kind, Setting], Outcome | None]:
    """A machine on which settings that have these values end so."""

    def ends(kind: Kind, setting: Setting) -> Outcome | None:
        hit = all(setting.get(key) == value for key, value in where.items())
        return Outcome(result=result, seconds=1.0, why="as told") if hit else None

    return ends


def test_values_of_later_axes_stand_on_the_best_of_earlier_ones() -> None:
    machine = Machine()
    finals = Search(machine.measure, 10_000).run(AXES, ())
    # 8 rows alone would have looked better
    assert finals[0].setting == STRATEGIES[0][0] | {"micro_batch_size": 16}
    reference = next(one for one in finals if one.setting == {})
    assert finals[0].speed / reference.speed == pytest.approx(1.95)
    assert len(reference.speeds) == 1  # the first round has told it apart


def test_a_family_that_is_far_behind_is_tried_once() -> None:
    machine = Machine()
    Search(machine.measure, 10_000).run(AXES, ())
    assert "wide size=25 nproc=2" in machine.names("screen")
    assert "slow deep=1 nproc=2" in machine.names("screen")
    assert "slow deep=2 nproc=2" not in machine.names("screen")


def test_the_best_are_measured_in_turns_every_second_round_backwards() -> None:
    machine = Machine()
    Search(machine.measure, 10_000).run(AXES, ())
    rounds = {
        number: [name for kind, name, n in machine.asked if (kind, n) == ("final", number)]
        for number in (1, 2)
    }
    assert len(rounds[1]) == FINALISTS + 1
    assert rounds[2] == [name for name in reversed(rounds[1]) if name in rounds[2]]


@pytest.mark.parametrize("budget", [60, 100, 200, 400])
def test_the_search_leaves_time_for_the_finals_and_keeps_the_budget(budget: float) -> None:
    machine = Machine()
    search = Search(machine.measure, budget)
    finals = search.run(AXES, ())
    assert 10 * len(machine.names("screen")) <= max(10, SCREENING * budget)
    assert search.spent <= budget
    assert finals[0].speed >= 100


@pytest.mark.parametrize(
    ("budget", "untried"), [(100, ["micro-batch", "compile"]), (140, []), (10_000, [])]
)
def test_a_setting_without_time_left_is_named(budget: float, untried: list[str]) -> None:
    search = Search(Machine().measure, budget)
    search.run(AXES, ())
    assert list(search.untried) == untried


@pytest.mark.parametrize(
    "result", ["differs", "out of memory", "failed", "too slow", "refused", "does not fit"]
)
def test_a_failed_setting_never_wins(result: Any) -> None:
    machine = Machine(ends=fails(result, strategy="wide"))
    finals = Search(machine.measure, 10_000).run(AXES, ())
    assert finals[0].setting == {"micro_batch_size": 8}
    assert not [one for one in finals if one.setting.get("strategy") == "wide"]


def test_the_search_decides_where_no_final_goes_well() -> None:
    machine = Machine(
        ends=lambda kind, _: Outcome(result="too slow", seconds=5.0) if kind == "final" else None
    )
    assert Search(machine.measure, 10_000).run(AXES, ())[0].setting == STRATEGIES[0][0] | {
        "micro_batch_size": 16
    }


def test_a_disturbed_step_does_not_decide() -> None:
    quiet, faster = took(100), took(110)
    disturbed = replace(faster, times=(*faster.times[:-1], 50 * faster.times[-1]))
    assert speedup(disturbed, quiet) == pytest.approx(1.1)
    assert speedup(Outcome(result="failed"), quiet) == 0


def finalist(setting: Setting, *rounds: tuple[float, ...]) -> Finalist:
    """One whose rounds took these seconds, step by step."""
    return Finalist(setting=setting, speeds=[10 / sum(one) for one in rounds], rounds=list(rounds))


def test_the_shortest_time_of_each_step_counts_over_several_rounds() -> None:
    noisy = finalist({"nproc": 2}, (1.0, 9.0, 1.0), (7.0, 1.0, 1.0))
    assert noisy.speed == pytest.approx(10 / 3)
    # one round alone: slower
    assert is_told_apart(noisy, finalist({}, (1.5, 1.5, 1.5), (1.5, 1.5, 1.5))) is False
    calm = finalist({"nproc": 2}, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    assert is_told_apart(calm, finalist({}, (1.5, 1.5, 1.5), (1.5, 1.5, 1.5)))
    assert not is_told_apart(calm, finalist({}, (1.01, 1.01, 1.01), (1.01, 1.01, 1.01)))


def test_the_simplest_of_settings_that_measure_alike_is_taken() -> None:
    wide: Setting = {**STRATEGIES[0][0], "compile": "on"}
    finals = [
        finalist(wide, (1.0, 1.0), (1.0, 1.0)),
        finalist({"compile": "on"}, (1.01, 1.01), (1.01, 1.01)),
        finalist({}, (1.2, 1.2), (1.2, 1.2)),
    ]
    chosen, close = choose_final(finals)
    assert chosen.setting == {"compile": "on"}
    assert close == finals[:2]
    assert choose_final([finals[0], finals[2]])[0].setting == wide


def test_the_race_goes_on_until_noise_is_told_from_speed() -> None:
    def measure(kind: Kind, setting: Setting, number: int) -> Outcome:
        # other programs disturb one, then the other
        slowed = 1.3 if (number % 2 == 0) == (setting == {}) else 1.0
        return took(100 * (1 if setting else 0.9) / slowed)

    finals = race([{}, {"compile": "on"}], Spending(measure, 1000))
    assert [len(one.speeds) for one in finals] == [ROUNDS, ROUNDS] or finals[0].setting == {
        "compile": "on"
    }
    assert choose_final(finals)[0].setting == {"compile": "on"}
    assert finals[0].speed == pytest.approx(100)


def test_a_value_that_cannot_be_together_with_the_best_is_not_tried() -> None:
    machine = Machine()
    shared = Axis(
        "micro-batch",
        AXES[1].families,
        lambda setting: setting["micro_batch_size"] * setting["nproc"] < 32,
    )
    Search(machine.measure, 10_000).run([AXES[0], shared], ())
    assert {name.rpartition("=")[2] for name in machine.names("screen") if "micro" in name} == {
        "4",
        "8",
    }


def test_the_best_of_each_number_of_ranks_is_measured_again() -> None:
    four = [{"micro_batch_size": size} for size in (1, 2, 3, 4)]
    speeds = {setting_key(one): 100 + number for number, one in enumerate(({"nproc": 2}, *four))}

    def measure(kind: Kind, setting: Setting, number: int) -> Outcome:
        return took(speeds.get(setting_key(setting), 95))

    finals = Search(measure, 10_000).run(
        [Axis("ranks", [[{"nproc": 2}]]), Axis("rows", [four])], ()
    )
    assert {"nproc": 2} in [one.setting for one in finals]


def test_noise_does_not_take_the_place_of_the_best() -> None:
    machine = Machine(ends=lambda kind, setting: took(100.0 + 1.5 * bool(setting)))
    search = Search(machine.measure, 10_000)
    search.run(AXES, ())
    assert not [name for name in machine.names("screen") if "wide" in name and "micro" in name]


def test_a_search_that_is_repeated_asks_the_same_in_the_same_order() -> None:
    first, again = Machine(), Machine()
    for machine in (first, again):
        Search(machine.measure, 300).run(AXES, ())
    assert first.asked == again.asked


def test_a_job_that_does_not_run_as_given_starts_from_the_first_rung_that_does() -> None:
    def ends(kind: Kind, setting: Setting) -> Outcome | None:
        return (
            None
            if setting.get("gradient_checkpointing")
            else Outcome(result="out of memory", seconds=1.0)
        )

    finals = Search(Machine(ends=ends).measure, 10_000).run(AXES, fallback_settings([]))
    assert finals
    assert all(one.setting["gradient_checkpointing"] for one in finals)
    assert not Search(Machine(ends=fails("out of memory")).measure, 10_000).run(
        AXES, fallback_settings([])
    )


def test_fit_goes_down_the_ladder_and_up_again_in_its_micro_batch(resolved: Any) -> None:
    sharded: Setting = {"strategy": "slow", "strategy_options": {"deep": 3}, "nproc": 2}
    fallbacks = fallback_settings([*STRATEGIES[0], sharded])

    def ends(kind: Kind, setting: Setting) -> Outcome | None:
        fits = setting.get("strategy") == "slow" and setting.get("micro_batch_tokens") != 4096
        return None if fits else Outcome(result="out of memory", seconds=1.0)

    machine = Machine(ends=ends)
    fitting = fit(
        fallbacks, lambda setting: larger_micro_batches(resolved, setting), machine.measure, 1000
    )
    assert fitting is not None
    assert fitting[0]["micro_batch_tokens"] == 1024
    assert fitting[0]["strategy"] == "slow"
    assert machine.names("fit")[:3] == [
        "as given",
        "micro_batch_size=1",
        "micro_batch_size=1 gradient_checkpointing=true",
    ]
    assert fit(fallbacks, lambda setting: [], Machine(ends=fails("failed")).measure, 1000) is None
    short = Machine(ends=ends)
    # its budget is spent by two trials of a second
    assert fit(fallbacks, lambda setting: [], short.measure, 2) is None
    assert len(short.asked) == 2


def test_the_ladder_has_what_is_fastest_for_its_memory() -> None:
    def at(speed: float, peak: int, result: Any = "ok") -> tuple[Setting, Outcome]:
        return {"nproc": int(speed)}, Outcome(result=result, speed=speed, peak=peak)

    kept = frontier(
        [at(10, 100), at(20, 300), at(15, 400), at(5, 200), at(30, 50, "differs"), at(8, 90)]
    )
    assert [(one.speed, one.peak) for _, one in kept] == [(20, 300), (10, 100), (8, 90)]


@pytest.mark.parametrize(
    ("losses", "norms", "said"),
    [
        ((1.0, 0.9 * (1 + 5e-6)), (2.0, 3.0), ""),
        (
            (1.0, 0.9 * (1 + 5e-5)),
            (2.0, 3.0),
            "loss of step 2 is 0.900045, the reference's 0.9: 5.0e-05 apart, 1e-05 is",
        ),
        # which AdamW's losses do not show
        ((1.0, 0.9), (4.0, 6.0), "gradient norm of step 1 is 4, the reference's 2"),
        ((1.0, float("nan")), (2.0, 3.0), "loss of step 2 is nan"),
        ((1.0, 0.9), (), ""),  # a strategy that does not say its norm
    ],
)
def test_a_trial_agrees_with_the_reference_up_to_rounding(
    losses: tuple[float, ...], norms: tuple[float, ...], said: str
) -> None:
    reference = Outcome(result="ok", losses=(1.0, 0.9), norms=(2.0, 3.0))
    why = difference(
        Outcome(result="ok", losses=losses, norms=norms), reference, TOLERANCES["fp32"]
    )
    assert why.startswith(said) if said else not why


def test_equal_settings_have_one_key_and_a_readable_name() -> None:
    one: Setting = {
        "nproc": 2,
        "strategy": "wide",
        "strategy_options": {"size": 5},
        "threads": None,
    }
    assert setting_key(one) == setting_key(dict(reversed(list(one.items()))))
    assert name_of(one) == "wide size=5 nproc=2"
    assert name_of({"loader.workers": 2, "threads": 1}) == "workers=2 threads=1"
