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
    names = checkpoint.read_tensors(path).keys()
    other_names = sorted(names ^ without.train(1).state.keys())
    digests = checkpoint.Checkpoint(path).job_state().get("frozen", {})
    is_missing = "reference" not in digests
    note = f"{len(other_names)} other tensors: {other_names[:2]}"
    return Measured(error=len(other_names) + is_missing, bound=EXACT, note=note)


@STRATEGIES.law("checkpoint")
def saved_by_one_rank(lab: Lab) -> Measured:
    """Until the optimizer steps again, each rank returns what it holds of the step
    before, without the others.
    """
    if not lab.hooks.capabilities.saves_alone:
        return Measured(error=0.0, bound=EXACT, note="saves_alone is not declared")
    job = lab.job(_problem(lab))
    trained = job.train(HALF)
    optimizer = job.run.optimizer
    whole = checkpoint.Tensors(trained.state)
    differences: list[tuple[float, str]] = []

    def compare_own_state(*_: object) -> None:
        """Note how far what this rank holds is from the checkpoint of the step before."""
        state = lab.hooks.save_checkpoint(job.run)
        actual = {}
        expected = {}
        for name, part in state.items():
            actual[name] = torch.cat([values.flatten() for values in values_of(part)])
            expected[name] = _same_part(whole, name, part)
        difference = largest_difference(actual, expected)
        if all(isinstance(part, Tensor) for part in state.values()):
            # Every rank holds the whole state, so none of its tensors may be missing.
            expected = {name: value.flatten() for name, value in whole.items()}
            difference = max(difference, largest_difference(actual, expected))
        differences.append(difference)

    # The ranks take turns: a collective in the hook would wait for ranks that do not call it.
    for rank in range(lab.world.size):
        done = lab.folder / f"kept-{rank}"
        if rank == lab.world.rank:
            compare_own_state()
            done.touch()
        await_true(done.exists, 5, f"rank {rank} needs other ranks to save its state")
    assert optimizer is not None
    optimizer.register_step_pre_hook(compare_own_state)
    next(job.steps(trained.progress))
    error, where = max(differences)
    count = len(
        differences
    )  # of 2 that are due: between two steps, and when the optimizer begins to step
    return Measured(error=error + abs(count - 2), bound=EXACT, note=f"{count} times, worst {where}")


def _same_part(whole: checkpoint.Tensors, name: str, held: Part | Sequence[Box]) -> Tensor:
    """Return the elements of the tensor ``name`` that a rank holds as ``held``, in one row."""

    def expected_values(part: Part) -> Tensor:
        if isinstance(part, Tensor):
            return whole[name]
        if isinstance(part, Piece):
            return whole.piece(name, part.start, len(part.values))
        return whole.box(name, part.offset, part.values.shape)

    return torch.cat([expected_values(part).flatten() for part in parts_of(held)])


@STRATEGIES.law("checkpoint")
def round_trip(lab: Lab) -> Measured:
    """Tensors that are loaded and saved again are the same bit for bit; from any dtype they
    get the model's own.
    """
    problem = Counts(tied=_problem(lab).tied)
    trained = lab.job(problem).train(3)
    # Training leaves these buffers as they were built, and a load that skips them would not show.
    buffers = {"scale": torch.tensor(2.0)} | COUNTS
    changed = {f"model/{name}": value for name, value in buffers.items()}
    state = checkpoint.Tensors(dict(trained.state) | changed)
    in_bf16 = {
        name: value.bfloat16()
        for name, value in state.items()
        if name.startswith("model/") and value.is_floating_point()
    }
    errors = []
    for loaded in (state, checkpoint.Tensors(dict(state) | in_bf16)):
        fresh = lab.job(problem)
        lab.hooks.load_checkpoint(fresh.run, loaded, trained.progress)
        saved_again = checkpoint.read_tensors(fresh.save(trained.progress))
        errors.append(largest_difference(saved_again, loaded))
        for name, value in state.items():
            if name in saved_again and saved_again[name].dtype != value.dtype:
                errors.append((float("inf"), f"{name} is {saved_again[name].dtype}"))
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
        folder = _files(lab, Problem(tied=tied), has_own_head)
        job = lab.job(FromFiles(tied=tied, folder=folder))
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
        write_files(folder, replace(problem, blocks=lab.shape.blocks), has_own_head)
    # Until here the main rank may still be writing.
    lab.share(None)
    return folder


@STRATEGIES.law("checkpoint")
def scalar_parameters(lab: Lab) -> Measured:
    """A parameter without dimensions is trained, saved, loaded and trained on
    as in plain PyTorch.
    """
    problem = Problem(scalar=True)
    try:
        first = lab.job(problem)
    except DistcoreError as error:
        raise Skip(f"refused: {error}") from error
    second = lab.job(problem)
    return _continue(second, _save_half(first))


@STRATEGIES.law("checkpoint")
def loads_into_every_rank(lab: Lab) -> Measured:
    """After loading, the forward pass on every rank uses the loaded parameters and buffers."""
    problem = replace(_problem(lab), evaluation_rows=4 * lab.world.size)
    trained = lab.job(problem).train(3)
    state = checkpoint.Tensors(dict(trained.state) | {"model/scale": torch.tensor(2.0)})
    fresh, alone = lab.job(problem), lab.build_alone(problem)
    for job in (fresh, alone):
        job.hooks.load_checkpoint(job.run, state, trained.progress)
    losses = fresh.evaluate().outputs["loss"]
    expected = alone.evaluate().outputs["loss"]
    error = float((losses - expected).abs().max())
    return Measured(error=error, bound=FP32, note="largest difference of a row's loss")


@STRATEGIES.law("checkpoint")
def into_single(lab: Lab) -> Measured:
    """A run saved under the strategy and continued in one process equals a run in one
    process, also with sgd.
    """
    problem = _problem(lab)
    path = _save_half(lab.job(problem, schedule=LINEAR))
    measured = _continue(lab.build_alone(problem, schedule=LINEAR), path)
    if not lab.hooks.capabilities.takes_optimizer("sgd", elementwise=True):
        return measured
    try:
        first = lab.job(problem, **SGD)
    except ConfigError:
        # An option of the strategy, such as a file of its backend, names another optimizer.
        return measured
    alone = lab.build_alone(problem, **SGD)
    uninterrupted = lab.build_alone(problem, **SGD)
    progress, _ = checkpoint.load(alone.run, alone.hooks, _save_half(first))
    continued = alone.train(STEPS - HALF, progress)
    error_with_sgd, _ = largest_difference(continued.state, uninterrupted.train(STEPS).state)
    return replace(
        measured,
        error=max(measured.error, error_with_sgd),
        note=f"{measured.note}; with sgd {error_with_sgd:.1e}",
    )


@STRATEGIES.law("checkpoint")
def from_single(lab: Lab) -> Measured:
    """A run saved in one process and continued under the strategy equals a run in one process."""
    problem = _problem(lab)
    path = _save_half(lab.build_alone(problem, schedule=LINEAR))
    # Every rank has trained and saved a run of its own; all must continue the same one.
    paths = lab.share(str(path))
    return _continue(lab.job(problem, schedule=LINEAR), Path(paths[0]))


def _problem(lab: Lab) -> Problem:
    """Return the problem of these cases; it ties weights if the strategy can train tied ones."""
    return Problem(tied="tied-parameters" not in lab.hooks.capabilities.exempt)


def _save_half(job: Job) -> Path:
    """Train for the first ``HALF`` steps; return the path of the checkpoint then."""
    return job.save(job.train(HALF).progress)


def _continue(job: Job, path: Path) -> Measured:
    """Load ``path`` into ``job``, train to the end, and compare with an uninterrupted
    run in one process.
    """
    progress, _ = checkpoint.load(job.run, job.hooks, path)
    rest = job.train(STEPS - HALF, progress)
    whole = solve(job.task, job.run.config, STEPS)
    # Its state is that of the last step already; losses and norms are one per step.
    rest_of_whole = replace(whole, losses=whole.losses[HALF:], norms=whole.norms[HALF:])
    return distance(rest, rest_of_whole)
