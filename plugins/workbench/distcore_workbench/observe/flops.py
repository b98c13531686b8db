"""Floating-point operations of the model for a row of any length: counted
once, on tensors without values.

A multiplication and an addition are two operations, as torch's counter has it; only
matrix products, convolutions and attention count. Attention is counted over the whole row, a causal
one too. What is computed again is not counted, nor
gradients that nobody asks for: LoRA's frozen weights have none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from distcore import (
    Batch,
    Capabilities,
    Dataset,
    Datasets,
    MicroBatch,
    ModelSource,
    Run,
    RunConfig,
    Task,
    World,
    with_changes,
)
from distcore.jobs import (
    PADDED,
    BoundTask,
    Tally,
    autocast_for,
    freeze,
    in_epoch,
    one_line,
    read,
    rows_in_form,
    unscaled_loss,
)
from distcore_workbench.observe.row_flops import RowFlops
from distcore_workbench.planning.step import frozen_models, without_values
from distcore_workbench.planning.storages import Storages

log = logging.getLogger("distcore")
SAMPLED = 2**16
"""Most rows whose lengths are read to choose those that are counted."""
TWICE = 2
"""Rows of a counted batch, all the same one: normalization over a batch needs two."""


def product(
    total: Sequence[int], left: Sequence[int], right: Sequence[int], **_kept: object
) -> int:
    """Return the operations of a product of these shapes, or of as many
    products as ``left`` has matrices.
    """
    return 2 * math.prod(left) * right[-1]


IN_PLACE = {torch.ops.aten.addmm_: product, torch.ops.aten.baddbmm_: product}
"""Products that torch's counter leaves out, because they are added in place, as the
loss in chunks adds them.
"""


def count_flops(
    config: RunConfig, capabilities: Capabilities, source: ModelSource, task: Task, data: Datasets
) -> RowFlops | None:
    """Return the operations of a row; ``None``, with a line that says why, if the model needs
    values to be traced.
    """
    try:
        return _fitted(*_counts(config, capabilities, source, task, data))
    except Exception as error:
        # of any kind: the task's own code computes with tensors that have no values
        reason = one_line(f"{type(error).__name__}: {error}", limit=200)
        log.warning("observe: no FLOPs and no MFU: the step fails without values: %s", reason)
        return None


def _counts(
    given: RunConfig, capabilities: Capabilities, source: ModelSource, task: Task, data: Datasets
) -> tuple[list[int], list[int]]:
    """Return the lengths of the shortest, the middle and the longest row, and
    the operations of each.
    """
    config = with_changes(given, PADDED | {"device": "cpu", "compile": "off"})
    rows = in_epoch(rows_in_form(config, data.train), 0)
    lengths, numbers = _examples(rows)
    meta_model = source.meta_model()
    freeze(config, meta_model)
    frozen = frozen_models(config, task, data)
    batches = [rows.batch(np.full(TWICE, number)) for number in numbers]
    return lengths, [
        _count(config, capabilities, task, (meta_model, frozen), batch) // TWICE
        for batch in batches
    ]


def _examples(rows: Dataset) -> tuple[list[int], list[int]]:
    """Return up to three different lengths in increasing order, and a row of each."""
    numbers = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED)).astype(np.int64))
    lengths = read(rows.lengths, numbers)
    different, first = np.unique(lengths, return_index=True)
    chosen = sorted({0, len(different) // 2, len(different) - 1})
    return [int(different[at]) for at in chosen], [int(numbers[first[at]]) for at in chosen]


def _count(
    config: RunConfig,
    capabilities: Capabilities,
    task: Task,
    models: tuple[nn.Module, dict[str, nn.Module | None]],
    batch: Batch,
) -> int:
    """Return the operations of the forward and backward pass over ``batch``."""
    storages = Storages(copies=False)
    model, bound = without_values(models[0], storages).train(), BoundTask.of(task)
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), shard=0, shards=1)
    autocast = autocast_for(config, capabilities, world)
    beside = {
        name: model if meta is None else without_values(meta, storages).requires_grad_(False).eval()
        for name, meta in models[1].items()
    }

    @torch.no_grad()
    def consult(batch: Batch, training: bool = True) -> Batch:
        with autocast:
            return bound.consult(beside, batch)

    traced = Run(
        config=config,
        world=world,
        capabilities=capabilities,
        module=model,
        model=model,
        tally=Tally(bound.logs),
        consult=consult if beside else None,
    )
    loss = unscaled_loss(traced, bound)
    micro = MicroBatch(indices=np.zeros(TWICE, np.int64))
    # Attention as plain products of matrices: a kernel's backward pass computes the scores again.
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    with storages.tracing(), sdpa_kernel(SDPBackend.MATH), counter:
        loss(model, micro, batch).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def _fitted(lengths: Sequence[int], counts: Sequence[int]) -> RowFlops:
    """Return the polynomial through the counts."""
    powers = np.vander(np.array(lengths, np.float64), increasing=True)
    return RowFlops(tuple(np.linalg.solve(powers, np.array(counts, np.float64)).tolist()))
