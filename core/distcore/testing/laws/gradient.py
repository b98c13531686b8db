"""Law 2: the gradient of a step is that of the mean loss over the items of its global batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from distcore.engine.meter import agree_on_tally
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.strategy.contract import Progress
from distcore.testing.findings import BF16, EXACT, FORWARD, FP32, SCALE, Measured, needs
from distcore.testing.lab import BY_TOKENS, Lab
from distcore.testing.problem import Problem
from distcore.testing.reference import Series, build_untrained, largest_difference, solve
from distcore.testing.strategy_suite import STRATEGIES
from distcore.testing.variants import Climbing, Normalized, Phased, Referenced, TwoTerms, WholeBatch

STEPS = 10
"""Optimizer steps of a run."""


@STRATEGIES.law("gradient")
def partitions(lab: Lab) -> Measured:
    """Training equals plain PyTorch for every micro-batch size that divides a rank's share,
    and cut by tokens.

    The ten steps are two epochs, each with an incomplete last batch.
    """
    rows_of_rank = lab.global_batch // lab.world.size
    cuts: list[dict[str, Any]] = [
        {"micro_batch_size": size}
        for size in range(1, rows_of_rank + 1)
        if rows_of_rank % size == 0
    ]
    cuts.append(BY_TOKENS)
    return _compare_cuts(lab, Problem(rows=_rows_of_uneven_epoch(lab)), cuts)


@STRATEGIES.law("gradient")
def ranks_hold_one_model(lab: Lab) -> Measured:
    """After training, the forward pass on every rank equals that of the model
    trained in one process.
    """
    problem = Problem(rows=_rows_of_uneven_epoch(lab), evaluation_rows=4 * lab.world.size)
    job = lab.job(problem)
    job.train(STEPS)
    solution = solve(job.task, job.run.config, STEPS)
    solution.module.eval()
    dataset = job.data.evaluation
    all_rows = torch.arange(len(dataset)).numpy()
    with torch.no_grad():
        expected = problem.outputs(solution.module, dataset.batch(all_rows))["loss"]
    losses = job.evaluate().outputs["loss"]
    error = float((losses - expected).abs().max())
    # More than one pass differs by: the trained parameters differ a little, too.
    bound = 10 * FORWARD
    return Measured(error=error, bound=bound, note="largest difference of a row's loss")


@STRATEGIES.law("gradient")
def ragged_tail(lab: Lab) -> Measured:
    """Training equals plain PyTorch, for fifteen epochs without clipping, when each ends with a
    batch of one row.
    """
    problem = Problem(rows=lab.global_batch + 1)
    steps = 3 * STEPS
    job = lab.job(problem, max_steps=steps, clip={"norm": None})
    solution = solve(job.task, job.run.config, steps)
    trained = job.train(steps)
    # A strategy that does not clip need not report the norms of gradients.
    return distance(replace(trained, norms=[]), replace(solution, norms=[]))


@STRATEGIES.law("gradient")
def ranks_without_rows(lab: Lab) -> Measured:
    """Training equals plain PyTorch when the dataset has fewer rows than there are ranks."""
    return compare(lab, Problem(rows=max(1, lab.world.size - 1)))


@STRATEGIES.law("gradient")
def weighted_items(lab: Lab) -> Measured:
    """Training equals plain PyTorch when rows have unequal weights in the mean loss,
    such as token counts.
    """
    problem = Problem(rows=_rows_of_uneven_epoch(lab), weighted=True)
    return compare(lab, problem, micro_batch_size=1)


@STRATEGIES.law("gradient")
def frozen_parameters(lab: Lab) -> Measured:
    """Frozen parameters stay as they were, bit for bit."""
    job = lab.job(Problem())
    model = build_untrained(job.task, job.run.config, job.data)
    before = {
        f"model/{name}": value
        for name, value in model.named_parameters()
        if name.startswith("frozen.")
    }
    moved, where = largest_difference(job.train(3).state, before)
    return Measured(error=moved, bound=EXACT, note=f"{len(before)} frozen tensors; {where}")


@STRATEGIES.law("gradient")
def unused_parameters(lab: Lab) -> Measured:
    """Parameters that no forward pass uses stay as they were, and the others are trained."""
    return compare(lab, Problem(unused=True))


@STRATEGIES.law("gradient")
def tied_parameters(lab: Lab) -> Measured:
    """A weight that is used in two places, or twice in one pass, gets the sum of both gradients."""
    return compare(lab, Problem(tied=True, repeated=True))


@STRATEGIES.law("gradient")
def parameter_groups(lab: Lab) -> Measured:
    """Groups are trained with their own rates; strong weight decay acts on all but
    biases and normalization weights.
    """
    groups = [
        {"match": "up|frozen", "lr_scale": 0.2, "weight_decay": 1.0},
        {"match": "down", "lr_scale": 3.0},
    ]
    optimizer = {"eps": 1e-2, "weight_decay": 5.0, "betas": [0.7, 0.8], "groups": groups}
    return compare(lab, Problem(), optimizer=optimizer)


@STRATEGIES.law("gradient")
def experts(lab: Lab) -> Measured:
    """Training a mixture of experts equals plain PyTorch: rows go to experts that a router chooses,
    and most experts get rows of some ranks alone.
    """
    problem = Problem(rows=_rows_of_uneven_epoch(lab), experts=4)
    return _compare_cuts(lab, problem, _smallest_and_largest(lab))


@STRATEGIES.law("gradient")
def further_terms(lab: Lab) -> Measured:
    """An additional term of the loss with counts of its own is a mean over
    the global batch, too.
    """
    problem = TwoTerms(rows=_rows_of_uneven_epoch(lab), weighted=True)
    return compare(lab, problem, micro_batch_size=1)


@STRATEGIES.law("gradient")
def frozen_model(lab: Lab) -> Measured:
    """Training with a loss that asks the model as it began equals plain PyTorch."""
    needs_calls(lab)
    return compare(lab, Referenced(rows=_rows_of_uneven_epoch(lab)))


@STRATEGIES.law("gradient")
def whole_batch(lab: Lab) -> Measured:
    """Training with a loss over the global batch equals plain PyTorch, in one
    micro-batch and in many.
    """
    needs_calls(lab)
    problem = WholeBatch(rows=_rows_of_uneven_epoch(lab))
    return _compare_cuts(lab, problem, _smallest_and_largest(lab))


@STRATEGIES.law("gradient")
def phases(lab: Lab) -> Measured:
    """Training in two phases equals a loop of plain PyTorch with two optimizers,
    after an evaluation, too.
    """
    needs_phases(lab)
    problem = Phased(rows=_rows_of_uneven_epoch(lab))
    return _compare_cuts(lab, problem, _smallest_and_largest(lab))


@STRATEGIES.law("gradient")
def own_steps(lab: Lab) -> Measured:
    """Steps of two passes that a task makes itself equal plain PyTorch, in one
    micro-batch and in many.
    """
    needs_own_steps(lab)
    problem = Climbing(rows=_rows_of_uneven_epoch(lab))
    return _compare_cuts(lab, problem, _smallest_and_largest(lab))


@STRATEGIES.law("gradient")
def recomputed_statistics(lab: Lab) -> Measured:
    """A model with batch normalization that is recomputed in the backward pass
    counts each batch once.
    """
    rows_of_rank = lab.global_batch // lab.world.size
    needs(rows_of_rank > 1, "a rank has one row of a step, and a variance needs two")
    recomputed = lab.job(Normalized(recomputed=True), micro_batch_size=rows_of_rank).train(3)
    plain = lab.job(Normalized(recomputed=False), micro_batch_size=rows_of_rank).train(3)
    return distance(recomputed, plain)


@STRATEGIES.law("gradient")
def logged_sums(lab: Lab) -> Measured:
    """A number that the loss logs is its mean over the global batch, on every rank."""
    problem = TwoTerms(rows=_rows_of_uneven_epoch(lab))
    job = lab.job(problem, micro_batch_size=1)
    module = build_untrained(job.task, job.run.config, job.data)
    rows = training_plan(job.run.config, job.data.train).rows(epoch=0, step=0)
    batch = job.data.train.batch(rows)
    is_right = module(batch["tokens"]).argmax(-1) == batch["labels"]
    expected = float(is_right.float().mean())
    job.run.tally.take(lab.world.device)  # clears it: only the step's own sums are to be read
    next(job.steps(Progress()))
    _, means, _ = agree_on_tally(job.run, lab.hooks)
    logged = means["right"]
    error = abs(logged - expected)
    return Measured(error=error, bound=FP32, note=f"{logged:.6g} for {expected:.6g}")


def needs_calls(lab: Lab) -> None:
    """Raise Skip for a strategy whose model nobody else can call."""
    why_not = "the strategy declares that only its train_step can call the model"
    needs(lab.hooks.capabilities.calls_any_time, why_not)


def needs_phases(lab: Lab) -> None:
    """Raise Skip for a strategy that cannot train in phases."""
    declared = lab.hooks.capabilities
    reason = declared.why_not_phases or "no reason given"
    needs(declared.phases, f"tasks with phases are refused: {reason}")


def needs_own_steps(lab: Lab) -> None:
    """Raise Skip for a strategy that refuses tasks with steps of their own."""
    why = (
        "the strategy does not declare own_steps: it refuses tasks that make their own steps"
        " (train_step)"
    )
    needs(lab.hooks.capabilities.own_steps, why)


@STRATEGIES.law("gradient")
def bf16(lab: Lab) -> Measured:
    """Training in bf16 equals plain PyTorch in bf16: the mean error of five seeds, which differ by
    a factor of two.
    """
    why_not = "the strategy declares that it does not support bf16"
    needs("bf16" in lab.hooks.capabilities.precisions, why_not)
    measured = []
    for seed in range(5):
        measured.append(compare(lab, Problem(), bound=BF16, precision="bf16", seed=seed))
    errors = [each.error for each in measured]
    mean_error = sum(errors) / len(errors)
    return replace(_worst_of(measured), error=mean_error)


@STRATEGIES.law("gradient")
def fp16(lab: Lab) -> Measured:
    """In fp16 all ranks skip a step in which the gradient of one rank overflows; the
    others equal plain PyTorch.
    """
    declared = lab.hooks.capabilities
    is_scaled_here = "fp16" in declared.precisions and "precision" not in declared.owns
    needs(is_scaled_here, "the strategy declares no fp16, or scales the loss itself")
    problem = Problem(rows=_rows_of_uneven_epoch(lab))
    plan = training_plan(lab.config(), problem.prepare(lab.config()).train)
    # In one step only the first rank overflows, in another only the last one.
    row_of_first_rank = int(plan.rows(epoch=0, step=1)[0])
    row_of_last_rank = int(plan.rows(epoch=0, step=3)[-1])
    problem = replace(problem, heavy=(row_of_first_rank, row_of_last_rank))
    job = lab.job(problem, precision="fp16")
    solution = solve(job.task, job.run.config, STEPS)
    trained = job.train(STEPS)
    # The norm of a gradient that overflows is no finite number, and has no relative error.
    return distance(replace(trained, norms=[]), replace(solution, norms=[]), BF16)


@STRATEGIES.law("gradient")
def dropout_repeats(lab: Lab) -> Measured:
    """With dropout, two runs are equal bit for bit, although one evaluates and saves in between."""
    problem = Problem(dropout=0.2)
    plain = lab.job(problem).train(STEPS)
    interrupted = lab.job(problem).train(STEPS, interrupted=True)
    without_dropout = lab.job(Problem()).train(1)
    error, where = largest_difference(interrupted.state, plain.state)
    pairs_of_losses = zip(plain.losses, interrupted.losses, strict=True)
    error += sum(loss != other for loss, other in pairs_of_losses)
    # If dropout changes no loss, it was off, and nothing was tested.
    is_dropout_off = plain.losses[0] == without_dropout.losses[0]
    error += is_dropout_off
    return Measured(error=error, bound=EXACT, note=f"worst tensor {where}")


@STRATEGIES.law("gradient")
def dropout_by_row(lab: Lab) -> Measured:
    """With dropout, training equals that of one process with the whole
    batch, for any micro-batches.
    """
    is_by_row = lab.config().dropout_masks == "row"
    why_not = "dropout masks follow from the rank: the strategy splits rows or layers over ranks"
    needs(is_by_row, why_not)
    problem = Problem(rows=_rows_of_uneven_epoch(lab), dropout=0.2)
    expected = lab.build_alone(problem).train(STEPS)
    rows_of_rank = lab.global_batch // lab.world.size
    cuts: list[dict[str, Any]] = [
        {"micro_batch_size": 1},
        {"micro_batch_size": rows_of_rank},
        BY_TOKENS,
    ]
    measured = []
    for cut in cuts:
        trained = lab.job(problem, **cut).train(STEPS)
        measured.append(distance(trained, expected))
    without_dropout = lab.build_alone(Problem(rows=problem.rows)).train(1)
    if expected.losses[0] == without_dropout.losses[0]:
        return Measured(error=math.inf, bound=FP32, note="dropout was off: nothing was tested")
    return _worst_of(measured)


def _rows_of_uneven_epoch(lab: Lab) -> int:
    """Return a number of rows whose last batch is incomplete: two of them in ``STEPS`` steps."""
    return 4 * lab.global_batch + 2


def _smallest_and_largest(lab: Lab) -> list[dict[str, Any]]:
    """Return the settings of the smallest micro-batch, and of one with all rows of a rank."""
    rows_of_rank = max(1, lab.global_batch // lab.world.size)
    return [{"micro_batch_size": 1}, {"micro_batch_size": rows_of_rank}]


def _compare_cuts(lab: Lab, problem: Problem, cuts: Iterable[dict[str, Any]]) -> Measured:
    """Compare under the settings of each cut of the batch; return the worst."""
    return _worst_of(compare(lab, problem, **cut) for cut in cuts)


def _worst_of(measured: Iterable[Measured]) -> Measured:
    """Return the measurement with the largest error."""
    return max(measured, key=lambda each: _badness(each.error))


def _badness(error: float) -> tuple[bool, float]:
    """Return a key to sort errors by. NaN is the worst, though it is greater than no number."""
    return math.isnan(error), error


def compare(lab: Lab, problem: Problem, bound: float = FP32, **changes: Any) -> Measured:
    """Train ``problem`` for ten steps, under the strategy and in plain PyTorch,
    and return the difference.
    """
    job = lab.job(problem, **changes)
    if isinstance(problem, Phased):
        job.evaluate()  # Phases take turns, which must go on as if there had been no evaluation.
    trained = job.train(STEPS)
    return distance(trained, solve(job.task, job.run.config, STEPS), bound)


def distance(trained: Series, solution: Series, bound: float = FP32) -> Measured:
    """Return the largest relative error of the gradient norms; if they are right, of
    losses and final tensors.
    """
    errors = {
        "gradient norm": _largest_relative_error(trained.norms, solution.norms),
        "loss": _largest_relative_error(trained.losses, solution.losses),
    }
    error_of_tensors, worst_tensor = largest_difference(trained.state, solution.state)
    errors[worst_tensor] = error_of_tensors
    worst = max(errors, key=lambda name: _badness(errors[name]))
    # A wrong gradient explains the errors of losses and tensors, even where these are larger.
    if errors["gradient norm"] > bound:
        worst = "gradient norm"
    note = _explain_scale(trained, solution) if worst == "gradient norm" else ""
    if not note:
        note = f"worst: {worst}{_values_of_first_step(worst, trained, solution)}"
    return Measured(error=errors[worst], bound=bound, note=note)


def _explain_scale(trained: Series, solution: Series) -> str:
    """Return a note if the first gradient is a whole number of times too large, or too small; it
    is empty for other errors.
    """
    if not trained.norms or not solution.norms:
        return ""
    norm = trained.norms[0]
    norm_due = solution.norms[0]
    if not norm or not norm_due:
        return ""
    times_too_large = norm / norm_due
    if _is_number_of_ranks(times_too_large):
        ranks = round(times_too_large)
        return (
            f"{SCALE}{ranks} times too large in step 1: a sum over {ranks} ranks that nobody"
            " divides?"
        )
    times_too_small = 1 / times_too_large
    if _is_number_of_ranks(times_too_small):
        ranks = round(times_too_small)
        return (
            f"{SCALE}1/{ranks} of what is due in step 1: a mean over {ranks} ranks that is"
            " divided again?"
        )
    return ""


def _is_number_of_ranks(factor: float) -> bool:
    """Return True for 2, 3 and so on, up to what fp32 rounds."""
    return factor > 1.5 and abs(factor - round(factor)) < 1e-3


def _largest_relative_error(actual: list[float], expected: list[float]) -> float:
    """Return NaN if any error is; infinity if there are more values of one than of the other."""
    if len(actual) != len(expected):
        return math.inf
    pairs = zip(actual, expected, strict=True)
    errors = [abs(value - right) / abs(right) for value, right in pairs]
    return max(errors, key=_badness, default=0.0)


def _values_of_first_step(worst: str, trained: Series, solution: Series) -> str:
    """Return actual and expected value of norm or loss; empty for a tensor, and without values."""
    series = {
        "gradient norm": (trained.norms, solution.norms),
        "loss": (trained.losses, solution.losses),
    }
    actual, expected = series.get(worst, ([], []))
    return f", step 1: {actual[0]:.6g} for {expected[0]:.6g}" if actual else ""
