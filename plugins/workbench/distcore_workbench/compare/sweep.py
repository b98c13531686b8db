"""``distcore train --sweep``: one job with several settings, a run for each, and at the end
the table of all.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from distcore import ConfigError
from distcore.cli import set_up_logging
from distcore_workbench.compare.comparison_rows import refuse_ranks
from distcore_workbench.compare.sweep_launch import plan_together, start_together
from distcore_workbench.compare.sweep_points import SweepRequest, points_of, show
from distcore_workbench.compare.sweep_runs import Runs
from distcore_workbench.compare.sweep_space import axes_of, combinations
from distcore_workbench.pages.document import command_line


def run(request: SweepRequest) -> int:
    """Train with each setting that is not there yet, show all, and return the exit code: 0, or 3
    if a run failed.

    Raises DistcoreError before the first run starts, and StoppedError.
    """
    if not request.sweeps:
        raise ConfigError(
            "--trials, --sampler and --prune: are of a sweep; give --sweep KEY=LOW..HIGH, too"
        )
    refuse_ranks("--sweep")
    base = request.load()
    out = Path(base.out or f"runs/sweep-{datetime.now():%Y%m%d-%H%M%S}")
    set_up_logging(base, rank=0)
    if (out / "config.yaml").exists():
        raise ConfigError(f"--out {out}: holds a run; a sweep needs a folder of its own")
    axes = axes_of(request.sweeps, request.changes)
    runs = Runs(
        command_line() + ("" if base.out else f" --out {out}"),
        request.how.flags if request.how else (),
    )
    if request.trials is not None:
        from distcore_workbench.compare.trials import search  # imports optuna

        return search(request, axes, out, runs)
    if request.sampler or request.prune:
        raise ConfigError(
            f"{'--sampler' if request.sampler else '--prune'}: is of trials; say how many with"
            " --trials N"
        )
    points = points_of(request, combinations(axes), out)
    to_train = [point for point in points if not point.finished]
    plan = plan_together(request.how, to_train) if request.how and to_train else None
    if request.dry_run:
        for point in points:
            print(
                f"{point.name}: {'finished' if point.finished else 'to train'}, in {point.folder}"
            )
        print(plan or "", end="\n" if plan else "")
        return 0
    if request.how and plan:
        return start_together(request.how, plan, to_train)
    codes = {}
    for number, point in enumerate(points, 1):
        codes[point.name] = runs.train(point, f"run {number} of {len(points)}")
    return show(out, points, codes)
