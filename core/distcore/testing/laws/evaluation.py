"""Law 4: every row is evaluated exactly once, and its outputs come back in the
order of the dataset.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from distcore import checkpoint
from distcore.errors import AgreementError
from distcore.plugin.strategy.contract import Progress
from distcore.testing.findings import EXACT, FORWARD, Measured
from distcore.testing.lab import BY_TOKENS, Job, Lab
from distcore.testing.problem import Problem, RandomRows
from distcore.testing.reference import build_untrained, solve
from distcore.testing.strategy_suite import STRATEGIES

MICRO = 2
"""Rows of a micro-batch."""


@STRATEGIES.law("evaluation")
def every_size(lab: Lab) -> Measured:
    """Evaluation, also by tokens, equals a plain forward pass, from 0 rows to more than
    two micro-batches per rank.
    """
    # With dropout in the model: a strategy that left it on would not give what a plain
    # forward pass gives.
    problem = Problem(dropout=0.5)
    by_rows = lab.job(problem, micro_batch_size=MICRO, global_batch_size=MICRO * lab.world.size)
    by_tokens = lab.job(problem, **BY_TOKENS)
    sizes = range(2 * lab.world.size * MICRO + 2)
    errors = {size: max(_error(by_rows, size), _error(by_tokens, size)) for size in sizes}
    worst = max(errors, key=lambda size: errors[size])
    return Measured(
        error=errors[worst], bound=FORWARD, note=f"{len(sizes)} sizes, worst with {worst} rows"
    )


@STRATEGIES.law("evaluation")
def without_optimizer(lab: Lab) -> Measured:
    """Evaluation of loaded weights, also without an optimizer as in ``distcore eval``, is that
    of a plain pass.
    """
    job = lab.job(Problem())
    solution = solve(job.task, job.run.config, 3)
    module = build_untrained(job.task, job.run.config, job.data)
    wrapped = lab.hooks.wrap_model(
        replace(job.run, module=module, model=module, strategy_state=None), module, None
    )
    if wrapped.optimizer is not None:
        return Measured(
            error=1,
            bound=EXACT,
            note="wrap_model() returned an optimizer without being given a factory",
        )
    run = replace(
        job.run,
        module=module,
        model=wrapped.model,
        optimizer=None,
        scheduler=None,
        strategy_state=wrapped.state,
    )
    lab.hooks.load_checkpoint(run, checkpoint.Tensors(solution.state), Progress(step=3))
    evaluating = replace(job, training=replace(job.training, run=run))
    error = _error(evaluating, 2 * lab.world.size + 1, solution.module)
    return Measured(error=error, bound=FORWARD, note="")


@STRATEGIES.law("evaluation")
def buffers_agree(lab: Lab) -> Measured:
    """Running statistics, which each rank collects of its own rows, mean the same to all ranks
    and to a checkpoint.
    """
    job = lab.job(Problem(evaluation_rows=4 * lab.world.size))
    with torch.no_grad():
        # stands for what a rank has collected
        job.run.module.get_buffer("scale").fill_(2.0 + lab.world.rank)
    evaluation = job.evaluate()
    saved = checkpoint.read_tensors(job.save(Progress(step=1)))["model/scale"]
    plain = build_untrained(job.task, job.run.config, job.data).eval()
    with torch.no_grad():
        plain.get_buffer("scale").copy_(saved)
        rows = np.arange(len(job.data.evaluation))
        expected = job.task.outputs(plain, job.data.evaluation.batch(rows))["loss"]
    error = float((evaluation.outputs["loss"] - expected).abs().max())
    return Measured(
        error=error,
        bound=FORWARD,
        note=f"largest difference of a row's loss; saved {float(saved):g}",
    )


@STRATEGIES.law("evaluation")
def gather_unequal(lab: Lab) -> Measured:
    """Tensors with a different number of rows on each rank, also none, are joined in rank
    order and keep dtypes.
    """
    job = lab.job(Problem())
    ranks = range(lab.world.size)
    lengths = (
        [2 * rank for rank in ranks],
        [3 * (lab.world.size - 1 - rank) for rank in ranks],
        [0 for _ in ranks],
    )
    wrong = sum(_wrongly_joined(job, [*length]) for length in lengths)
    return Measured(
        error=wrong,
        bound=EXACT,
        note=f"{wrong} of {3 * len(_samples(1))} tensors differ in rows, order or dtype",
    )


@STRATEGIES.law("evaluation")
def sum_over_ranks(lab: Lab) -> Measured:
    """``reduce_loss`` returns the sum over ranks on every rank and does not change its argument."""
    job = lab.job(Problem())
    mine = torch.tensor(
        [1.0 + lab.world.rank, 0.25 + 2**-40], dtype=torch.float64, device=lab.world.device
    )
    total = lab.hooks.reduce_loss(job.run, mine)
    size = lab.world.size
    expected = torch.tensor([size * (size + 1) / 2, size * (0.25 + 2**-40)], dtype=torch.float64)
    changed = float(mine[0]) != 1.0 + lab.world.rank
    error = float((total.cpu() - expected).abs().max()) + changed
    return Measured(
        error=error, bound=EXACT, note=f"returned {total.tolist()}, expected {expected.tolist()}"
    )


def _error(job: Job, size: int, module: nn.Module | None = None) -> float:
    """Return the largest difference from a plain pass of ``module``, by default an untrained model.

    It is infinite if rows are lost, doubled or out of order.
    """
    dataset = RandomRows(size, seed=2)
    job = replace(job, training=replace(job.training, data=replace(job.data, evaluation=dataset)))
    try:
        evaluation = job.evaluate()
    except AgreementError as error:
        raise AgreementError(f"with {size} rows: {error}") from error
    if size == 0:
        return 0.0 if evaluation.evaluated == 0 else float("inf")
    expected = _plain(job, dataset, module or build_untrained(job.task, job.run.config, job.data))
    if evaluation.outputs["label"].tolist() != expected["label"].tolist():
        return float("inf")
    return float((evaluation.outputs["loss"] - expected["loss"]).abs().max())


@torch.no_grad()
def _plain(job: Job, dataset: RandomRows, module: nn.Module) -> dict[str, Tensor]:
    return job.task.outputs(module.eval(), dataset.batch(np.arange(len(dataset))))


def _wrongly_joined(job: Job, lengths: list[int]) -> int:
    world = job.run.world
    start = sum(lengths[: world.rank])
    whole = _samples(sum(lengths))
    mine = {
        name: value[start : start + lengths[world.rank]].to(world.device)
        for name, value in whole.items()
    }
    joined = job.hooks.gather_outputs(job.run, mine)
    return sum(
        joined[name].dtype != value.dtype or not torch.equal(joined[name].cpu(), value)
        for name, value in whole.items()
    )


def _samples(rows: int) -> dict[str, Tensor]:
    numbers = torch.arange(rows)
    return {
        "index": numbers,
        "half": numbers.float() / 2,
        "wide": torch.stack([numbers.double(), -numbers.double()], dim=1),
        "odd": numbers % 2 == 1,
        "small": numbers.to(torch.int32),
        "byte": numbers.to(torch.uint8),
        "large": numbers + 2**53 + 1,
        "fp16": numbers.half() / 2,
        "bf16": numbers.bfloat16() / 2,
    }
