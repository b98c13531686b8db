"""Runs of a sweep that a launcher starts: all together on a cluster, or one after the other."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distcore import ConfigError, RunConfig
from distcore.launchers import Launcher, LaunchPlan, LaunchSpec
from distcore_workbench.compare.sweep_runs import Point


@dataclass(frozen=True, kw_only=True, slots=True)
class Launching:
    """The launcher of a sweep, and the flags that chose it."""

    launcher: Launcher
    """Starts the ranks of a run."""
    spec: Callable[[RunConfig, Sequence[str]], LaunchSpec]
    """Makes its request of the config of a run and the arguments of its ``distcore train``."""
    flags: tuple[str, ...]
    """Those that start ranks."""


def plan_together(
    how: Launching, points: Sequence[Point], is_in_turn: bool = False
) -> LaunchPlan | None:
    """Return the plan that starts all runs, or ``None`` to start one after the other.

    ``is_in_turn``: each run depends on those before it. Raises ConfigError for what the launcher
    refuses, and if it cannot wait for a run where that is needed.
    """
    specs = {}
    for point in points:
        words = [str(point.config_file), "--out", str(point.folder), *point.flags, *how.flags]
        specs[point.name] = how.spec(point.config, words)
    plan_sweep: Callable[[Mapping[str, LaunchSpec]], LaunchPlan | None] | None
    plan_sweep = None if is_in_turn else getattr(how.launcher, "plan_sweep", None)
    plan = plan_sweep(specs) if plan_sweep else None
    first_spec = specs[points[0].name]
    if plan is None and not how.launcher.plan(first_spec).waits:
        way = "start each run by itself"
        if is_in_turn:  # by tpe, or with --prune
            way = (
                "trials that depend on others cannot start; give --sampler random, or start this"
                " inside an allocation"
            )
        raise ConfigError(
            f"--sweep: {shlex.join(how.flags)} does not wait for the end of a run; {way}"
        )
    return plan


def start_together(how: Launching, plan: LaunchPlan, points: Sequence[Point]) -> int:
    """Start all of the runs; return the exit status. The launcher may replace this process."""
    for point in points:
        point.write_config()
    print(
        f"sweep: starting {len(points)} runs; once they have ended, the same command prints their"
        " table",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    return how.launcher.run(plan)
