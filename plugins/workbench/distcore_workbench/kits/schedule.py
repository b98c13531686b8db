"""The laws of a learning-rate schedule: ``distcore check --schedule NAME``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from distcore import DistcoreError
from distcore.testing import FP32, Measured, Suite, change_random_state, needs, none_of
from distcore_workbench.kits.plugin_checks import drawn, unchecked_options
from distcore_workbench.kits.schedule_lab import EPOCH, PEAK, STEPS, ScheduleLab, schedule_lab
from distcore_workbench.kits.session_runs import tensors_of

SUITE = Suite("schedule", schedule_lab)
LENGTHS = (1, 2, 7, 100, 1000)
"""Optimizer steps of runs: a schedule is to fit each."""
LONG = 200
"""Steps of a run in which a schedule has the time to reach its peak."""


@SUITE.law("gradient")
def runs_of_any_length(lab: ScheduleLab) -> Measured:
    """Every step of a run of any length has a rate, and so has the step after the last one."""
    wrong = []
    for steps in LENGTHS:
        try:
            lab.rates(steps)
        except DistcoreError as error:
            wrong.append(f"of {steps} steps: {error}")
    return none_of(wrong, "runs without a rate", "compute the factor from step and total_steps")


@SUITE.law("gradient")
def peak_is_the_rate(lab: ScheduleLab) -> Measured:
    """The largest rate of a run is the ``lr`` of its config."""
    highest = max(max(rates) for rates in lab.rates(LONG))
    note = (
        f"the largest of {LONG} rates is {highest / PEAK:.3g} times lr; return the factor of the"
        " rate, which is 1 at its peak"
    )
    return Measured(error=abs(highest / PEAK - 1), bound=0.05, note=note)


@SUITE.law("gradient")
def follows_a_warm_up(lab: ScheduleLab) -> Measured:
    """After a warm-up the rate goes on from its peak, without a jump."""
    needs(lab.name != "constant", "constant has no warm-up; constant_with_warmup has one")
    warmup = LONG // 4
    rates = [rates[0] for rates in lab.rates(LONG, {"schedule.warmup_steps": warmup})]
    first = rates[warmup] / PEAK
    note = (
        f"the first rate after {warmup} steps of warm-up is {first:.3g} times lr; take"
        " warmup_steps, and begin at 1 there"
    )
    return Measured(error=abs(first - 1), bound=0.1, note=note)


@SUITE.law("gradient")
def groups_alike(lab: ScheduleLab) -> Measured:
    """Groups with rates of their own follow the schedule together."""
    peaks = (PEAK, PEAK / 10, PEAK * 3)
    worst = 0.0
    for rates in lab.rates(STEPS, peaks=peaks):
        factors = [rate / peak for rate, peak in zip(rates, peaks, strict=True)]
        worst = max(worst, max(factors) - min(factors))
    note = (
        "the largest difference of the factors of two groups in a step; the factor must not depend"
        " on how often it was asked for"
    )
    return Measured(error=worst, bound=FP32, note=note)


@SUITE.law("gradient")
def holds_through_an_epoch(lab: ScheduleLab) -> Measured:
    """With ``schedule.interval: epoch`` the rate stays through each epoch as it was at its first
    step.
    """
    by_step = lab.rates(STEPS)
    by_epoch = lab.rates(STEPS, {"schedule.interval": "epoch"})
    wrong = []
    for step, rates in enumerate(by_epoch[:STEPS]):
        first = step - step % EPOCH
        if rates != by_step[first]:
            wrong.append(f"step {step}: {rates[0]:g} for {by_step[first][0]:g}")
    return none_of(wrong, "rates that change in an epoch", "compute the factor from step alone")


@SUITE.law("resume")
def any_step_at_once(lab: ScheduleLab) -> Measured:
    """A schedule that begins at any step has the rate there of one that made all steps before."""
    walked = lab.rates(STEPS)
    wrong = []
    for step in reversed(range(STEPS + 1)):
        scheduler = lab.scheduler(STEPS)
        at_once = PEAK * scheduler.lr_lambdas[0](step)
        if at_once != walked[step][0]:
            wrong.append(f"step {step}: {at_once:g} for {walked[step][0]:g}")
    return none_of(wrong, "other rates", "keep nothing between steps: a resume begins at any one")


@SUITE.law("resume")
def draws_nothing(lab: ScheduleLab) -> Measured:
    """A schedule draws no random number, and has the same rates whatever the random state."""
    with change_random_state(1):
        expected = drawn()
    # The same state again: numbers differ if the schedule has drawn some.
    with change_random_state(1):
        first = lab.rates(STEPS)
        wrong = [] if drawn() == expected else ["the random state after the steps"]
    with change_random_state(2):
        if lab.rates(STEPS) != first:
            wrong.append("the rates under another seed")
    return none_of(wrong, "changed", "draw from a generator of your own, seeded by the step")


@SUITE.law("resume")
def any_process(lab: ScheduleLab) -> Measured:
    """Another process computes the same rates: ranks must agree, and a resume is a new one."""
    code = (
        "import sys; from distcore_workbench.kits.schedule import printed_rates;"
        " print(printed_rates(sys.argv[1]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, lab.name],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    here = printed_rates(lab.name)
    elsewhere = run.stdout.strip() or run.stderr.strip()[-200:]
    wrong = [] if here == elsewhere else [f"{elsewhere} for {here}"]
    return none_of(wrong, "rates elsewhere", "use no hash(), no time and no name of the machine")


@SUITE.law("resume")
def continues(lab: ScheduleLab) -> Measured:
    """A run that was resumed half-way saves the tensors of one that was not, bit for bit."""
    lab.train("whole")
    for until in (STEPS // 2, STEPS):
        lab.train("in two parts", until)
    whole = tensors_of(lab.folder / "whole")
    resumed = tensors_of(lab.folder / "in two parts")
    wrong = []
    for name, tensor in whole.items():
        if name not in resumed or not torch.equal(tensor, resumed[name]):
            wrong.append(name)
    return none_of(
        wrong, "differ from those of a run without a stop", "compute the factor from step alone"
    )


@SUITE.law("surprise")
def options_are_checked(lab: ScheduleLab) -> Measured:
    """A value that does not fit an option is one line that names it, before any step."""

    def build(options: dict[str, Any]) -> object:
        changes = {f"schedule.{name}": value for name, value in options.items()}
        return lab.scheduler(STEPS, changes)

    unchecked = unchecked_options(lab.options, build)
    return none_of(
        unchecked,
        "options that take anything",
        "annotate the parameters, with bounds, or raise ValueError",
    )


def printed_rates(name: str) -> str:
    """Return the rates of a small run by a schedule, without further settings, as text."""
    with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
        lab = schedule_lab(name, {}, Path(folder))
        return repr([rates[0] for rates in lab.rates(STEPS)])
