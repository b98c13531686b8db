"""Run a tune: from the request to the trials, and to config.yaml and tune.html, .md and .json."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from distcore import (
    ConfigError,
    Datasets,
    MetaModelError,
    RankError,
    RunConfig,
    dump_config,
    with_changes,
)
from distcore.cli import set_up_logging
from distcore.distributed import count_devices
from distcore.files import strict_json
from distcore.lab import (
    Resolved,
    check,
    flatten,
    model_source,
    resolve,
    strategies,
    with_absolute_paths,
)
from distcore.launchers.processes import (
    available_cores,
    handle_stop_signals,
    threads_chosen,
    threads_per_rank,
)
from distcore.model import freeze, missing_compiler
from distcore.resolve.padding_free import choose_padding_free, padding_free_alternatives
from distcore_workbench.compare.comparison_rows import refuse_ranks
from distcore_workbench.compare.foreign_load import foreign_load
from distcore_workbench.pages.document import command_line
from distcore_workbench.tuning import fallbacks, settings
from distcore_workbench.tuning.agreement import tolerance_of
from distcore_workbench.tuning.bench import Bench
from distcore_workbench.tuning.candidates import (
    TuneRequest,
    fallbacks_of,
    families_of,
    requested_strategies,
)
from distcore_workbench.tuning.limits import Plans
from distcore_workbench.tuning.racing import choose_final
from distcore_workbench.tuning.record import FILE, open_record
from distcore_workbench.tuning.search import Search, fit
from distcore_workbench.tuning.settings import (
    THREADS,
    Axis,
    Environment,
    Setting,
    name_of,
    with_setting,
)
from distcore_workbench.tuning.trial_runner import Runner
from distcore_workbench.tuning.tune_page import page
from distcore_workbench.tuning.tune_table import Facts, markdown, show, tune_facts

log = logging.getLogger("distcore")
MOST_RANKS = 8
"""Most ranks of a job on CPU cores that is given without ``--nproc``."""


def run(request: TuneRequest) -> int:
    """Tune, and return the exit code: 0, or 3 if no setting runs.

    Raises DistcoreError, and StoppedError.
    """
    refuse_ranks("tune")
    if not 0 < request.budget < float("inf"):
        raise ConfigError(f"--budget {request.budget:g}: expected minutes, more than 0")
    # Before anything of this tune computes.
    load = foreign_load()
    request, most_ranks = ranks_of(request)
    base = request.load()
    set_up_logging(base, rank=0)
    out = Path(request.out or f"runs/tune-{datetime.now():%Y%m%d-%H%M%S}")
    job = resolve(with_changes(base, {"out": str(out / "run"), "resume": None}))
    resolved = job.config
    data = check(job)
    named = list(requested_strategies(request))
    record = open_record(out, _job(resolved, request.fit_only))
    runner = Runner(out / "trials")
    meta_model = _meta_model(job, data)
    plans = Plans(job.task, data, meta_model) if meta_model is not None else None
    again = command_line()
    if not request.out:
        # Else a second tune would begin in a folder of its own.
        again += f" --out {shlex.quote(str(out))}"
    bench = Bench(
        file=request.config,
        changes=request.changes,
        budget=60 * request.budget,
        record=record,
        runner=runner,
        plans=plans,
        rows=resolved.global_batch_size,
        tolerance=tolerance_of(resolved, _is_masked(resolved, meta_model)),
        again=again,
    )
    about: Facts = {
        "command": command_line(),
        "fit_only": request.fit_only,
        "load": load,
        "complete": False,
        "untried": [],
        "untraced": plans.untraced if plans else ["the model cannot be built without its weights"],
    }
    chosen: Setting | None = None
    facts = tune_facts(record.trials, [], None, about)
    try:
        with handle_stop_signals(runner.stop, says_so=False):
            environment = _environment(job, data, most_ranks)
            families = list(families_of(request, named, base, resolved, meta_model, environment))
            smaller = fallbacks_of(request, meta_model, families)
            axes = settings.axes(base, resolved, environment, families)
            chosen, facts = _search(request, bench, axes, smaller, resolved, about)
    finally:
        # A stopped tune keeps its results so far.
        if not facts["complete"]:
            facts = tune_facts(record.trials, [], None, about)
        _write(out, facts)
    if chosen is not None:
        _write_config(request, chosen, out)
    _print_result(request, facts, chosen, out, bench.spent() < bench.budget)
    return 0 if chosen is not None else RankError.exit_code


def ranks_of(request: TuneRequest) -> tuple[TuneRequest, int | None]:
    """Return the request with the ranks of the job as given, and the most ranks to try.

    ``None``: the user does not say how many. ``--nproc`` bounds what is tried. The job as given is
    measured, too, and its strategy may run in one process only, as the default one does.
    """
    config = request.load()
    if config.nproc in ("auto", 1):
        return request, None
    capabilities = strategies.load_strategy(config).capabilities
    if capabilities.processes != "many":
        request = replace(request, changes={**request.changes, "nproc": 1})
    return request, int(config.nproc)


def _search(
    request: TuneRequest,
    bench: Bench,
    axes: Sequence[Axis],
    smaller: Sequence[Setting],
    resolved: RunConfig,
    about: Facts,
) -> tuple[Setting | None, Facts]:
    """Run the trials; return the chosen setting, ``None`` if nothing runs, and the facts."""
    done = about | {"complete": True}
    if request.fit_only:
        larger = partial(fallbacks.larger_micro_batches, resolved)
        fitting = fit(smaller, larger, bench.measure, bench.budget)
        chosen = fitting[0] if fitting else None
        return chosen, tune_facts(bench.record.trials, [], chosen, done)
    search = Search(bench.measure, bench.budget)
    finals = search.run(axes, smaller)
    chosen = None
    if finals:
        best, _ = choose_final(finals)
        chosen = best.setting
    done["untried"] = list(search.untried)
    return chosen, tune_facts(bench.record.trials, finals, chosen, done)


def _job(resolved: RunConfig, fit_only: bool) -> dict[str, Any]:
    """Return the values that must stay equal when a tune continues, by dotted key."""
    job = flatten(resolved.model_dump(mode="json", exclude={"out", "resume"}))
    return {**job, "fit_only": fit_only}


def _meta_model(job: Resolved, data: Datasets) -> nn.Module | None:
    """Return the job's model on the meta device; ``None`` if it needs the values of weights."""
    try:
        meta_model = model_source(job.config, job.task, data).meta_model()
    except MetaModelError:
        return None
    freeze(job.config, meta_model)
    return meta_model


def _is_masked(resolved: RunConfig, meta_model: nn.Module | None) -> bool:
    """Return True if the model may have dropout that no option of the task switches off."""
    if "dropout" in resolved.task_options:
        return False
    if meta_model is None:
        return True
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in meta_model.modules())


def _environment(job: Resolved, data: Datasets, most_ranks: int | None) -> Environment:
    """Return the facts about this machine and the job on which the values to try depend."""
    resolved = job.config
    cores = available_cores()
    on_cpu = resolved.device == "cpu"
    ranks_here = min(cores, MOST_RANKS) if on_cpu else count_devices(resolved.device)
    most = most_ranks or ranks_here
    # Ranks share the rows of a step equally.
    while resolved.global_batch_size % most:
        most -= 1
    threads = threads_per_rank(1) if on_cpu and not threads_chosen() else None
    chosen, _ = choose_padding_free(resolved, job.capabilities, job.task, data)
    return Environment(
        cores=cores,
        ranks=most,
        threads=threads,
        compiles=not missing_compiler(resolved.device),
        forms=padding_free_alternatives(chosen),
    )


def _write(out: Path, facts: Facts) -> None:
    """Write tune.html, tune.json and tune.md; raises ConfigError if that fails."""
    try:
        (out / "tune.json").write_text(strict_json(facts, indent=1), encoding="utf-8")
        (out / "tune.md").write_text(markdown(facts), encoding="utf-8")
        (out / "tune.html").write_text(page(facts), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None


def _write_config(request: TuneRequest, chosen: Setting, out: Path) -> None:
    """Write the config of the chosen setting, which trains from any folder."""
    config = with_absolute_paths(resolve(with_setting(request.config, request.changes, chosen)))
    head = f"# {name_of(chosen)}, found by: {command_line()}\n# train with: {_train(chosen, out)}\n"
    (out / "config.yaml").write_text(head + dump_config(config), encoding="utf-8")


def _train(chosen: Setting, out: Path) -> str:
    """Return the command that trains with the chosen setting."""
    threads = f"OMP_NUM_THREADS={chosen[THREADS]} " if chosen.get(THREADS) else ""
    return f"{threads}distcore train {shlex.quote(str(out / 'config.yaml'))}"


def _print_result(
    request: TuneRequest, facts: Facts, chosen: Setting | None, out: Path, all_tried: bool
) -> None:
    """Print the table and the command that trains, or what to do if nothing runs."""
    if request.json:
        print(strict_json(facts, indent=1), flush=True)
        return
    show(facts)
    print(f"tuned: {out}/tune.html, tune.md, tune.json, {FILE}")
    if chosen is None and not all_tried:
        print(
            f"nothing fitted within --budget {request.budget:g}: the same command with a longer one"
            " goes on"
        )
    elif chosen is None:
        print(
            "no setting runs; try a smaller model, shorter rows, --precision bf16, --lora or more"
            " ranks"
        )
        print("less memory, other losses: --optimizer adamw8bit; with --lora, --set lora.base=nf4")
    else:
        print(f"train with: {_train(chosen, out)}", flush=True)
