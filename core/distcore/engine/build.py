"""A model as its strategy has it, with optimizer and schedule: the one place that makes a Run."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from distcore.config import RunConfig
from distcore.engine.frozen import with_frozen
from distcore.engine.module_checks import check_module
from distcore.engine.overview import model_size
from distcore.engine.precision import scaler_for
from distcore.engine.proof import Proof
from distcore.errors import StrategyError
from distcore.model import averages
from distcore.model.hooks_on_gradients import hooked_parameters, refuse_lost_hooks
from distcore.model.model_source import model_source, set_up_module
from distcore.model.optim import optimizer_factory, scheduler_for
from distcore.plugin.strategy.contract import Run, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.strategy.tally import Tally
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Datasets, Task
from distcore.resolve.complete import total_steps_of
from distcore.resolve.micro_batches import cut, most_micro_batches
from distcore.rounding import ceil_div


def build_run(
    config: RunConfig,
    hooks: Hooks,
    world: World,
    task: Task,
    data: Datasets,
    training: bool = True,
    proof: Proof | None = None,
) -> Run:
    """Build the model with the run's seed, have it wrapped, and create optimizer and schedule.

    With ``training=False`` the run only evaluates and has neither of them. ``proof`` copies the
    built model. Raises ConfigError if the model lacks gradient checkpointing, StrategyError if the
    strategy returns no optimizer.
    """
    built = hooks.build_model(config, world, model_source(config, task, data))
    module = built.model
    if training:
        check_module(config, hooks.capabilities, module)
    if proof is not None:
        proof.keep(config, data, module)
    base, compiled = set_up_module(config, task, module, training)
    run = new_run(config, hooks, world, task, module, rows=len(data.train))
    run = replace(run, base=base, compiled=compiled, strategy_state=built.state)
    bound = BoundTask.wrap(task)
    hooked = hooked_parameters(module) if training else set()
    factory = optimizer_factory(config, bound.losses.phases) if training else None
    wrapped = hooks.wrap_model(run, module, factory)
    refuse_lost_hooks(config.strategy, module, hooked)
    if bound.has("frozen"):
        run = with_frozen(replace(run, model=wrapped.model), hooks, bound, data)
    if not training:
        return replace(run, model=wrapped.model, strategy_state=wrapped.state)
    if wrapped.optimizer is None:
        raise StrategyError(
            f"strategy {hooks.name!r}, hook wrap_model(): returned no optimizer for a run that"
            " trains"
        )
    scheduler = None
    if "schedule" not in hooks.capabilities.owns:
        scheduler = scheduler_for(config, wrapped.optimizer, run.total_steps, run.steps_per_epoch)
    run = replace(
        run,
        model=wrapped.model,
        optimizer=wrapped.optimizer,
        scheduler=scheduler,
        loss_scale=wrapped.loss_scale or run.scaler,
        strategy_state=wrapped.state,
    )
    if config.ema.decay is None:
        return run
    return replace(run, ema=averages.begin(run, hooks))


def new_run(
    config: RunConfig, hooks: Hooks, world: World, task: Task, module: nn.Module, rows: int = 0
) -> Run:
    """Return a run of ``module``, which no strategy has wrapped yet: nothing else makes a ``Run``.

    ``rows`` is the number of training rows; 0 if the run is not trained.
    """
    bound = BoundTask.wrap(task)
    return Run(
        config=config,
        world=world,
        capabilities=hooks.capabilities,
        module=module,
        model=module,
        total_steps=total_steps_of(config, rows),
        steps_per_epoch=ceil_div(rows, config.global_batch_size),
        rows=rows,
        accumulation=most_micro_batches(config, world.shards),
        scaler=scaler_for(config, hooks.capabilities, world),
        tally=Tally((*bound.logs, *bound.losses.phases, *hooks.logs)),
        facts={"model": model_size(module), "micro_batches": cut(config)},
    )
