"""Law 2: the gradient of a step is that of the mean loss over the items of its global batch."""

from __future__ import annotations

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
    shares = lab.global_batch // lab.world.size
    sizes = [size for size in range(1, shares + 1) if shares % size == 0]
    rows = 4 * lab.global_batch + 2
    return _cut(lab, Problem(rows=rows), *({"micro_batch_size": size} for size in sizes), BY_TOKENS)


@STRATEGIES.law("gradient")
def ranks_hold_one_model(lab: Lab) -> Measured:
    """After training, the forward pass on every rank equals that of the model
    trained in one process.
    """
    problem = Problem(rows=4 * lab.global_batch + 2, evaluation_rows=4 * lab.world.size)
    job = lab.job(problem)
    job.train(STEPS)
    solution = solve(job.task, job.run.config, STEPS)
    solution.module.eval()
    with torch.no_grad():
        rows = job.data.evaluation.batch(torch.arange(len(job.data.evaluation)).numpy())
        expected = problem.outputs(solution.module, rows)["loss"]
    error = float((job.evaluate().outputs["loss"] - expected).abs().max())
    return Measured(error=error, bound=10 * FORWARD, note="largest difference of a row's loss")


@STRATEGIES.law("gradient")
def ragged_tail(lab: Lab) -> Measured:
    """Training equals plain PyTorch, for fifteen epochs without clipping, when each ends with a
    batch of one row.
    """
    job = lab.job(Problem(rows=lab.global_batch + 1), max_steps=3 * STEPS, clip={"norm": None})
    solution = solve(job.task, job.run.config, 3 * STEPS)
    # it need not report them
    return distance(replace(job.train(3 * STEPS), norms=[]), replace(solution, norms=[]))


@STRATEGIES.law("gradient")
def ranks_without_rows(lab: Lab) -> Measured:
    """Training equals plain PyTorch when the dataset has fewer rows than there are ranks."""
    return compare(lab, Problem(rows=max(1, lab.world.size - 1)))


@STRATEGIES.law("gradient")
def weighted_items(lab: Lab) -> Measured:
    """Training equals plain PyTorch when rows have unequal weights in the mean loss,
    such as token counts.
    """
    return compare(lab, Problem(rows=4 * lab.global_batch + 2, weighted=True), micro_batch_size=1)


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
    return compare(
        lab,
        Problem(),
        optimizer={"eps": 1e-2, "weight_decay": 5.0, "betas": [0.7, 0.8], "groups": groups},
    )


@STRATEGIES.law("gradient")
def further_terms(lab: Lab) -> Measured:
    """An additional term of the loss with counts of its own is a mean over
    the global batch, too.
    """
    return compare(lab, TwoTerms(rows=4 * lab.global_batch + 2, weighted=True), micro_batch_size=1)


@STRATEGIES.law("gradient")
def frozen_model(lab: Lab) -> Measured:
    """Training with a loss that asks the model as it began equals plain PyTorch."""
    needs_calls(lab)
    return compare(lab, Referenced(rows=4 * lab.global_batch + 2))


@STRATEGIES.law("gradient")
def whole_batch(lab: Lab) -> Measured:
    """Training with a loss over the global batch equals plain PyTorch, in one
    micro-batch and in many.
    """
    needs_calls(lab)
    return _cut(lab, WholeBatch(rows=4 * lab.global_batch + 2))


@STRATEGIES.law("gradient")
def phases(lab: Lab) -> Measured:
    """Training in two phases equals a loop of plain PyTorch with two optimizers,
    after an evaluation, too.
    """
    needs_phases(lab)
    return _cut(lab, Phased(rows=4 * lab.global_batch + 2))


@STRATEGIES.law("gradient")
def own_steps(lab: Lab) -> Measured:
    """Steps of two passes that a task makes itself equal plain PyTorch, in one
    micro-batch and in many.
    """
    why = (
        "the strategy does not declare own_steps: it refuses tasks that make their own steps"
        " (train_step)"
    )
    needs(lab.hooks.capabilities.own_steps, why)
    return _cut(lab, Climbing(rows=4 * lab.global_batch + 2))


@STRATEGIES.law("gradient")
def recomputed_statistics(lab: Lab) -> Measured:
    """A model with batch normalization that is recomputed in the backward pass
    counts each batch once.
    """
    rows = lab.global_batch // lab.world.size
    needs(rows > 1, "a rank has one row of a step, and a variance needs two")
    recomputed, plain = (
        lab.job(Normalized(recomputed=again), micro_batch_size=rows).train(3)
        for again in (True, False)
    )
    return distance(recomputed, plain)


@STRATEGIES.law("gradient")
def logged_sums(lab: Lab) -> Measured:
    """A number that the loss logs is its mean over the global batch, on every rank."""
    problem = TwoTerms(rows=4 * lab.global_batch + 2)
    job = lab.job(problem, micro_batch_size=1)
    module = build_untrained(job.task, job.run.config, job.data)
    rows = training_plan(job.run.config, job.data.train).rows(0, 0)
    batch = job.data.train.batch(rows)
    right = float((module(batch["tokens"]).argmax(-1) == batch["labels"]).float().mean())
    job.run.tally.take(lab.world.device)
    next(job.steps(Progress()))
    _, means, _ = agree_on_tally(job.run, lab.hooks)
    return Measured(
        error=abs(means["right"] - right), bound=FP32, note=f"{means['right']:.6g} for {right:.6g}"
    )


def needs_calls(lab: Lab) -> None:
    """Raise Skip for a strategy whose model nobody else can call."""
    needs(
        lab.hooks.capabilities.calls_any_time,
        "the strategy declares that only its train_step can call the model",
    )


def needs_phases(lab: Lab) -> None:
    """Raise Skip for a strategy that cannot train in phases."""
    declared = lab.hooks.capabilities
    needs(
        declared.phases,
        f"tasks with phases are refused: {declared.why_not_phases or 'no reason given'}",
    )


@STRATEGIES.law("gradient")
def bf16(lab: Lab) -> Measured:
    """Training in bf16 equals plain PyTorch in bf16: the mean error of five seeds, which differ by
    a factor of two.
    """
    needs(
        "bf16" in lab.hooks.capabilities.precisions,
        "the strategy declares that it does not support bf16",
    )
    measured = [
        compare(lab, Problem(), bound=BF16, precision="bf16", seed=seed) for seed in range(5)
    ]
    return replace(
        max(measured, key=_badness), error=sum(each.error for each in measured) / len(measured)
    )


@STRATEGIES.law("gradient")
def fp16(lab: Lab) -> Measured:
    """In fp16 all ranks skip a step in which the gradient of one rank overflows; the
    others equal plain PyTorch.
    """
    declared = lab.hooks.capabilities
    is_scaled_here = "fp16" in declared.precisions and "precision" not in declared.owns
    needs(is_scaled_here, "the strategy declares no fp16, or scales the loss itself")
    problem = Problem(rows=4 * lab.global_batch + 2)
    plan = training_plan(lab.config(), problem.prepare(lab.config()).train)
    # of the first and last rank
    problem = replace(problem, heavy=(int(plan.rows(0, 1)[0]), int(plan.rows(0, 3)[-1])))
    job = lab.job(problem, precision="fp16")
    solution = solve(job.task, job.run.config, STEPS)
    return distance(replace(job.train(STEPS), norms=[]), replace(solution, norms=[]), BF16)


@STRATEGIES.law("gradient")
def dropout_repeats(lab: Lab) -> Measured:
    """With dropout, two runs are equal bit for bit, although one evaluates and saves in between."""
    first, second = (
        lab.job(Problem(dropout=0.2)).train(STEPS, interrupted=between) for between in (False, True)
    )
    without = lab.job(Problem()).train(1)
    error, where = largest_difference(second.state, first.state)
    error += sum(a != b for a, b in zip(first.losses, second.losses, strict=True))
    # equal losses mean that dropout was off, and nothing was tested
    error += first.losses[0] == without.losses[0]
    return Measured(error=error, bound=EXACT, note=f"worst tensor {where}")


@STRATEGIES.law("gradient")
def dropout_by_row(lab: Lab) -> Measured:
    """With dropout, training equals that of one process with the whole
    batch, for any micro-batches.
    """
    by_row = lab.config().dropout_masks == "row"
    needs(
        by_row, "dropout masks follow from the rank: the strategy splits rows or layers over ranks"
    )
    problem = Problem(rows=4 * lab.global_batch + 2, dropout=0.2)
    expected = lab.build_alone(problem).train(STEPS)
    shares = lab.global_batch // lab.world.size
    cuts: list[dict[str, Any]] = [{"micro_batch_size": 1}, {"micro_batch_size": shares}, BY_TOKENS]
    measured = [distance(lab.job(problem, **cut).train(STEPS), expected) for cut in cuts]
    if expected.losses[0] == lab.build_alone(Problem(rows=problem.rows)).train(1).losses[0]:
        return Measured(error=float("inf"), bound=FP32, note="dropout was off: nothing was tested")
    return max(measured, key=_badness)


def _cut(lab: Lab, problem: Problem, *cuts: dict[str, Any]) -> Measured:
    shares = max(1, lab.global_batch // lab.world.size)
    both: list[dict[str, Any]] = [{"micro_batch_size": 1}, {"micro_batch_size": shares}]
    return max((compare(lab, problem, **cut) for cut in cuts or both), key=_badness)


def _badness(measured: Measured) -> tuple[bool, float]:
    return measured.error != measured.error, measured.error


def compare(lab: Lab, problem: Problem, bound: float = FP32, **changes: Any) -> Measured:
    """Train ``problem`` for ten steps, under the strategy and in plain PyTorch,
    and return the difference.
    """
    job = lab.job(problem, **changes)
    if isinstance(problem, Phased):
        job.evaluate()  # the turns go on after it
    trained = job.train(STEPS)
    return distance(trained, solve(job.task, job.run.config, STEPS), bound)


def distance(trained: Series, solution: Series, bound: float = FP32) -> Measured:
    """Return the largest relative error of the gradient norms; if they are right, of
    losses and final tensors.
    """
    errors = {
        "gradient norm": _worst(trained.norms, solution.norms),
        "loss": _worst(trained.losses, solution.losses),
    }
    error, name = largest_difference(trained.state, solution.state)
    errors[name] = error
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    # the others follow from it
    worst = "gradient norm" if errors["gradient norm"] > bound else worst
    cause = _scale(trained, solution) if worst == "gradient norm" else ""
    note = cause or f"worst: {worst}{_steps_of(worst, trained, solution)}"
    return Measured(error=errors[worst], bound=bound, note=note)


def _scale(trained: Series, solution: Series) -> str:
    if not (trained.norms and solution.norms and trained.norms[0] and solution.norms[0]):
        return ""
    times = trained.norms[0] / solution.norms[0]
    for factor, cause in (
        (times, SCALE + "{0} times too large in step 1: a sum over {0} ranks that nobody divides?"),
        (
            1 / times,
            SCALE + "1/{0} of what is due in step 1: a mean over {0} ranks that is divided again?",
        ),
    ):
        if factor > 1.5 and abs(factor - round(factor)) < 1e-3:
            return cause.format(round(factor))
    return ""


def _worst(actual: list[float], expected: list[float]) -> float:
    if len(actual) != len(expected):
        return float("inf")
    errors = [abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True)]
    return next((error for error in errors if error != error), max(errors, default=0.0))


def _steps_of(worst: str, trained: Series, solution: Series) -> str:
    pairs = {
        "gradient norm": (trained.norms, solution.norms),
        "loss": (trained.losses, solution.losses),
    }
    actual, expected = pairs.get(worst, ([], []))
    return f", step 1: {actual[0]:.6g} for {expected[0]:.6g}" if actual else ""
