"""``--sweep … --trials N``: settings that Optuna draws, each by the results of earlier trials.

Nothing but the run folders is stored. The sampler of trial ``n`` has a seed of its own, so that a
trial is a function of the seed and of the results before it: a sweep that was stopped draws the
same trials again, and trains those that are not there. Sources: TPE is Bergstra et al., 2011,
"Algorithms for Hyper-Parameter Optimization", the rule of ``--prune`` Golovin et al., 2017, "Google
Vizier", section 3.2.2; both are Optuna's.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distcore import ConfigError, load_config
from distcore.files import strict_json
from distcore.lab import check, resolve
from distcore_workbench.compare.sweep_launch import plan_together, start_together
from distcore_workbench.compare.sweep_points import SweepRequest, points_of, show
from distcore_workbench.compare.sweep_runs import Point, Runs
from distcore_workbench.compare.sweep_space import Axes, Range, ends, name_of, text_of
from distcore_workbench.compare.trial_record import RECORD, said_of

try:
    import optuna
except ImportError:
    raise ConfigError(
        "--trials: needs Optuna, which is not installed: pip install optuna"
    ) from None

SAMPLERS = ("tpe", "random")
"""The values of ``--sampler``."""
DIGITS = 4
"""Significant digits of a number that is drawn: its run is named by it."""


class Judge(NamedTuple):
    """The metric by which trials are compared."""

    metric: str
    """Its name in an evaluation."""
    way: str
    """``min`` or ``max``: which is better."""
    seed: int
    """The seed of the job."""


def search(request: SweepRequest, axes: Axes, out: Path, runs: Runs) -> int:
    """Draw and train the trials, show all, and return the exit code: 0, or 3 if a run failed.

    Raises DistcoreError before the first run starts, and StoppedError.
    """
    count = request.trials or 0
    sampler = request.sampler or SAMPLERS[0]
    if count < 1:
        raise ConfigError(f"--trials {count}: must be at least 1")
    if sampler not in SAMPLERS:
        raise ConfigError(f"--sampler {sampler}: expected one of {', '.join(SAMPLERS)}")
    extremes = ends(axes)
    # refuses every value that cannot be, before the first run
    points = points_of(request, extremes, out)
    judge = _judge_of(request, next(iter(extremes.values())))
    trials = _Search(request, axes, out, runs, judge, sampler)
    plan = None
    if request.how:
        is_in_turn = sampler != "random" or request.prune
        if not is_in_turn:
            points = [point for point in trials.drawn(count) if not point.finished]
        plan = plan_together(request.how, points, is_in_turn) if points else None
    if request.dry_run:
        drawn = ", ".join(f"{key} of {_shown(axis)}" for key, axis in axes.items())
        print(
            f"{count} trials by {sampler}, judged by {judge.metric} ({judge.way}), in {out}:"
            f" {drawn}"
        )
        print(plan or "", end="\n" if plan else "")
        return 0
    if request.how and plan:
        return start_together(request.how, plan, points)
    return trials.run(count)


class _Search:
    """A search that goes on: the trials so far, and the study of Optuna that has seen them."""

    def __init__(
        self,
        request: SweepRequest,
        axes: Axes,
        out: Path,
        runs: Runs,
        judge: Judge,
        sampler: str,
    ) -> None:
        """Make an empty study; ``sampler`` is ``tpe`` or ``random``."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._request = request
        self._axes = axes
        self._out = out
        self._runs = runs
        self._judge = judge
        samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
        self._sampler = samplers[sampler]
        pruner = optuna.pruners.MedianPruner() if request.prune else optuna.pruners.NopPruner()
        self._study = optuna.create_study(
            direction="minimize" if judge.way == "min" else "maximize", pruner=pruner
        )
        self._points: dict[str, Point] = {}
        self._codes: dict[str, int] = {}

    def run(self, count: int) -> int:
        """Run the trials; return the exit code of the sweep."""
        for number in range(count):
            self._try(number, f"trial {number + 1} of {count}")
        finished = [point for point in self._points.values() if point.finished]
        return show(self._out, finished, self._codes, list(self._remarks()))

    def drawn(self, count: int) -> list[Point]:
        """Return the runs of ``count`` trials, none of which depends on the results of others."""
        study = optuna.create_study()
        settings_by_name = {}
        for number in range(count):
            _, settings = self._draw(study, number)
            settings_by_name[name_of(settings)] = settings
        return points_of(self._request, settings_by_name, self._out)

    def _draw(self, study: optuna.Study, number: int) -> tuple[optuna.Trial, dict[str, Any]]:
        """Draw the settings of a trial, given those that the study has seen."""
        # A seed by the trial's number, so that a resumed sweep draws the same.
        sequence = np.random.SeedSequence([self._judge.seed, number])
        seed = int(sequence.generate_state(1)[0])
        study.sampler = self._sampler(seed=seed)
        trial = study.ask()
        settings = {key: _draw(trial, key, axis) for key, axis in self._axes.items()}
        return trial, settings

    def _try(self, number: int, which: str) -> None:
        """Draw one trial, train it unless its run is there, and give its result to the study."""
        trial, settings = self._draw(self._study, number)
        name = name_of(settings)
        (point,) = points_of(self._request, {name: settings}, self._out)
        trial.set_user_attr("run", name)
        self._points[name] = point
        behind = Behind(trial, point.folder / "metrics.jsonl", self._judge.metric)
        if behind.is_to_end() and not point.finished:
            print(f"{which}: {name}: ended early already", file=sys.stderr, flush=True)
        else:
            self._codes[name] = self._runs.train(point, which, behind.is_to_end)
        value = _value(point, self._judge.metric)
        if behind.is_to_end():
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif value is None or not math.isfinite(value):
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)
        self._write()

    def _write(self) -> None:
        """Write the record of all trials so far."""
        trials = []
        for trial in self._study.trials:
            trials.append(
                {
                    "number": trial.number,
                    "run": trial.user_attrs["run"],
                    "state": trial.state.name.lower(),
                    "value": trial.value,
                }
            )
        record = {
            "metric": self._judge.metric,
            "better": self._judge.way,
            "trials": trials,
            "importance": self._importance(),
        }
        self._out.mkdir(parents=True, exist_ok=True)  # a run that fails at once has made no folder
        (self._out / RECORD).write_text(strict_json(record, indent=1), encoding="utf-8")

    def _complete_trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return the trials that ended with a value."""
        return [trial for trial in self._study.trials if trial.state.name == "COMPLETE"]

    def _remarks(self) -> Iterator[str]:
        """Yield the lines below the table, the best trial in the last one."""
        yield from said_of(self._out)
        if self._complete_trials():
            best = self._study.best_trial
            run = best.user_attrs["run"]
            again = f"distcore train {shlex.quote(str(self._out / run / 'config.yaml'))} --out NEW"
            yield f"best: {run}, {self._judge.metric} {best.value:.4g}; the same again: {again}"

    def _importance(self) -> dict[str, float]:
        """Return each key's share in the differences of the metric; empty for few trials."""
        keys = len(self._axes)
        if keys < 2 or len(self._complete_trials()) < 2 * keys:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the evaluator is young
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            return optuna.importance.get_param_importances(self._study, evaluator=evaluator)


class Behind:
    """Whether a trial is behind those before it, by the evaluations in its metrics.jsonl.

    Once True, it stays so.
    """

    def __init__(self, trial: optuna.trial.Trial, file: Path, metric: str) -> None:
        """Take the trial, its metrics.jsonl, and the metric's name in an evaluation."""
        self._trial = trial
        self._file = file
        self._key = f"eval/{metric}"
        self._step = 0
        self._is_behind = False

    def is_to_end(self) -> bool:
        """Read the new lines, and return True if the run is to end."""
        if not self._file.exists():
            return self._is_behind
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                entry: dict[str, Any] = json.loads(line)
            except ValueError:  # half a line, which the run is writing
                break
            value = entry.get(self._key)
            step = entry["step"]
            if self._is_behind or step <= self._step or value is None:
                continue
            # The first says little: the learning rate may still rise.
            is_first = not self._step
            self._step = step
            self._trial.report(value, step)
            self._is_behind = not is_first and self._trial.should_prune()
        return self._is_behind


def _judge_of(request: SweepRequest, settings: dict[str, Any]) -> Judge:
    """Return how trials are judged; raises ConfigError without a metric."""
    resolved = resolve(load_config(request.config, dict(request.changes) | settings))
    config = resolved.config
    best = config.checkpoints.best
    directions = check(resolved).metrics_of_sets(resolved.task.declared_metrics)
    metrics = []
    for name in directions:
        _, _, without_set = name.partition("/")
        if best in (name, without_set):
            metrics.append(name)
    if not metrics:
        raise ConfigError("--trials: needs a metric to judge by; name one by checkpoints.best")
    is_evaluated_before_end = config.eval_at_epoch_end or config.eval_every
    if request.prune and not is_evaluated_before_end:
        raise ConfigError("--prune: nothing is evaluated before the end; set --eval-every")
    # Without a set in its name it is a metric of the first set.
    metric = metrics[0]
    return Judge(metric, directions[metric], config.seed)


def _draw(trial: optuna.trial.Trial, key: str, axis: Range | list[Any]) -> Any:
    """Return the value of one key that Optuna draws for a trial."""
    if not isinstance(axis, Range):
        # Optuna draws texts: it warns of values that its storage cannot keep.
        values = {text_of(value): value for value in axis}
        return values[trial.suggest_categorical(key, list(values))]
    if axis.is_whole:
        low, high = int(axis.low), int(axis.high)
        return trial.suggest_int(key, low, high, log=axis.log)
    value = trial.suggest_float(key, axis.low, axis.high, log=axis.log)
    # Rounded, since the value is part of the run's name.
    return float(f"{value:.{DIGITS}g}")


def _shown(axis: Range | list[Any]) -> str:
    """Return the values of a key as ``--sweep`` takes them."""
    return str(axis) if isinstance(axis, Range) else "|".join(map(text_of, axis))


def _value(point: Point, metric: str) -> float | None:
    """Return the metric of a finished run at its best evaluation; ``None`` if it has none."""
    if not point.finished:
        return None
    best = json.loads((point.folder / "report.json").read_text(encoding="utf-8"))["best"]
    return float(best["value"]) if best and best["metric"] == metric else None
