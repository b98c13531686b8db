"""Law 5: a checkpoint depends neither on the strategy nor on the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcore import checkpoint
from distcore.distributed.local_state import Part, parts_of, values_of
from distcore.errors import ConfigError, DistcoreError
from distcore.plugin.strategy.state import Box, Piece
from distcore.testing.findings import EXACT, FP32, Measured, Skip
from distcore.testing.lab import Job, Lab
from distcore.testing.laws.gradient import distance, needs_calls
from distcore.testing.problem import Problem
from distcore.testing.reference import largest_difference, solve
from distcore.testing.store import await_true
from distcore.testing.strategy_suite import STRATEGIES
from distcore.testing.variants import COUNTS, Counts, FromFiles, Referenced, Taught, write_files

STEPS, HALF = 10, 5
"""Optimizer steps of a run, and those before its checkpoint."""
SGD: dict[str, Any] = {"optimizer": {"name": "sgd", "momentum": 0.9}}
LINEAR = {"name": "linear", "warmup_steps": 2}


@STRATEGIES.law("checkpoint")
def neutral_names(lab: Lab) -> Measured:
    """Whole parameters, moments and step counts are saved under the model's own names,
    equal to plain PyTorch's.
    """
    job = lab.job(_problem(lab))
    return distance(job.train(STEPS), solve(job.task, job.run.config, STEPS))


@STRATEGIES.law("checkpoint")
def frozen_not_saved(lab: Lab) -> Measured:
    """A checkpoint has the same tensors with a frozen model as without, and names the frozen
    one by a digest.
    """
    needs_calls(lab)
    with_one, without = lab.job(Referenced()), lab.job(Problem())
    path = with_one.save(with_one.train(1).progress)
    more = sorted(checkpoint.read_tensors(path).keys() ^ without.train(1).state.keys())
    missing = "reference" not in checkpoint.Checkpoint(path).job_state().get("frozen", {})
    return Measured(
        error=len(more) + missing, bound=EXACT, note=f"{len(more)} other tensors: {more[:2]}"
    )


@STRATEGIES.law("checkpoint")
def saved_by_one_rank(lab: Lab) -> Measured:
    """Until the optimizer steps again, each rank returns what it holds of the step
    before, without the others.
    """
    if not lab.hooks.capabilities.saves_alone:
        return Measured(error=0.0, bound=EXACT, note="saves_alone is not declared")
    job = lab.job(_problem(lab))
    trained, optimizer = job.train(HALF), job.run.optimizer
    held, whole = list[tuple[float, str]](), checkpoint.Tensors(trained.state)

    def keep(*_: object) -> None:
        state = lab.hooks.save_checkpoint(job.run)
        actual = {
            name: torch.cat([values.flatten() for values in values_of(part)])
            for name, part in state.items()
        }
        held.append(
            largest_difference(
                actual, {name: _same_part(whole, name, part) for name, part in state.items()}
            )
        )
        if all(isinstance(part, Tensor) for part in state.values()):
            held[-1] = max(
                held[-1],
                largest_difference(
                    actual, {name: value.flatten() for name, value in whole.items()}
                ),
            )

    for rank in range(lab.world.size):  # in turn: in a collective a rank would wait for the others
        done = lab.folder / f"kept-{rank}"
        if rank == lab.world.rank:
            keep()
            done.touch()
        await_true(done.exists, 5, f"rank {rank} needs other ranks to save its state")
    assert optimizer is not None
    optimizer.register_step_pre_hook(keep)
    next(job.steps(trained.progress))
    error, where = max(held)
    return Measured(
        error=error + abs(len(held) - 2), bound=EXACT, note=f"{len(held)} times, worst {where}"
    )


def _same_part(whole: checkpoint.Tensors, name: str, held: Part | Sequence[Box]) -> Tensor:
    def of(part: Part) -> Tensor:
        if isinstance(part, Tensor):
            return whole[name]
        if isinstance(part, Piece):
            return whole.piece(name, part.start, len(part.values))
        return whole.box(name, part.offset, part.values.shape)

    return torch.cat([of(part).flatten() for part in parts_of(held)])


@STRATEGIES.law("checkpoint")
def round_trip(lab: Lab) -> Measured:
    """Tensors that are loaded and saved again are the same bit for bit; from any dtype they
    get the model's own.
    """
    problem = Counts(tied=_problem(lab).tied)
    trained = lab.job(problem).train(3)
    buffers = {"scale": torch.tensor(2.0)} | COUNTS
    state = checkpoint.Tensors(
        dict(trained.state) | {f"model/{name}": value for name, value in buffers.items()}
    )
    rounded = {
        name: value.bfloat16() if name.startswith("model/") else value
        for name, value in state.items()
    }
    rounded |= {name: value for name, value in state.items() if not value.is_floating_point()}
    errors = []
    for given in (state, checkpoint.Tensors(rounded)):
        fresh = lab.job(problem)
        lab.hooks.load_checkpoint(fresh.run, given, trained.progress)
        again = checkpoint.read_tensors(fresh.save(trained.progress))
        errors.append(largest_difference(again, given))
        wrong = (
            name
            for name, value in state.items()
            if name in again and again[name].dtype != value.dtype
        )
        errors += [(float("inf"), f"{name} is {again[name].dtype}") for name in wrong]
    error, where = max(errors)
    return Measured(error=error, bound=EXACT, note=f"{len(state)} tensors, worst {where}")


@STRATEGIES.law("checkpoint")
def weights_of_files(lab: Lab) -> Measured:
    """A model of files has the weights of a whole load: a tied head, one of its own, and one
    beside a tied one.
    """
    cases = {"untied": (False, False)}
    if "tied-parameters" not in lab.hooks.capabilities.exempt:
        cases |= {"tied": (True, False), "tied, and another head": (True, True)}
    errors = []
    for name, (tied, has_own_head) in cases.items():
        problem = FromFiles(tied=tied, folder=_files(lab, Problem(tied=tied), has_own_head))
        job = lab.job(problem)
        measured = distance(job.train(1), solve(job.task, job.run.config, 1))
        errors.append((measured.error, f"{name}: {measured.note}"))
    error, where = max(errors)
    return Measured(error=error, bound=FP32, note=where)


@STRATEGIES.law("checkpoint")
def frozen_of_files(lab: Lab) -> Measured:
    """A frozen model of files answers as one that was loaded whole."""
    needs_calls(lab)
    job = lab.job(Taught(folder=_files(lab, Problem(), has_own_head=False)))
    return distance(job.train(1), solve(job.task, job.run.config, 1))


def _files(lab: Lab, problem: Problem, has_own_head: bool) -> Path:
    """Return a folder with the weights of another model of ``problem``, which rank 0 writes."""
    folder = lab.folder / f"files-{problem.tied}-{has_own_head}"
    if lab.world.is_main:
        write_files(folder, replace(problem, blocks=lab.blocks), has_own_head)
    lab.share(None)  # so that all ranks find it whole
    return folder


@STRATEGIES.law("checkpoint")
def scalar_parameters(lab: Lab) -> Measured:
    """A parameter without dimensions is trained, saved, loaded and trained on
    as in plain PyTorch.
    """
    try:
        first = lab.job(Problem(scalar=True))
    except DistcoreError as error:
        raise Skip(f"refused: {error}") from error
    return _continue(lab.job(Problem(scalar=True)), first.save(first.train(HALF).progress))


@STRATEGIES.law("checkpoint")
def loads_into_every_rank(lab: Lab) -> Measured:
    """After loading, the forward pass on every rank uses the loaded parameters and buffers."""
    problem = replace(_problem(lab), evaluation_rows=4 * lab.world.size)
    trained = lab.job(problem).train(3)
    state = checkpoint.Tensors(dict(trained.state) | {"model/scale": torch.tensor(2.0)})
    fresh, alone = lab.job(problem), lab.build_alone(problem)
    for job in (fresh, alone):
        job.hooks.load_checkpoint(job.run, state, trained.progress)
    error = float((fresh.evaluate().outputs["loss"] - alone.evaluate().outputs["loss"]).abs().max())
    return Measured(error=error, bound=FP32, note="largest difference of a row's loss")


@STRATEGIES.law("checkpoint")
def into_single(lab: Lab) -> Measured:
    """A run saved under the strategy and continued in one process equals a run in one
    process, also with sgd.
    """
    problem = _problem(lab)
    first = lab.job(problem, schedule=LINEAR)
    path = first.save(first.train(HALF).progress)
    measured = _continue(lab.build_alone(problem, schedule=LINEAR), path)
    if not lab.hooks.capabilities.takes_optimizer("sgd", elementwise=True):
        return measured
    try:
        first = lab.job(problem, **SGD)
    except ConfigError:
        # an option of the strategy, such as a file of its backend, names another optimizer
        return measured
    alone, whole = lab.build_alone(problem, **SGD), lab.build_alone(problem, **SGD)
    progress, _ = checkpoint.load(alone.run, alone.hooks, first.save(first.train(HALF).progress))
    other, _ = largest_difference(
        alone.train(STEPS - HALF, progress).state, whole.train(STEPS).state
    )
    return replace(
        measured, error=max(measured.error, other), note=f"{measured.note}; with sgd {other:.1e}"
    )


@STRATEGIES.law("checkpoint")
def from_single(lab: Lab) -> Measured:
    """A run saved in one process and continued under the strategy equals a run in one process."""
    problem = _problem(lab)
    alone = lab.build_alone(problem, schedule=LINEAR)
    path = alone.save(alone.train(HALF).progress)
    paths = lab.share(str(path))
    return _continue(lab.job(problem, schedule=LINEAR), Path(paths[0]))


def _problem(lab: Lab) -> Problem:
    return Problem(tied="tied-parameters" not in lab.hooks.capabilities.exempt)


def _continue(job: Job, path: Path) -> Measured:
    """Load ``path`` into ``job``, train to the end, and compare with an uninterrupted
    run in one process.
    """
    progress, _ = checkpoint.load(job.run, job.hooks, path)
    rest = job.train(STEPS - HALF, progress)
    whole = solve(job.task, job.run.config, STEPS)
    return distance(rest, replace(whole, losses=whole.losses[HALF:], norms=whole.norms[HALF:]))
