"""Trials of the settings of one job; recorded trials are not repeated."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from distcore import DistcoreError, RunConfig, StoppedError, TaskError, with_changes
from distcore.lab import check, resolve
from distcore_workbench.planning.byte_sizes import format_size
from distcore_workbench.tuning.agreement import Tolerance, difference
from distcore_workbench.tuning.limits import Plans
from distcore_workbench.tuning.outcome import Kind, Outcome
from distcore_workbench.tuning.record import Record, Trial
from distcore_workbench.tuning.settings import Setting, name_of, with_setting
from distcore_workbench.tuning.trial_runner import WARM_UP, Runner, trial_config

PILOT = 8
"""Steps of the very first trial, which measures how long a step takes.

It is repeated where twice as many are worth it.
"""
SECONDS: Mapping[Kind, float] = {"screen": 4.0, "final": 10.0}
"""Seconds for which the job as given should step in a trial; a faster setting steps as often."""
MOST = 150
"""Most steps of a trial."""
FIT_STEPS = 3
"""Timed steps of a trial that shows whether the job fits."""
PATIENCE: Mapping[Kind, float] = {"screen": 4.0, "final": 10.0}
"""How many times as long as the first trial another one may take."""
SHORTEST = 60.0
"""Seconds that each trial may take at least: compiling takes its time."""


@dataclass
class Bench:
    """The conditions of all trials of a job."""

    file: str | None
    """The config file, or none."""
    changes: Mapping[str, Any]
    """Values by dotted key over it."""
    budget: float
    """Seconds for all trials."""
    record: Record
    """The trials so far."""
    runner: Runner
    """Starts the trials."""
    plans: Plans | None
    """The memory of settings.

    ``None`` if the model cannot be built without weights: then no setting is refused.
    """
    rows: int
    """Rows of a step."""
    tolerance: Tolerance
    """How far losses may be from the reference's."""
    again: str
    """The command that goes on with a tune that was stopped."""

    def measure(self, kind: Kind, setting: Setting, number: int) -> Outcome:
        """Run a trial, unless the record has it; return its outcome. Raises StoppedError."""
        trial = self.record.find(kind, setting, number)
        if trial is None:
            if self.runner.signals:
                raise self._stopped()
            trial = self._run(kind, setting, number)
            self.record.add(trial)
            line = _line(trial, len(self.record.trials))
            print(line, file=sys.stderr, flush=True)
            self._refuse_broken_job()
        return trial.outcome

    def _refuse_broken_job(self) -> None:
        """Raise TaskError if the first two trials failed at one line of the user's program.

        No setting mends that.
        """
        reasons = [trial.outcome.why for trial in self.record.trials[:2]]
        failures = [reason for reason in reasons if "; raised at " in reason]
        lines_of_code = {failure.rpartition("; raised at ")[2] for failure in failures}
        if len(failures) == 2 and len(lines_of_code) == 1:
            raise TaskError(f"the job itself fails, so no setting helps: {failures[0]}")

    def spent(self) -> float:
        """Return the seconds of all trials so far."""
        return sum(trial.outcome.seconds for trial in self.record.trials)

    def _run(self, kind: Kind, setting: Setting, number: int) -> Trial:
        """Run a trial, which is refused if its config is, or if it cannot fit in memory."""
        refused = Outcome(result="refused")
        trial = Trial(kind=kind, setting=setting, number=number, steps=0, outcome=refused)
        out = self.record.file.parent / "trials" / "run"
        try:
            steps = self._steps(kind)
            config = trial_config(with_setting(self.file, self.changes, setting), kind, steps)
            resolved = resolve(with_changes(config, {"out": str(out)}))
            check(resolved)
            if kind == "screen":  # not before: now the task's options are there
                resolved = replace(resolved, config=trial_config(resolved.config, kind, steps))
        except DistcoreError as error:
            one_line = " ".join(str(error).split())
            return replace(trial, outcome=replace(refused, why=one_line))
        if self.plans is not None and (why := self.plans.why_not(resolved)):
            return replace(trial, outcome=Outcome(result="does not fit", why=why))
        config = resolved.config
        outcome, steps_done = self._trial(config, kind, setting)
        if kind == "screen" and outcome.result == "ok" and not self._reference():
            # The pilot: it says how many steps are worth timing, and the setting is measured
            # with as many.
            more_steps = self._worthwhile_steps(kind, outcome)
            if more_steps >= 2 * steps:
                longer_config = trial_config(config, kind, more_steps)
                longer, steps_done = self._trial(longer_config, kind, setting)
                outcome = replace(longer, seconds=outcome.seconds + longer.seconds)
        compared = self._compare_with_reference(kind, outcome)
        return replace(trial, steps=steps_done, outcome=compared)

    def _trial(self, config: RunConfig, kind: Kind, setting: Setting) -> tuple[Outcome, int]:
        """Run the process of a trial; return its outcome and its timed steps."""
        name = f"{len(self.record.trials) + 1:03d}"
        outcome, steps_done = self.runner.run(config, setting, name, self._timeout(kind))
        if self.runner.signals:
            raise self._stopped()
        return outcome, steps_done

    def _compare_with_reference(self, kind: Kind, outcome: Outcome) -> Outcome:
        """Return the outcome of a trial, which fails if it differs from the reference."""
        reference = self._reference()
        if kind != "screen" or outcome.result != "ok" or reference is None:
            return outcome
        why = difference(outcome, reference.outcome, self.tolerance)
        return replace(outcome, result="differs", why=why) if why else outcome

    def _reference(self) -> Trial | None:
        """Return the first trial that went well: it says how long a step takes."""
        for trial in self.record.trials:
            if trial.kind == "screen" and trial.outcome.result == "ok":
                return trial
        return None

    def _steps(self, kind: Kind) -> int:
        """Return the steps to time in a trial; short trials all have those of the reference."""
        if kind == "fit":
            return FIT_STEPS
        reference = self._reference()
        if reference is None:
            return PILOT
        if kind == "screen":
            return reference.steps
        return self._worthwhile_steps(kind, reference.outcome)

    def _worthwhile_steps(self, kind: Kind, outcome: Outcome) -> int:
        """Return the steps to time in a trial, by the speed in an earlier one's ``outcome``."""
        steps_in_time = round(SECONDS[kind] * outcome.speed / self.rows)
        return min(MOST, max(PILOT, WARM_UP + steps_in_time))

    def _timeout(self, kind: Kind) -> float:
        """Return the seconds after which a trial counts as too slow."""
        seconds_left = max(SHORTEST / 2, self.budget - self.spent())
        successful = [trial for trial in self.record.trials if trial.outcome.result == "ok"]
        if not successful or kind == "fit":
            return seconds_left
        first_seconds = successful[0].outcome.seconds
        return min(seconds_left, max(SHORTEST, PATIENCE[kind] * first_seconds))

    def _stopped(self) -> StoppedError:
        """Return the error of a tune that got a signal, with the exit code of that signal."""
        line = f"tune stopped after {len(self.record.trials)} trials; go on with: {self.again}"
        return StoppedError(line, *(128 + number for number in self.runner.signals[:1]))


def _line(trial: Trial, number: int) -> str:
    """Return the line about a trial that is printed when it is done."""
    outcome = trial.outcome
    if outcome.result == "ok":
        result = f"{outcome.speed:.1f} samples/s, {format_size(outcome.peak)}"
    else:
        result = f"{outcome.result}: {outcome.why}"
    setting = name_of(trial.setting)
    return f"{number:3d} {trial.kind:6} {outcome.seconds:5.1f} s  {setting}: {result}"
