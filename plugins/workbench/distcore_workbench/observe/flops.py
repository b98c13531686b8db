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
from dataclasses import replace

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from distcore import (
    Capabilities,
    Dataset,
    Datasets,
    ModelSource,
    RunConfig,
    Task,
    with_changes,
)
from distcore.engine.tracing import (
    FakeTensors,
    StepToTrace,
    TracedStep,
    frozen_meta_models,
    trace_step,
)
from distcore.lab import Hooks
from distcore.launchers.processes import one_line
from distcore.model import freeze
from distcore.plugin.batching import in_epoch, read
from distcore.resolve.padding_free import PADDED, rows_as_computed
from distcore_workbench.observe.row_flops import RowFlops

log = logging.getLogger("distcore")
aten = torch.ops.aten
SAMPLED = 2**16
"""Most rows whose lengths are read to choose those that are counted."""
TWICE = 2
"""Rows of a counted batch, all the same one: normalization over a batch needs two."""


def product(
    total: Sequence[int], left: Sequence[int], right: Sequence[int], **_kept: object
) -> int:
    """Return the operations of a product of these shapes, or of a batch of products."""
    return 2 * math.prod(left) * right[-1]


IN_PLACE = {aten.addmm_: product, aten.baddbmm_: product}
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
    changes = {"device": "cpu", "compile": "off", "gradient_checkpointing": False}
    config = with_changes(given, PADDED | changes)
    rows = in_epoch(rows_as_computed(config, data.train), 0)
    lengths, numbers = _examples(rows)
    meta_model = source.meta_model()
    freeze(config, meta_model)
    job = StepToTrace(
        config=config,
        task=task,
        meta_model=meta_model,
        frozen=frozen_meta_models(config, task, data),
        batch={},
        rows=TWICE,
        training=False,
    )
    batches = [rows.batch(np.full(TWICE, number)) for number in numbers]
    return lengths, [_count(replace(job, batch=batch), capabilities) // TWICE for batch in batches]


def _examples(rows: Dataset) -> tuple[list[int], list[int]]:
    """Return up to three different lengths in increasing order, and a row of each."""
    sampled = min(len(rows), SAMPLED)
    evenly_spread = np.linspace(0, len(rows) - 1, sampled)
    numbers = np.unique(evenly_spread.astype(np.int64))
    lengths = read(rows.lengths, numbers)
    distinct_lengths, first_index = np.unique(lengths, return_index=True)
    longest = len(distinct_lengths) - 1
    # The shortest, the middle and the longest: three points fix a polynomial of degree 2.
    positions = sorted({0, len(distinct_lengths) // 2, longest})
    lengths_of_examples = [int(distinct_lengths[position]) for position in positions]
    examples = [int(numbers[first_index[position]]) for position in positions]
    return lengths_of_examples, examples


def _count(job: StepToTrace, capabilities: Capabilities) -> int:
    """Return the operations of the forward and backward pass over the micro-batch of ``job``."""
    # Attention as plain products of matrices: a kernel's backward pass computes the scores again.
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)

    def count(step: TracedStep) -> int:
        with sdpa_kernel(SDPBackend.MATH), counter:
            step.passes()
        return int(counter.get_total_flops())

    return trace_step(job, Hooks("one-process", _OneProcess(capabilities)), FakeTensors(), count)


class _OneProcess:
    """Stands for a strategy in one process: it computes in the same precision and wraps nothing."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities


def _fitted(lengths: Sequence[int], counts: Sequence[int]) -> RowFlops:
    """Return the polynomial through the counts."""
    powers = np.vander(np.array(lengths, np.float64), increasing=True)
    coefficients = np.linalg.solve(powers, np.array(counts, np.float64))
    return RowFlops(tuple(coefficients.tolist()))
