"""Trace an optimizer step on tensors without values: its memory, and when it is at its peak."""

from __future__ import annotations

import logging
from collections.abc import Generator

from torch import Tensor
from torch.utils._pytree import tree_flatten

from distcore import ConfigError, hookimpl
from distcore.engine.tracing import StepToTrace, TracedStep, fake_ranks, trace_step
from distcore.lab import Hooks, at_level
from distcore.launchers.processes import one_line, threads_per_rank
from distcore.plugin.strategy import HoldsExtraTensors
from distcore_workbench.planning.kernels import kernels_of
from distcore_workbench.planning.storages import Storages
from distcore_workbench.planning.timeline import KINDS, Phase, Step, timeline


class _Phases:
    """An extension that notes where the phases of a step begin.

    A mark is the number of changes of storages until then.
    """

    def __init__(self, storages: Storages) -> None:
        """Begin in the first phase of a trace, in which the strategy wraps the model."""
        self._storages = storages
        self.where = "wrap_model()"
        self.marks: list[tuple[int, Phase]] = []

    def begin(self, phase: Phase, where: str) -> None:
        """Note a phase, and the name of its code for an error message."""
        self.marks.append((len(self._storages.changes), phase))
        self.where = where

    @hookimpl(wrapper=True)
    def accumulate(self) -> Generator[None, object, object]:
        """Note a forward pass: the loop enters this context right before it."""
        self.begin("forward", "loss()")
        return (yield)

    @hookimpl(wrapper=True)
    def backward(self) -> Generator[None, object, object]:
        """Note a backward pass."""
        self.begin("backward", "backward")
        return (yield)


def trace(job: StepToTrace, stand_in: object) -> Step:
    """Return the memory of a step, the second or a later one.

    ``stand_in`` comes from ``traced()`` of the strategy. Raises ConfigError, one line, if the step
    cannot be traced.
    """
    threads = threads_per_rank(job.ranks) if job.config.device == "cpu" else None
    storages = Storages(copies=threads is not None, threads=threads)
    phases = _Phases(storages)
    hooks = Hooks(job.config.strategy, stand_in, {"phases": phases})
    extra = stand_in if isinstance(stand_in, HoldsExtraTensors) else None

    def measure(step: TracedStep) -> Step:
        return _measure(job, step, storages, phases, extra)

    try:
        # A trace is not a run: the strategy's lines about one are not printed.
        silence = at_level(logging.WARNING)
        with silence, fake_ranks(job.ranks), kernels_of(job.config.device):
            return trace_step(job, hooks, storages, measure)
    # Of any kind: the task's own code computes with tensors that have no values.
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}", limit=200)
        name = type(job.meta_model).__name__
        raise ConfigError(
            f"{name} cannot be traced: {phases.where} fails without values: {reason}"
        ) from error
    finally:
        if extra is not None:
            extra.close()


def _measure(
    job: StepToTrace,
    step: TracedStep,
    storages: Storages,
    phases: _Phases,
    extra: HoldsExtraTensors | None,
) -> Step:
    """Run the step; return the memory of the second one, in which the optimizer has its state.

    ``extra`` is the stand-in, if its library keeps tensors of its own.
    """
    run = step.run
    assert run.optimizer is not None  # the job trains
    storages.count(step.mask_pools)
    leaves, _ = tree_flatten(job.batch)
    storages.count(leaf for leaf in leaves if isinstance(leaf, Tensor))
    if extra is None:
        phases.where = "the optimizer's step"
        step.fill_optimizer()
    else:
        step.passes()
        phases.begin("step", "step")
        step.apply()

    state: list[Tensor] = []
    for state_of_parameter in run.optimizer.state.values():
        state += [value for value in state_of_parameter.values() if isinstance(value, Tensor)]
    # No list of parameters: it would keep those alive that a strategy replaces.
    parameters = storages.numbers(run.module.parameters())
    for model in step.frozen:
        parameters |= storages.numbers(model.parameters())
    kinds = {"parameters": parameters, "optimizer": storages.numbers(state)}

    phases.marks = []
    step.passes()
    phases.begin("step", "step")
    kinds["gradients"] = storages.numbers(
        parameter.grad for parameter in run.module.parameters() if parameter.grad is not None
    )
    if extra is not None:
        for kind, tensors in extra.extra_tensors(run).items():
            kinds[kind] |= storages.numbers(tensors)
    step.apply()
    # The last kind, activations, is all the rest.
    numbers_by_kind = [kinds[kind] for kind in KINDS[:-1]]
    return timeline(storages.changes, phases.marks, numbers_by_kind)
