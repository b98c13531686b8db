"""Passes of a step under ``exact``: the same bits however its blocks are dealt to ranks.

Each step is cut into the same blocks on any number of ranks (``BatchPlan.blocks``), and a block
computed alone has the same bits wherever it runs. What is left is the sum of the blocks' gradients.
Each is rounded to a grid, the multiples of a power of two, before fp64 adds it: such sums are
exact, and so the same in any order, in any partition and by any collective. It is the pre-rounding
of Demmel and Nguyen (ReproBLAS), with one bin.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from distcore.distributed.devices import seed
from distcore.engine.exact_shards import AddedBlock, ShardedSums
from distcore.engine.grid import FINEST, bits_of_grid, round_to_grid
from distcore.engine.seeding import FOR_SHARDS, POSITIVE
from distcore.engine.whole_batch import share_whole_batch
from distcore.errors import ModelError, StrategyError
from distcore.plugin.strategy.contract import MicroBatch, Run, StepLoss
from distcore.plugin.strategy.hooks import Hooks, Passes
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Batch

log = logging.getLogger("distcore")

CHUNK = 2**25
"""Elements that are sent together: 256 MiB."""
CACHED = 2**18
"""Elements that are rounded together: 2 MiB, which stay in a core's cache."""
REENTRANT = "incompatible with .grad()"
"""Part of torch's message for a reentrant checkpoint in these passes."""
ShareLoss = Callable[
    [Run, "list[tuple[MicroBatch, Batch]]", Callable[[int], None]], tuple[StepLoss, Tensor]
]
"""``share_whole_batch`` of a task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What all ranks know of the blocks of a step."""

    used: list[bool]
    """For each parameter: True if some block has a gradient of it."""
    greatest: float
    """The largest element of each block's gradient, summed over blocks: no sum has a larger one."""
    loss: float
    """The mean loss over the items of the global batch, added in the order of the blocks."""


def exact_passes(
    run: Run, hooks: Hooks, task: BoundTask, autocast: AbstractContextManager[object]
) -> Passes | None:
    """Return the passes of a run under ``exact``; ``None`` for any other run."""
    if run.config.exact is None:
        return None
    of_global_batch = partial(share_whole_batch, hooks, task, autocast)
    share_loss = of_global_batch if task.losses.whole_batch else None
    return hooks.passes_or(ExactPasses(hooks, share_loss))


class ExactPasses:
    """Forward and backward over the blocks of a step, in the place of the loop's ``train_step``.

    Gradients are taken of the bare module: no hook of a wrapper sees them, and nothing is sent
    before this rank's sums are whole. Only shards of parameters leave the sums to their strategy.
    """

    def __init__(self, hooks: Hooks, share_loss: ShareLoss | None = None) -> None:
        """``share_loss`` makes shares of blocks of a loss over the global batch.

        Raises StrategyError for an extension that would change what is computed, or miss it.
        """
        refuse_changers(hooks)
        self._hooks = hooks
        self._share_loss = share_loss
        # By module, as several runs may share their hooks, and so these passes; then by the
        # parameters that are trained now: phases of a step train some each.
        self._sums: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], Sums]]
        self._sums = WeakKeyDictionary()

    def __call__(self, run: Run, micros: list[tuple[MicroBatch, Batch]], loss: StepLoss) -> Tensor:
        """Set the gradient of the step; return its loss on the first data shard, 0 on others."""
        of_shard = torch.initial_seed()
        of_all_shards = (of_shard - run.world.shard * FOR_SHARDS) & POSITIVE
        loss_of_global_batch: Tensor | None = None
        if self._share_loss is not None:
            seed_of_block = partial(seed_block, run, of_all_shards)
            loss, loss_of_global_batch = self._share_loss(run, micros, seed_of_block)
        logged = run.tally.sums
        buffers = versions_of_buffers(run.module)
        sums = self._sums_of(run)
        facts = self._add_blocks(run, sums, micros, loss, of_all_shards, FINEST)
        bits = bits_of_grid(facts.greatest)
        if bits < FINEST:
            log.debug("exact: gradients add up to %.3g: a coarser grid", facts.greatest)
            run.tally.sums = logged  # else what a block logs would count twice
            facts = self._add_blocks(run, sums, micros, loss, of_all_shards, bits)
        refuse_written_buffers(run, buffers)
        sums.reduce(run, self._hooks, facts.used)
        # Further passes of this step begin anew: else they would draw what follows from the last
        # block of this rank.
        seed(run.world.device, of_shard)
        total = facts.loss if loss_of_global_batch is None else loss_of_global_batch.item()
        # The sum over shards is then the loss itself, and no order of it matters.
        mine = total if run.world.shard == 0 else 0.0
        return torch.tensor(mine, dtype=torch.float64, device=run.world.device)

    def _sums_of(self, run: Run) -> Sums:
        """Return the sums of the parameters that are trained now, made when they first are."""
        trained = [each for each in run.module.parameters() if each.requires_grad]
        numbers = tuple(map(id, trained))
        sums_of_run = self._sums.setdefault(run.module, {})
        if numbers not in sums_of_run:
            is_sharded = run.capabilities.shards_parameters
            sums_of_run[numbers] = self._shards_of(run) if is_sharded else GradientSums(trained)
        return sums_of_run[numbers]

    def _shards_of(self, run: Run) -> ShardedSums:
        """Return the sums of shards, one object for all phases of a run."""
        for sums in self._sums[run.module].values():
            if isinstance(sums, ShardedSums):
                sums.watch(run)
                return sums
        sharded = ShardedSums()
        sharded.watch(run)
        return sharded

    def _add_blocks(
        self,
        run: Run,
        sums: Sums,
        micros: list[tuple[MicroBatch, Batch]],
        loss: StepLoss,
        of_all_shards: int,
        bits: int,
    ) -> StepFacts:
        """Add up the gradients of this rank's blocks on a grid; return what ranks then agree on."""
        device = run.world.device
        sums.clear(run)
        # A place for each block: every rank fills in its own, so that adding them rounds nothing.
        places = len(micros) * run.world.shards
        greatest = torch.zeros(places, dtype=torch.float64, device=device)
        losses = torch.zeros_like(greatest)
        used = torch.zeros(sums.parameter_count, dtype=torch.float64, device=device)
        for micro, batch in micros:
            if micro.is_padding and not sums.needs_padding:
                continue
            seed_block(run, of_all_shards, micro.block)
            compute = partial(loss, run.module, micro, batch)
            block = sums.add_block(run, self._hooks, micro, compute, bits)
            if micro.is_padding:
                continue
            losses[micro.block] = block.loss
            greatest[micro.block] = block.greatest
            used += torch.tensor(block.used, device=device)
        told = torch.cat([used, greatest, losses])
        if run.world.size > 1:
            told = self._hooks.reduce_loss(run, told)
        numbers = told.tolist()
        of_blocks = numbers[len(used) :]
        return StepFacts(
            used=[count > 0 for count in numbers[: len(used)]],
            greatest=_sum_in_order(of_blocks[:places]),
            loss=_sum_in_order(of_blocks[places:]),
        )


class GradientSums:
    """The gradient of a step, added up over blocks in fp64: a part of ``flat`` per parameter."""

    needs_padding = False
    """No collective waits for a rank that has no block left."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """``parameters`` are those that are trained, in fp32."""
        self.parameters = list(parameters)
        self.parameter_count = len(self.parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        device = self.parameters[0].device
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._parts = torch.split(self.flat, sizes)
        self._wide = torch.empty(min(max(sizes), CACHED), dtype=torch.float64, device=device)

    def clear(self, run: Run | None = None) -> None:
        """Begin a step, or begin it anew."""
        self.flat.zero_()

    def add_block(
        self, run: Run, hooks: Hooks, micro: MicroBatch, loss: Callable[[], Tensor], bits: int
    ) -> AddedBlock:
        """Add the gradients of one block, rounded to multiples of ``2**-bits``."""
        run.tally.enter("forward")
        share = loss()
        run.tally.enter("backward")
        gradients = _gradients(share, self.parameters)
        self.add(gradients, bits)
        run.tally.enter("other")
        used = [gradient is not None for gradient in gradients]
        return AddedBlock(share.detach(), largest_element(gradients), used)

    def add(self, gradients: Sequence[Tensor | None], bits: int) -> None:
        """Add the gradients of one block, rounded to multiples of ``2**-bits``."""
        for total, gradient in zip(self._parts, gradients, strict=True):
            if gradient is None:
                continue
            chunks = zip(
                torch.split(total, CACHED), torch.split(gradient.reshape(-1), CACHED), strict=True
            )
            for chunk_of_total, chunk in chunks:
                wide = self._wide[: chunk.numel()].copy_(chunk)
                chunk_of_total += round_to_grid(wide, bits)

    def reduce(self, run: Run, hooks: Hooks, used: Sequence[bool]) -> None:
        """Add the sums of all ranks, and set ``grad`` of each parameter that was ``used``."""
        if run.world.size > 1:
            for part in torch.split(self.flat, CHUNK):
                part.copy_(hooks.reduce_loss(run, part))
        self.give(used)

    def give(self, used: Sequence[bool]) -> None:
        """Set ``grad`` of each parameter that was ``used``, rounded once to fp32."""
        for parameter, total, is_used in zip(self.parameters, self._parts, used, strict=True):
            parameter.grad = total.to(parameter.dtype).view_as(parameter) if is_used else None


Sums = GradientSums | ShardedSums
"""The gradient of a step, wherever it is added up."""


def seed_block(run: Run, of_all_shards: int, block: int) -> None:
    """Let a block draw the same random numbers on any rank, and if it is computed again."""
    seed(run.world.device, (of_all_shards + block * FOR_SHARDS) & POSITIVE)


def versions_of_buffers(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Return each buffer by name, and how often torch has seen it written."""
    return {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}


def refuse_written_buffers(run: Run, before: Mapping[str, tuple[Tensor, int]]) -> None:
    """Raise ModelError, one line, for a buffer that the passes since ``before`` have written.

    Each rank would have it as its own blocks left it.
    """
    for name, (buffer, version) in versions_of_buffers(run.module).items():
        buffer_before, version_before = before.get(name, (None, -1))
        if buffer is not buffer_before or version != version_before:
            raise ModelError(
                f"exact = {run.config.exact}: the forward pass of the model writes its buffer"
                f" {name!r}, which would follow from the rows of a rank; keep no state in buffers,"
                " or train without --exact"
            )


def largest_element(gradients: Sequence[Tensor | None]) -> Tensor | float:
    """Return the largest absolute element of a block's gradients, or NaN if there is one."""
    some = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    if not some:
        return 0.0
    # Not by a norm: torch's kernel for the largest element takes 25 times as long.
    bounds = [bound for gradient in some for bound in torch.aminmax(gradient)]
    return torch.stack(bounds).abs().max()


def refuse_changers(hooks: Hooks) -> None:
    """Raise StrategyError for an extension that does more than look at a step's computation."""
    if changers := [*hooks.changers, *hooks.unheard_changers]:
        raise StrategyError(
            f"exact: {changers[0]}, and could give a step other bits on other ranks; switch it off,"
            " or, if it only looks, let its class say only_looks = True"
        )


def _gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> tuple[Tensor | None, ...]:
    """Return the gradient of a block's loss; raises ModelError for a reentrant checkpoint."""
    try:
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError as error:
        if REENTRANT not in str(error):
            raise
        raise ModelError(
            "exact: forward calls torch.utils.checkpoint, which here must be with"
            " use_reentrant=False"
        ) from error


def _sum_in_order(numbers: Sequence[float]) -> float:
    """Return the sum, added from the first to the last; zeros at the end change no bit."""
    total = 0.0
    for number in numbers:
        total += number
    return total
