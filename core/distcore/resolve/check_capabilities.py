"""Check a config against the capabilities of its strategy. Each refusal names the strategies
that could run it.
"""

from __future__ import annotations

import contextlib
import logging
from operator import attrgetter

from distcore import registry
from distcore.config import RunConfig
from distcore.deprecation import deprecated
from distcore.errors import ConfigError, DistcoreError
from distcore.hints import nearest
from distcore.model.optim import is_plugin, load_optimizer, optimizer_class
from distcore.model.optimizers.own import check as check_own
from distcore.plugin.strategy.capabilities import SPEC_VERSION, Capabilities
from distcore.plugin.task.bound import BoundTask
from distcore.resolve.strategies import names_that

log = logging.getLogger("distcore")


def check_declared(config: RunConfig, declared: Capabilities, launcher: str) -> None:
    """Raise ConfigError if the config needs an undeclared capability; name the
    strategies that declare it.
    """
    version = declared.spec_version
    if version < SPEC_VERSION:
        what = f"strategy {config.strategy!r}: hook-spec version {version}"
        deprecated(what, "0.2", f"version {SPEC_VERSION} (docs/compatibility.md)")
    evaluated = config.precision if config.eval_precision == "same" else config.eval_precision
    if evaluated != config.precision and "precision" in declared.owns:
        own = f"strategy {config.strategy!r} computes evaluations as training does"
        raise ConfigError(f"eval_precision = {evaluated!r}: {own}; leave it out, or set precision")
    if config.schedule.interval == "epoch" and "schedule" in declared.owns:
        raise ConfigError(
            f"schedule.interval = 'epoch': strategy {config.strategy!r} has its own schedule;"
            " drop it"
        )
    wanted_values = {
        "device": config.device,
        "precision": config.precision,
        "eval_precision": evaluated,
        "launcher": launcher,
    }
    for key, wanted in wanted_values.items():
        capability = f"{key.removeprefix('eval_')}s"

        def takes(other: Capabilities, capability: str = capability, wanted: str = wanted) -> bool:
            possible: frozenset[str] = getattr(other, capability)
            return not possible or wanted in possible

        if not takes(declared):
            possible = sorted(getattr(declared, capability))
            raise ConfigError(
                f"{key} = {wanted!r}: strategy {config.strategy!r} supports {', '.join(possible)}"
                f"{nearest(wanted, possible)}; {names_that(takes)} could"
            )
    if config.deterministic and not declared.deterministic:
        others = names_that(lambda other: other.deterministic)
        raise ConfigError(
            f"deterministic: strategy {config.strategy!r} with these options does not repeat a run"
            f" bit for bit; {others} could, with their default options"
        )


def check_task(
    config: RunConfig, declared: Capabilities, task: BoundTask, training: bool = True
) -> None:
    """Raise ConfigError if the task calls models, or steps parameters, in a way that the
    strategy does not declare.
    """
    has = "frozen models" if task.has("frozen") else "a loss over the global batch"
    calls = task.has("frozen") or task.losses.whole_batch
    own = training and task.has("train_step")
    why = declared.why_not_phases or "a step may change parameters of another phase"
    for name, is_needed, does, lacks in (
        ("calls_any_time", calls, f"has {has}", "calls the model in a pipeline only"),
        ("own_steps", own, "makes its own steps", "has no gradients between backward and step"),
        ("phases", training and task.has("phases"), "trains in phases", f"cannot: {why}"),
    ):
        if is_needed and not getattr(declared, name):
            strategy = f"strategy {config.strategy!r} with these options"
            could = f"{names_that(attrgetter(name))} could, with their default options"
            raise ConfigError(f"task = {config.task!r}: {does}, and {strategy} {lacks}; {could}")
    if own and config.precision == "fp16":
        raise ConfigError(
            f"task = {config.task!r}: makes its own steps, whose gradients fp16 scales; use bf16 or"
            " fp32"
        )


def check_average(config: RunConfig, declared: Capabilities) -> None:
    """Raise ConfigError if the config asks for an average of the weights, and
    the strategy declares none.
    """
    if config.ema.decay is not None and not declared.ema:
        lacks = f"strategy {config.strategy!r} keeps no average of weights"
        raise ConfigError(
            f"ema.decay = {config.ema.decay}: {lacks}; {names_that(lambda o: o.ema)} could"
        )


def check_optimizer(config: RunConfig, declared: Capabilities) -> None:
    """Raise DistcoreError for an optimizer that is unknown or unsupported by the strategy, or
    for a wrong option.
    """
    name = config.optimizer.name
    installed = is_plugin(name)
    elementwise = installed and optimizer_class(name).elementwise

    def takes(other: Capabilities) -> bool:
        return name in other.optimizers or (installed and other.takes_optimizer(name, elementwise))

    if not takes(declared):
        possible = optimizers_of(declared)
        why = ""
        if installed and declared.other_optimizers == "elementwise":
            why = _why_not_on_parts(name)
        raise ConfigError(
            f"optimizer.name = {name!r}: strategy {config.strategy!r} takes {', '.join(possible)}"
            f"{nearest(name, possible)}{why}; {names_that(takes)} could take it"
        )
    optimizer = load_optimizer(config)
    if not type(optimizer).__module__.startswith("distcore."):
        check_own(name, optimizer, int(config.nproc))


def _why_not_on_parts(name: str) -> str:
    """Return why a strategy that steps parts of parameters refuses an installed optimizer."""
    rule = ": it steps parts of parameters, and"
    if hasattr(registry.load("optimizers", name), "elementwise"):
        return f"{rule} {name!r} declares elementwise = False"
    return (
        f"{rule} {name!r} does not say that it is elementwise; if its step of an element depends"
        " on that element, its gradients and the number of steps alone, give it the attribute"
        " elementwise = True"
    )


def log_compilation(config: RunConfig, mode: str) -> None:
    """Log the mode of compilation if it differs from the config."""
    if mode != config.compile:
        reason = f"strategy {config.strategy!r} compiles each block by itself"
        log.info("compile = %r: %s: compile = %r", config.compile, reason, mode)


def optimizers_of(declared: Capabilities) -> list[str]:
    """Return the names of the installed optimizers that a strategy accepts;
    imports all installed ones.
    """
    names = set(declared.optimizers)
    for name in registry.offers("optimizers"):
        # One that does not import is no help, and must not hide the error that is being written.
        with contextlib.suppress(DistcoreError):
            if declared.takes_optimizer(name, optimizer_class(name).elementwise):
                names.add(name)
    return sorted(names)
