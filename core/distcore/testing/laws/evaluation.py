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
    errors = {}
    for size in sizes:
        error_by_rows = _error(by_rows, size)
        error_by_tokens = _error(by_tokens, size)
        errors[size] = max(error_by_rows, error_by_tokens)
    worst = max(errors, key=lambda size: errors[size])
    note = f"{len(sizes)} sizes, worst with {worst} rows"
    return Measured(error=errors[worst], bound=FORWARD, note=note)


@STRATEGIES.law("evaluation")
def without_optimizer(lab: Lab) -> Measured:
    """Evaluation of loaded weights, also without an optimizer as in ``distcore eval``, is that
    of a plain pass.
    """
    job = lab.job(Problem())
    solution = solve(job.task, job.run.config, 3)
    module = build_untrained(job.task, job.run.config, job.data)
    unwrapped = replace(job.run, module=module, model=module, strategy_state=None)
    wrapped = lab.hooks.wrap_model(unwrapped, module, None)
    if wrapped.optimizer is not None:
        note = "wrap_model() returned an optimizer without being given a factory"
        return Measured(error=1, bound=EXACT, note=note)
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
    uneven_rows = 2 * lab.world.size + 1
    error = _error(evaluating, uneven_rows, solution.module)
    return Measured(error=error, bound=FORWARD, note="")


@STRATEGIES.law("evaluation")
def buffers_agree(lab: Lab) -> Measured:
    """Running statistics, which each rank collects of its own rows, mean the same to all ranks
    and to a checkpoint.
    """
    job = lab.job(Problem(evaluation_rows=4 * lab.world.size))
    with torch.no_grad():
        # As if each rank had collected statistics of its own rows.
        job.run.module.get_buffer("scale").fill_(2.0 + lab.world.rank)
    evaluation = job.evaluate()
    saved = checkpoint.read_tensors(job.save(Progress(step=1)))["model/scale"]
    plain = build_untrained(job.task, job.run.config, job.data).eval()
    with torch.no_grad():
        plain.get_buffer("scale").copy_(saved)
        rows = np.arange(len(job.data.evaluation))
        expected = job.task.outputs(plain, job.data.evaluation.batch(rows))["loss"]
    error = float((evaluation.outputs["loss"] - expected).abs().max())
    note = f"largest difference of a row's loss; saved {float(saved):g}"
    return Measured(error=error, bound=FORWARD, note=note)


@STRATEGIES.law("evaluation")
def gather_unequal(lab: Lab) -> Measured:
    """Tensors with a different number of rows on each rank, also none, are joined in rank
    order and keep dtypes.
    """
    job = lab.job(Problem())
    ranks = range(lab.world.size)
    ascending = [2 * rank for rank in ranks]
    descending = [3 * rank for rank in reversed(ranks)]
    without_rows = [0 for _ in ranks]
    cases = (ascending, descending, without_rows)
    wrong = sum(_wrongly_joined(job, rows_by_rank) for rows_by_rank in cases)
    total = len(cases) * len(_samples(1))
    note = f"{wrong} of {total} tensors differ in rows, order or dtype"
    return Measured(error=wrong, bound=EXACT, note=note)


@STRATEGIES.law("evaluation")
def sum_over_ranks(lab: Lab) -> Measured:
    """``reduce_loss`` returns the sum over ranks on every rank and does not change its argument."""
    job = lab.job(Problem())
    first = 1.0 + lab.world.rank
    fine = 0.25 + 2**-40  # fp32 rounds it: a sum in fp32 would show
    mine = torch.tensor([first, fine], dtype=torch.float64, device=lab.world.device)
    total = lab.hooks.reduce_loss(job.run, mine)
    size = lab.world.size
    sum_of_first = size * (size + 1) / 2
    expected = torch.tensor([sum_of_first, size * fine], dtype=torch.float64)
    is_argument_changed = float(mine[0]) != first
    error = float((total.cpu() - expected).abs().max()) + is_argument_changed
    note = f"returned {total.tolist()}, expected {expected.tolist()}"
    return Measured(error=error, bound=EXACT, note=note)


def _error(job: Job, size: int, module: nn.Module | None = None) -> float:
    """Return the largest difference from a plain pass of ``module``, by default an untrained model.

    It is infinite if rows are lost, doubled or out of order.
    """
    dataset = RandomRows(size, seed=2)
    data = replace(job.data, evaluation=dataset)
    job = replace(job, training=replace(job.training, data=data))
    try:
        evaluation = job.evaluate()
    except AgreementError as error:
        raise AgreementError(f"with {size} rows: {error}") from error
    if size == 0:
        return 0.0 if evaluation.evaluated == 0 else float("inf")
    module = module or build_untrained(job.task, job.run.config, job.data)
    expected = _plain(job, dataset, module)
    if evaluation.outputs["label"].tolist() != expected["label"].tolist():
        return float("inf")
    differences = (evaluation.outputs["loss"] - expected["loss"]).abs()
    return float(differences.max())


@torch.no_grad()
def _plain(job: Job, dataset: RandomRows, module: nn.Module) -> dict[str, Tensor]:
    """Return the outputs of one forward pass over all rows at once."""
    all_rows = np.arange(len(dataset))
    return job.task.outputs(module.eval(), dataset.batch(all_rows))


def _wrongly_joined(job: Job, rows_by_rank: list[int]) -> int:
    """Return how many tensors of ``gather_outputs`` are not all ranks' rows, in order and alike."""
    world = job.run.world
    start = sum(rows_by_rank[: world.rank])
    stop = start + rows_by_rank[world.rank]
    whole = _samples(sum(rows_by_rank))
    mine = {name: value[start:stop].to(world.device) for name, value in whole.items()}
    joined = job.hooks.gather_outputs(job.run, mine)
    wrong = 0
    for name, value in whole.items():
        is_same = joined[name].dtype == value.dtype and torch.equal(joined[name].cpu(), value)
        wrong += not is_same
    return wrong


def _samples(rows: int) -> dict[str, Tensor]:
    """Return tensors of several dtypes by name, with values that other dtypes cannot hold."""
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
