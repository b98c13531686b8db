"""Modules of a user's own train as in one plain process, or the run is refused in one line
before its third step.

The problems have what people's modules do and the other laws' task does not: hooks on gradients,
weights and buffers that forward writes, gradients within a loss. What refuses is a check before the
first step, which names the reason. The proof of a run's first steps counts only where a strategy
declares why it can differ: it holds weights in shards, or the optimizer has copies of its own. It
counts for every strategy where the job itself has no single result.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcore import checkpoint
from distcore.engine.inner_gradients import refuse_inner_gradients
from distcore.engine.mixed_devices import explain_mixed_devices
from distcore.engine.proof import STEPS as PROVED
from distcore.engine.proof import Proof
from distcore.errors import DistcoreError, RankError
from distcore.launchers import launch
from distcore.launchers.processes.failures import one_line
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.plugin.strategy.contract import Progress
from distcore.plugin.strategy.extra_state import extra_state
from distcore.testing import own_modules
from distcore.testing.findings import FP32, Measured, RefusedAlone, Skip, needs
from distcore.testing.lab import Job, JobLab, Lab, Trained
from distcore.testing.laws.gradient import distance, needs_calls
from distcore.testing.own_modules import Built, SignsGradients, Sloped, UsesItsModel
from distcore.testing.problem import Problem
from distcore.testing.rank import lab_of
from distcore.testing.reference import Solution, build_untrained, solve
from distcore.testing.strategy_suite import STRATEGIES
from distcore.testing.subject import Subject

PATIENCE = 10.0
"""Seconds that a rank which refuses a run waits for others, which may be stuck."""
STEPS = 3
"""Optimizer steps of a run."""
MOST_SECONDS = 60.0
"""Longest time of a job that may hang."""
SGD: dict[str, Any] = {"optimizer": {"name": "sgd"}}
"""An optimizer that takes sparse gradients."""


@STRATEGIES.law("gradient")
def hooks_on_gradients(lab: Lab) -> Measured:
    """A hook on a parameter's gradient that masks it acts as in plain PyTorch, or is refused."""
    return _equal_or_refused(lab, _built(lab, own_modules.halve_gradients))


@STRATEGIES.law("gradient")
def hooks_that_clip(lab: Lab) -> Measured:
    """A hook that is not linear, and so has another result for each cut, is refused, or
    acts on the whole gradient.
    """
    problem = _built(lab, own_modules.clamp_gradients)
    return _equal_or_refused(lab, problem, proof_counts=True, micro_batch_size=1)


@STRATEGIES.law("gradient")
def weights_written_in_forward(lab: Lab) -> Measured:
    """Weights that forward clamps, or scales row by row, train as in plain PyTorch, or
    the run is refused.
    """
    return _worst_of_changes(lab, (own_modules.clamp_weights, own_modules.limit_norms))


@STRATEGIES.law("gradient")
def weights_read_in_forward(lab: Lab) -> Measured:
    """Weights that forward reads as numbers, or that a parent's forward uses, are whole, or
    the run is refused.
    """
    changes = [own_modules.read_own_weight]
    # Of a pipeline no rank runs the parent's forward pass whole.
    if lab.hooks.capabilities.calls_any_time:
        changes += [own_modules.read_weight_of_child, own_modules.use_weight_of_child]
    return _worst_of_changes(lab, changes)


@STRATEGIES.law("gradient")
def weights_in_the_loss(lab: Lab) -> Measured:
    """Weights that a loss uses outside of the model get that gradient, too, or
    the run is refused.
    """
    needs_calls(lab)
    proof_counts = _copies_weights(lab.hooks.capabilities)
    return _equal_or_refused(lab, UsesItsModel(rows=_rows(lab)), proof_counts)


@STRATEGIES.law("gradient")
def gradients_of_inputs(lab: Lab) -> Measured:
    """Gradients that a loss or an evaluation takes of inputs, also for a penalty, change no
    other, or are refused.
    """
    needs_calls(lab)
    rows = _rows(lab)
    problems = (
        Sloped(rows=rows),
        Sloped(rows=rows, evaluated=True),
        Sloped(rows=rows, penalized=True),
    )
    return _worst_of(
        partial(_equal_or_refused, lab, problem, evaluates=True) for problem in problems
    )


@STRATEGIES.law("gradient")
def sparse_gradients(lab: Lab) -> Measured:
    """An embedding with sparse gradients trains as in one process, or is refused."""
    return _as_alone(lab, _built(lab, own_modules.make_sparse), **SGD)


@STRATEGIES.job_law("gradient")
def branches_by_row(lab: JobLab) -> Measured:
    """A layer that only some rows pass, on some ranks, trains as in plain PyTorch, or
    the run is refused.
    """
    ranks = int(lab.subject.config.nproc)
    with tempfile.TemporaryDirectory(prefix="distcore-check-") as temporary:
        folder = Path(temporary)
        try:
            measured = launch(
                _train_branches, lab.subject, folder, nproc=ranks, timeout=MOST_SECONDS
            )
        except RankError as error:
            # Ranks with shards wait for each other in each layer. Then the job must end, and not go
            # on in silence.
            is_expected = _copies_weights(lab.subject.declared)
            needs(not is_expected, f"the job ends: {one_line(str(error))}")
            raise
        except DistcoreError as refusal:  # of one rank, while others may wait for it
            raise Skip(f"refused: {one_line(str(refusal))}") from None
    return _worst(measured)


def _train_branches(subject: Subject, folder: Path) -> Measured:
    """Train on one rank of the job with micro-batches of one row; compare with plain PyTorch."""
    with lab_of(subject, folder) as lab:
        job = lab.job(_built(lab, own_modules.branch_rows), micro_batch_size=1)
        trained = job.train(STEPS)
        return distance(trained, solve(job.task, job.run.config, STEPS))


@STRATEGIES.law("gradient")
def changed_gradients(lab: Lab) -> Measured:
    """An extension that wraps the step finds the whole gradient and may change
    it, or is refused.
    """
    return _as_alone(lab, Problem(rows=_rows(lab)), {"signs": SignsGradients()})


@STRATEGIES.law("gradient")
def spectral_norm(lab: Lab) -> Measured:
    """A power iteration, one in each forward pass, ends as in plain PyTorch with
    one micro-batch a step.
    """
    return _equal_or_refused(lab, _built(lab, own_modules.bound_spectrum))


@STRATEGIES.law("gradient")
def counts_of_forward(lab: Lab) -> Measured:
    """Buffers that forward updates are saved as the main rank has counted its rows; the weights
    are as they should.
    """
    trial = _try(lab, _built(lab, own_modules.count_in_forward))
    if isinstance(trial, str):
        raise Skip(f"refused: {trial}")
    job, trained = trial
    counted_here = {}
    for name, buffer in job.run.module.named_buffers():
        # A copy: the save that follows may write to buffers.
        counted_here[name] = buffer.detach().clone()
    trained = job.saved(trained)
    expected = solve(job.task, job.run.config, STEPS)
    untrained = build_untrained(job.task, job.run.config, job.data)
    expected_buffers = dict(expected.module.named_buffers())
    wrong = []
    for name, initial in untrained.named_buffers():
        saved = _bits(trained.state[f"model/{name}"])
        has_moved = saved != _bits(initial)
        should_move = _bits(expected_buffers[name]) != _bits(initial)
        is_of_others = lab.world.is_main and saved != _bits(counted_here[name])
        if has_moved is not should_move or is_of_others:
            wrong.append(name)
    # Buffers of one process count all rows, those of a rank its own: only weights are compared.
    weights = {f"model/{name}" for name, _ in untrained.named_parameters()}
    state = {name: value for name, value in expected.state.items() if name in weights}
    measured = distance(trained, replace(expected, state=state))
    note = f"wrong buffers: {', '.join(wrong) or 'none'}; {measured.note}"
    error = max(measured.error, float(len(wrong)))
    return Measured(error=error, bound=FP32, note=note)


@STRATEGIES.law("gradient")
def odd_states(lab: Lab) -> Measured:
    """Buffers of every dtype and extra state are used, saved and loaded bit for bit, or
    the run is refused.
    """
    problem = _built(lab, own_modules.keep_odd_states)
    trial = _try(lab, problem, number=STEPS - 1)
    if isinstance(trial, str):
        raise Skip(f"refused: {trial}")
    first, trained = trial
    second = lab.job(problem, **_one_cut(lab))
    before = first.saved(trained)
    wrong = _wrong_states(before, solve(first.task, first.run.config, STEPS - 1))
    progress, _ = checkpoint.load(second.run, second.hooks, first.save(before.progress))
    after = second.train(1, progress)
    expected = solve(second.task, second.run.config, STEPS)
    wrong += [f"{name} of a resumed run" for name in _wrong_states(after, expected)]
    last_step = replace(expected, losses=expected.losses[-1:], norms=expected.norms[-1:])
    measured = distance(after, last_step)
    note = f"wrong states: {', '.join(wrong) or 'none'}; {measured.note}"
    error = max(measured.error, float(len(wrong)))
    return Measured(error=error, bound=FP32, note=note)


@STRATEGIES.law("gradient")
def empty_parameters(lab: Lab) -> Measured:
    """A parameter without elements is trained along and saved, or is refused."""
    return _equal_or_refused(lab, _built(lab, own_modules.add_nothing))


@STRATEGIES.law("gradient")
def complex_parameters(lab: Lab) -> Measured:
    """A complex parameter trains and is saved as in plain PyTorch, or is refused."""
    return _equal_or_refused(lab, _built(lab, own_modules.turn_rows))


def _rows(lab: Lab) -> int:
    """Return a number of rows with which every batch is complete."""
    return 4 * lab.global_batch


def _built(lab: Lab, change: Callable[[Any], None]) -> Built:
    """Return the problem whose model ``change`` changes after it was built."""
    return Built(rows=_rows(lab), change=change)


def _one_cut(lab: Lab) -> dict[str, Any]:
    """Return the change to a config with which a rank has one micro-batch a step."""
    return {"micro_batch_size": max(1, lab.global_batch // lab.world.shards)}


def _copies_weights(declared: Capabilities) -> bool:
    """Return True if a strategy declares why it can miss what forward does with a weight."""
    return declared.shards_parameters or "optimizer" in declared.owns


def _equal_or_refused(
    lab: Lab, problem: Problem, proof_counts: bool = False, evaluates: bool = False, **changes: Any
) -> Measured:
    """Compare some steps with plain PyTorch; a run that is refused in one line is
    skipped with that line.

    ``proof_counts``: a run that differs may also be ended by the proof of its first steps.
    ``evaluates``: a run also evaluates, before its steps and after them.
    """
    trial = _try(lab, problem, evaluates=evaluates, **changes)
    if isinstance(trial, str):
        raise Skip(f"refused: {trial}")
    job, trained = trial
    measured = distance(job.saved(trained), solve(job.task, job.run.config, STEPS))
    is_wrong = not measured.error <= measured.bound  # NaN is wrong, too
    # If one rank tries the proof, all must: its passes have collectives.
    if proof_counts and any(lab.share(is_wrong)):
        line = _line_of_proof(lab, problem, **changes)
        if line:
            raise Skip(f"refused: {line}")
    return measured


def _as_alone(
    lab: Lab, problem: Problem, extensions: Mapping[str, object] | None = None, **changes: Any
) -> Measured:
    """Compare some steps with those of one process; a run that is refused in one line is
    skipped with that line.
    """
    trial = _try(lab, problem, extensions=extensions, **changes)
    if isinstance(trial, str):
        raise Skip(f"refused: {trial}")
    job, trained = trial
    alone = lab.build_alone(problem, extensions, **changes)
    return distance(job.saved(trained), alone.train(STEPS))


def _try(
    lab: Lab,
    problem: Problem,
    number: int = STEPS,
    evaluates: bool = False,
    extensions: Mapping[str, object] | None = None,
    **changes: Any,
) -> tuple[Job, Trained] | str:
    """Build a run and take its first steps, without a save; return both, or the
    line that refuses it.

    Without ``changes`` a rank has one micro-batch a step. What ends a run later, such as a save
    that fails, is raised.
    """
    job: Job | None = None
    line = ""
    try:
        hooks = lab.hooks_with(extensions) if extensions else lab.hooks
        job = lab.job(problem, hooks, **{**_one_cut(lab), **changes})
    except DistcoreError as refusal:
        line = _line_of(refusal)
    # One rank may refuse what only it holds. In a run its line ends the others.
    if refused := next(filter(None, lab.share(line)), ""):
        return str(refused)
    assert job is not None  # or there would be a line
    trained: Trained | None = None
    try:
        with refuse_inner_gradients(job.hooks), explain_mixed_devices(job.run, job.hooks):
            if evaluates:
                job.evaluate()
            trained = job.take_steps(number)
            if evaluates:
                job.evaluate()
    except DistcoreError as refusal:
        line = _line_of(refusal)
    if refused := _line_of_any(lab, line):
        return refused
    assert trained is not None  # or there would be a line
    return job, trained


def _line_of_any(lab: Lab, line: str) -> str:
    """Return the first rank's line that refuses a run, after steps; empty if none does.

    Raises RefusedAlone if only this rank comes here with a line: others wait in a collective.
    """
    try:
        lines = lab.share(line, patience=PATIENCE if line else None)
    except TimeoutError:
        if not line:
            raise
        raise RefusedAlone(line) from None
    return next(filter(None, lines), "")


def _line_of_proof(lab: Lab, problem: Problem, **changes: Any) -> str:
    """Return the line with which the proof of its first steps ends a run; empty if it lets
    the run go on.
    """
    changes = {**_one_cut(lab), **changes, "prove": "on", "out": str(lab.folder / "proved")}
    problem = replace(problem, blocks=lab.shape.blocks)
    proof = Proof(lab.config(**changes), problem, lab.hooks, lab.world)
    try:
        job = lab.job(problem, proof=proof, **changes)
        proof.start(job.run, job.hooks, job.data, Progress())
        for step in islice(job.steps(Progress()), PROVED):
            proof.note(job.run, job.hooks, step)
    except DistcoreError as refusal:
        return _line_of(refusal)
    return ""


def _line_of(refusal: DistcoreError) -> str:
    """Return the line of an error that the user can correct; raise any other."""
    if refusal.exit_code != DistcoreError.exit_code:
        raise refusal
    return one_line(str(refusal))


def _worst_of_changes(lab: Lab, changes: Iterable[Callable[[Any], None]]) -> Measured:
    """Measure the model with each of ``changes``, as ``_worst_of`` does."""
    proof_counts = _copies_weights(lab.hooks.capabilities)
    return _worst_of(
        partial(_equal_or_refused, lab, _built(lab, change), proof_counts) for change in changes
    )


def _worst_of(problems: Iterable[Callable[[], Measured]]) -> Measured:
    """Return the largest error, and in its note what was refused; skipped if all are refused."""
    measured: list[Measured] = []
    refusals: list[Skip] = []
    for measure in problems:
        try:
            measured.append(measure())
        except RefusedAlone:
            raise  # no further run can begin while other ranks wait in this one
        except Skip as refusal:
            refusals.append(refusal)
    if not measured:
        raise refusals[0]
    worst = _worst(measured)
    notes = [worst.note, *map(str, refusals)]
    return replace(worst, note="; ".join(notes))


def _worst(measured: Iterable[Measured]) -> Measured:
    """Return the measurement with the largest error; NaN is the worst."""
    return max(measured, key=lambda each: (math.isnan(each.error), each.error))


def _wrong_states(trained: Trained, expected: Solution) -> list[str]:
    """Return the names of buffers and extra states whose bits are not those
    of the expected module.
    """
    states = dict(expected.module.named_buffers()) | extra_state(expected.module)
    return [
        name
        for name, value in states.items()
        if _bits(trained.state[f"model/{name}"]) != _bits(value)
    ]


def _bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Return what is equal for tensors that are equal bit for bit."""
    # numpy has no bfloat16 or float8, but it has their bytes.
    elements = tensor.detach().cpu().resolve_conj().contiguous()
    raw = elements.reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, raw.numpy().tobytes()
