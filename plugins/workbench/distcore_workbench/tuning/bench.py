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
"""Steps of the very first trial, which says how long a step takes: it is repeated where twice as
many are worth it.
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
    """The memory of settings; ``None`` if the model cannot be built without weights: then
    no setting is refused.
    """
    rows: int
    """Rows of a step."""
    tolerance: Tolerance
    """How far losses may be from the reference's."""
    again: str
    """The command that goes on with a tune that was stopped."""

    def measure(self, kind: Kind, setting: Setting, number: int) -> Outcome:
        """Run a trial, unless the record has it; return its outcome. Raises StoppedError."""
        there = self.record.find(kind, setting, number)
        if there is None:
            if self.runner.signals:
                raise self._stopped()
            there = self._run(kind, setting, number)
            self.record.add(there)
            print(_line(there, len(self.record.trials)), file=sys.stderr, flush=True)
            self._refuse_broken_job()
        return there.outcome

    def _refuse_broken_job(self) -> None:
        """Raise TaskError if the first two trials failed at one line of the user's,
        which no setting mends.
        """
        failures = [
            one.outcome.why for one in self.record.trials[:2] if "; raised at " in one.outcome.why
        ]
        if len(failures) == 2 and len({why.rpartition("; raised at ")[2] for why in failures}) == 1:
            raise TaskError(f"the job itself fails, so no setting helps: {failures[0]}")

    def spent(self) -> float:
        """Return the seconds of all trials so far."""
        return sum(one.outcome.seconds for one in self.record.trials)

    def _run(self, kind: Kind, setting: Setting, number: int) -> Trial:
        made = Trial(
            kind=kind, setting=setting, number=number, steps=0, outcome=Outcome(result="refused")
        )
        try:
            steps = self._steps(kind)
            config = trial_config(with_setting(self.file, self.changes, setting), kind, steps)
            resolved = resolve(
                with_changes(config, {"out": str(self.record.file.parent / "trials" / "run")})
            )
            check(resolved)
            if kind == "screen":  # not before: now the task's options are there
                resolved = replace(resolved, config=trial_config(resolved.config, kind, steps))
        except DistcoreError as error:
            return replace(
                made, outcome=Outcome(result="refused", why=" ".join(str(error).split()))
            )
        if self.plans is not None and (why := self.plans.why_not(resolved)):
            return replace(made, outcome=Outcome(result="does not fit", why=why))
        config = resolved.config
        outcome, done = self._trial(config, kind, setting, steps)
        if kind == "screen" and outcome.result == "ok" and not self._reference():
            # The pilot: it says how many steps are worth timing, and the setting is measured
            # with as many.
            many = self._worthwhile_steps(kind, outcome)
            if many >= 2 * steps:
                longer, done = self._trial(trial_config(config, kind, many), kind, setting, many)
                outcome = replace(longer, seconds=outcome.seconds + longer.seconds)
        return replace(made, steps=done, outcome=self._compare_with_reference(kind, outcome))

    def _trial(
        self, config: RunConfig, kind: Kind, setting: Setting, steps: int
    ) -> tuple[Outcome, int]:
        name = f"{len(self.record.trials) + 1:03d}"
        outcome, done = self.runner.run(config, setting, name, self._timeout(kind))
        if self.runner.signals:
            raise self._stopped()
        return outcome, done

    def _compare_with_reference(self, kind: Kind, outcome: Outcome) -> Outcome:
        """Return the outcome of a trial, which fails if it differs from the reference."""
        reference = self._reference()
        if kind != "screen" or outcome.result != "ok" or reference is None:
            return outcome
        why = difference(outcome, reference.outcome, self.tolerance)
        return replace(outcome, result="differs", why=why) if why else outcome

    def _reference(self) -> Trial | None:
        """Return the first trial that went well: it says how long a step takes."""
        return next(
            (
                one
                for one in self.record.trials
                if one.kind == "screen" and one.outcome.result == "ok"
            ),
            None,
        )

    def _steps(self, kind: Kind) -> int:
        if kind == "fit":
            return FIT_STEPS
        pace = self._reference()
        if pace is None:
            return PILOT
        return pace.steps if kind == "screen" else self._worthwhile_steps(kind, pace.outcome)

    def _worthwhile_steps(self, kind: Kind, outcome: Outcome) -> int:
        """Return the steps to time in a trial, by the speed that one has shown."""
        return min(MOST, max(PILOT, WARM_UP + round(SECONDS[kind] * outcome.speed / self.rows)))

    def _timeout(self, kind: Kind) -> float:
        left = max(SHORTEST / 2, self.budget - self.spent())
        first = next(
            (one.outcome.seconds for one in self.record.trials if one.outcome.result == "ok"), None
        )
        if first is None or kind == "fit":
            return left
        return min(left, max(SHORTEST, PATIENCE[kind] * first))

    def _stopped(self) -> StoppedError:
        line = f"tune stopped after {len(self.record.trials)} trials; go on with: {self.again}"
        return StoppedError(line, *(128 + number for number in self.runner.signals[:1]))


def _line(trial: Trial, number: int) -> str:
    """Return the line that tells of a trial when it is done."""
    outcome = trial.outcome
    how = (
        f"{outcome.speed:.1f} samples/s, {format_size(outcome.peak)}"
        if outcome.result == "ok"
        else f"{outcome.result}: {outcome.why}"
    )
    return f"{number:3d} {trial.kind:6} {outcome.seconds:5.1f} s  {name_of(trial.setting)}: {how}"
