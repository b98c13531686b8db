"""A run from start to report: join the ranks, prepare data, build the model, train, evaluate, save."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from distcore import checkpoint, garbage, registry
from distcore.checkpoint.foreign import adopt
from distcore.checkpoint.job_state import fingerprint, saved_unlogged, steps_key
from distcore.checkpoint.row_content import RowContent
from distcore.checkpoint.saver import Saver
from distcore.checkpoint.surroundings import SOURCES, save_task_files, source_digests, warn_of_changed_sources
from distcore.config import RunConfig, dump_config
from distcore.distributed.agreement import check_world
from distcore.distributed.arithmetic import arithmetic_of, attention_of
from distcore.engine import row_form
from distcore.engine.best import Best, fingerprint_of_judged, resumed_best
from distcore.engine.causality import check_causal
from distcore.engine.evaluation import sanity_check
from distcore.engine.finish import finish
from distcore.engine.fit import fit
from distcore.engine.frozen import with_frozen
from distcore.engine.inner_gradients import refuse_inner_gradients
from distcore.engine.meter import Meter
from distcore.engine.mixed_devices import explain_mixed_devices
from distcore.engine.module_checks import check_module, refuse_grown, trained_names
from distcore.engine.overview import model_size, overview
from distcore.engine.precision import scaler_for
from distcore.engine.proof import Proof
from distcore.engine.shared_folder import check_shared
from distcore.errors import StoppedError, StrategyError, refuse_endings
from distcore.files import absolute, hold
from distcore.model import averages
from distcore.model.gradient_hooks import hooked_parameters, refuse_lost_hooks
from distcore.model.model_source import model_source, set_up_module
from distcore.model.optim import optimizer_factory, scheduler_for
from distcore.plugin.options import build
from distcore.plugin.report import Report
from distcore.plugin.strategy.contract import Progress, RankInfo, Run, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.strategy.tally import Tally
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Datasets, Task
from distcore.rank_environment.environment import export
from distcore.rank_environment.network import prepare_network, spans_machines
from distcore.resolve.complete import agree, complete, total_steps_of
from distcore.resolve.micro_batches import cut, description, most_micro_batches
from distcore.resolve.resolve import Resolved
from distcore.resolve.run_folder import check_out, on_main, set_aside

log = logging.getLogger("distcore")


def train(resolved: Resolved, rank_info: RankInfo) -> Report:
    """Train, evaluate and test as one rank; return the report.

    Every rank calls and gets the same report, which rank 0 writes to report.json. Raises DistcoreError, one line, for
    every error that the user can correct.
    """
    check_out(resolved.config)
    if rank_info.rank == 0:
        set_aside(resolved.config)
    hooks, world = set_up(resolved, rank_info)
    stopped = None
    try:
        with arithmetic_of(resolved.config), refuse_endings(), refuse_inner_gradients(hooks):
            report = train_in(world, resolved, hooks, rank_info)
    except StoppedError as error:
        stopped = str(error), error.exit_code
    # Only the text of a StoppedError is kept: its traceback would keep the run alive past teardown. A wrapped model
    # that is freed later destroys the process group while it holds Python's global lock, and could deadlock.
    hooks.teardown(world)
    if stopped:
        raise StoppedError(*stopped)
    return report


def train_in(world: World, resolved: Resolved, hooks: Hooks, rank_info: RankInfo) -> Report:
    """Train in ranks that have joined; return the report. No reference to the run is left behind."""
    task = resolved.task
    proof = Proof(resolved.config, task, hooks, world)
    run, data, saver, progress, best = begin(world, resolved, hooks, rank_info, proof)
    with closing(saver), explain_mixed_devices(run, hooks), attention_of(world.device, data.train.lengths):
        hooks.on_run_start(run, progress, task, data)
        if world.is_main:
            log.debug("%s", description(run.config, data))
        trained = trained_names(run.module)
        sanity_check(run, hooks, task, data)
        refuse_grown(run.module, trained)
        proof.start(run, hooks, data, progress)
        meter = Meter(progress, run.tally.unlogged)
        progress, best, last = fit(run, hooks, task, data, saver, progress, best, meter, proof)
        run = replace(run, facts={**run.facts, "proof": proof.facts})
        return finish(run, hooks, task, data, progress, best, last, meter)


def begin(
    world: World, resolved: Resolved, hooks: Hooks, rank_info: RankInfo, proof: Proof | None = None
) -> tuple[Run, Datasets, Saver, Progress, Best | None]:
    """Prepare the data, build the model, agree with the other ranks, and start the run folder or resume from it.

    ``proof`` copies the model before the strategy touches it.
    """
    task = resolved.task
    data = task.prepare(resolved.config)
    for warning in data.warnings if world.is_main else ():
        log.warning("%s", warning)
    completed = complete(resolved, data)
    run = build_run(completed.config, hooks, world, task, data, proof=proof)
    check_world(run, hooks, rank_info)
    rows, content = fingerprint(data.train), RowContent(data.train)
    judged = fingerprint_of_judged(completed.config, task, data)
    run = agree(run, hooks, completed, rows, content)
    check_causal(run, hooks, task, data.train)
    if spans_machines(rank_info):
        check_shared(run, hooks)
    run, data = row_form.settle(run, hooks, completed, data)
    for line in overview(run, data) if world.is_main else ():
        log.info("%s", line)
    progress, best = resume_or_start(run, hooks, task, data, rows, content, judged)
    if world.is_main:
        content.continue_in_background()
    digests, held = start_folder(run, hooks, task, data, progress)
    sources = source_digests(completed.config)
    facts = {"data": rows, "evaluation_data": judged, "task_files": digests, SOURCES: sources}
    return run, data, Saver(run, hooks, facts, content=content, held=held), progress, best


def set_up(resolved: Resolved, rank_info: RankInfo, listens: bool = True) -> tuple[Hooks, World]:
    """Register the strategy and, if the run ``listens`` to them, the extensions; and join the other ranks.

    A loop of the user's own listens only to those that say ``in_any_loop``: what a step computes follows from them.
    """
    config = resolved.config
    if rank_info.size > 1:
        prepare_network(rank_info)
        export(rank_info)  # backends read the same variables, whatever the launcher
    extensions = load_extensions(config)
    in_any_loop = {name: one for name, one in extensions.items() if getattr(one, "in_any_loop", False)}
    listeners = extensions | resolved.task.listener() if listens else in_any_loop
    hooks = Hooks(config.strategy, resolved.strategy, listeners)
    return hooks, hooks.setup(config, rank_info)


def load_extensions(config: RunConfig) -> dict[str, object]:
    """Import and build the extensions that are switched on, in the order of the config; return them by name.

    Raises StrategyError, one line, for an unknown name, a file that does not import, or a wrong option.
    """
    # A file may be named twice: by its absolute path in a run's config.yaml, and as the user names it now.
    given = {absolute(name): (name, switch) for name, switch in config.extensions.items()}
    return {
        name: build("extension", name, registry.load("extensions", name), {} if switch is True else switch)
        for name, switch in given.values()
        if switch is not False
    }


def build_run(
    config: RunConfig,
    hooks: Hooks,
    world: World,
    task: Task,
    data: Datasets,
    training: bool = True,
    proof: Proof | None = None,
) -> Run:
    """Build the model with the run's seed, have the strategy wrap it, and create optimizer and schedule.

    With ``training=False`` the run only evaluates and has neither of them. ``proof`` copies the built model. Raises
    ConfigError if the model lacks gradient checkpointing, StrategyError if the strategy returns no optimizer.
    """
    with garbage.spare_modules():
        built = hooks.build_model(config, world, model_source(config, task, data))
    module = built.model
    if training:
        check_module(config, hooks.capabilities, module)
    if proof is not None:
        proof.keep(config, data, module)
    base, compiled = set_up_module(config, task, module, training)
    total_steps, bound = total_steps_of(config, len(data.train)), BoundTask.of(task)
    run = Run(
        config=config,
        world=world,
        capabilities=hooks.capabilities,
        module=module,
        model=module,
        compiled=compiled,
        total_steps=total_steps,
        steps_per_epoch=-(-len(data.train) // config.global_batch_size),
        rows=len(data.train),
        accumulation=most_micro_batches(config, world.shards),
        scaler=scaler_for(config, hooks.capabilities, world),
        strategy_state=built.state,
        base=base,
        tally=Tally((*bound.logs, *bound.phases, *hooks.logs)),
        facts={"model": model_size(module), "micro_batches": cut(config)},
    )
    hooked = hooked_parameters(module) if training else set()
    wrapped = hooks.wrap_model(run, module, optimizer_factory(config, bound.phases) if training else None)
    refuse_lost_hooks(config.strategy, module, hooked)
    if bound.has("frozen"):
        run = with_frozen(replace(run, model=wrapped.model), hooks, bound, data)
    if not training:
        return replace(run, model=wrapped.model, strategy_state=wrapped.state)
    if wrapped.optimizer is None:
        raise StrategyError(f"strategy {hooks.name!r}, hook wrap_model(): returned no optimizer for a run that trains")
    owns_schedule = "schedule" in hooks.capabilities.owns
    run = replace(
        run,
        model=wrapped.model,
        optimizer=wrapped.optimizer,
        scheduler=None if owns_schedule else scheduler_for(config, wrapped.optimizer, total_steps, run.steps_per_epoch),
        loss_scale=wrapped.loss_scale or run.scaler,
        strategy_state=wrapped.state,
    )
    return run if config.ema.decay is None else replace(run, ema=averages.begin(run, hooks))


def build_to_evaluate(
    config: RunConfig, hooks: Hooks, world: World, task: Task, data: Datasets
) -> tuple[Run, Datasets]:
    """Return a run that only evaluates, with rows padded or not as in its training, and matching datasets."""
    return row_form.restore(build_run(config, hooks, world, task, data, training=False), task, data)


def resume_or_start(
    run: Run, hooks: Hooks, task: BoundTask, data: Datasets, rows: str, content: RowContent, judged: str | None
) -> tuple[Progress, Best | None]:
    """Load the checkpoint of ``--resume``, if any; return the progress and the best evaluation so far.

    ``rows`` is the fingerprint of the training rows, ``content`` the digest of all of them, ``judged`` the fingerprint
    of the evaluation rows that judge the run.
    """
    progress, best = Progress(), None
    asked = adopt(run, hooks, lambda: model_source(run.config, task, data).meta_model())
    if resumed := checkpoint.resume(run, hooks, asked, rows, task.on_resume, content):
        path, progress, job_state = resumed
        best = resumed_best(run.config, task, data, judged, job_state, path)
        run.tally.unlogged = saved_unlogged(job_state, path)
        hooks.load_states(job_state.get("states", {}))
        log.info("resumed from %s at step %d", path, progress.step)
        if run.world.is_main:
            warn_of_changed_sources(path, job_state, run.config)
        if progress.step >= run.total_steps and run.world.is_main:
            key = steps_key(run.config)
            flag, most = f"--{key.replace('_', '-')}", getattr(run.config, key)
            already = f"the run is already at step {progress.step}, and {flag} {most} is not beyond it"
            log.warning("%s: nothing is trained; to go on, raise %s and add --resume-changed %s", already, flag, key)
    return progress, best


def start_folder(
    run: Run, hooks: Hooks, task: BoundTask, data: Datasets, progress: Progress
) -> tuple[dict[str, str], list[TextIO | None]]:
    """Write the first files on the main rank; return the digests of the task's, and config.yaml, held by the run."""
    digests: dict[str, str] = {}
    held: list[TextIO | None] = []

    hooks.states()  # raises now, and not at the first save, for a state that is not JSON

    def write_start_files(out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        config = out / "config.yaml"
        if progress.step < run.total_steps or not config.exists():  # else nothing is trained: it says what was
            # "x" fails if another run took the same folder after it was checked.
            with config.open("w" if run.config.resume else "x", encoding="utf-8") as file:
                file.write(dump_config(run.config))
        held.append(hold(config))
        digests.update(save_task_files(out, lambda folder: task.save(folder, run.config, data)))
        task.reopen(out, run.config)  # fails now rather than when the trained model is exported

    on_main(run, hooks, write_start_files)
    return digests, held
