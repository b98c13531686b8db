"""A run from start to report: join the ranks, prepare, build, train, evaluate and save."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from distcore import registry
from distcore.config import RunConfig
from distcore.distributed.arithmetic import arithmetic_of, attention_of
from distcore.engine.evaluation import sanity_check
from distcore.engine.finish import finish
from distcore.engine.first_steps import watch_first_steps
from distcore.engine.fit import fit
from distcore.engine.inner_gradients import refuse_inner_gradients
from distcore.engine.meter import Meter
from distcore.engine.mixed_devices import explain_mixed_devices
from distcore.engine.module_checks import refuse_grown, trained_names
from distcore.engine.proof import Proof
from distcore.engine.training import Training
from distcore.errors import StoppedError, refuse_endings
from distcore.files import absolute
from distcore.plugin.options import build
from distcore.plugin.report import Report
from distcore.plugin.strategy.contract import RankInfo, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.rank_environment.environment import export
from distcore.rank_environment.network import prepare_network
from distcore.resolve.micro_batches import description
from distcore.resolve.resolve import Resolved
from distcore.resolve.run_folder import check_out

log = logging.getLogger("distcore")


def train(resolved: Resolved, rank_info: RankInfo) -> Report:
    """Train, evaluate and test as one rank; return the report.

    Every rank calls and gets the same report, which rank 0 writes to report.json. Raises
    DistcoreError, one line, for every error that the user can correct.
    """
    check_out(resolved.config)
    hooks, world = set_up(resolved, rank_info)
    stopped_by: tuple[str, int] | None = None
    try:
        with arithmetic_of(resolved.config), refuse_endings(), refuse_inner_gradients(hooks):
            report = train_in(world, resolved, hooks, rank_info)
    except StoppedError as error:
        # The error itself is not kept: its traceback would keep the run alive past teardown. A
        # wrapped model that is freed later destroys the process group while it holds Python's
        # global lock, and could deadlock.
        stopped_by = (str(error), error.exit_code)
    hooks.teardown(world)
    if stopped_by:
        raise StoppedError(*stopped_by)
    return report


def train_in(world: World, resolved: Resolved, hooks: Hooks, rank_info: RankInfo) -> Report:
    """Train in ranks that have joined; return the report, and leave no reference to the run."""
    task = resolved.task
    proof = Proof(resolved.config, task, hooks, world)
    training = Training.begin(world, resolved, hooks, rank_info, proof)
    run, data = training.run, training.data
    with (
        closing(training.saver),
        watch_first_steps(training),
        explain_mixed_devices(run, hooks),
        attention_of(world.device, data.train.lengths),
    ):
        hooks.on_run_start(run, training.progress, task, data)
        if world.is_main:
            log.debug("%s", description(run.config, data))
        # The first forward pass may make parameters, which the optimizer would not step.
        trained_before = trained_names(run.module)
        sanity_check(run, hooks, task, data)
        refuse_grown(run.module, trained_before)
        proof.start(run, hooks, data, training.progress)
        meter = Meter(training.progress, run.tally.unlogged)
        meter.continue_exactly(run)
        last = fit(training, meter, proof)
        return finish(training, last, meter, proof)


def set_up(
    resolved: Resolved, rank_info: RankInfo, own: Mapping[str, object] | None = None
) -> tuple[Hooks, World]:
    """Join the other ranks, with the strategy, the extensions and the task as a listener.

    A loop of the user's own has a listener of its ``own``. Of extensions it has those with
    ``in_any_loop``, which need no more than what such a loop tells: its start, log lines,
    evaluations, checkpoints and end.
    """
    config = resolved.config
    if rank_info.size > 1:
        prepare_network(rank_info)
    if rank_info.size > 1 or rank_info.master_addr:
        export(rank_info)  # backends read the same variables, whatever the launcher
    listeners = load_extensions(config)
    if own is None:
        listeners |= resolved.task.listener()
    else:
        in_any_loop = {
            name: extension
            for name, extension in listeners.items()
            if getattr(extension, "in_any_loop", False)
        }
        listeners = {**in_any_loop, **own}
    hooks = Hooks(config.strategy, resolved.strategy, listeners)
    return hooks, hooks.setup(config, rank_info)


def load_extensions(config: RunConfig) -> dict[str, object]:
    """Import and build the extensions that are switched on, by name, in the order of the config.

    Raises StrategyError, one line, for an unknown name, a file that does not import, or a wrong
    option.
    """
    # A file may be named twice: by its absolute path in a run's config.yaml, and as the user
    # names it now. The last name counts.
    switch_of_file: dict[str, tuple[str, Any]] = {}
    for name, switch in config.extensions.items():
        switch_of_file[absolute(name)] = (name, switch)
    extensions: dict[str, object] = {}
    for name, switch in switch_of_file.values():
        if switch is False:
            continue
        options = {} if switch is True else switch
        cls = registry.load("extensions", name)
        extensions[name] = build("extension", name, cls, options)
    return extensions
