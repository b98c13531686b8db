"""Cases of what saves memory: a frozen weight in 16 bits or in bytes, a loss in chunks,
moments in 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from distcore import checkpoint, registry
from distcore.distributed import dtensors
from distcore.testing.findings import EXACT, FP32, Measured, needs
from distcore.testing.lab import Job, Lab
from distcore.testing.laws.gradient import distance, needs_calls
from distcore.testing.reference import build_untrained, largest_difference, solve
from distcore.testing.strategy_suite import STRATEGIES
from distcore.testing.variants import Chunked, LongRows, Stored

STEPS = 3
"""Optimizer steps of a run."""
NEAR = 1e-3
"""Relative error of losses and gradient norms with moments in 8 bits."""
FROZEN = "frozen.weight"


@STRATEGIES.law("gradient")
def frozen_16_bits(lab: Lab) -> Measured:
    """With a frozen weight in bf16, training equals that with its values in fp32; it is held
    and saved in bf16.
    """
    return _compare_with_wide(lab, torch.bfloat16)


@STRATEGIES.law("gradient")
def frozen_bytes(lab: Lab) -> Measured:
    """With a frozen weight of bytes, training equals that with its values in fp32; it is held
    and saved in bytes.
    """
    return _compare_with_wide(lab, torch.uint8)


@STRATEGIES.law("gradient")
def chunked_loss(lab: Lab) -> Measured:
    """Training with a loss that the head computes in chunks equals plain
    PyTorch with whole logits.
    """
    needs_calls(lab)
    job = lab.job(Chunked(rows=4 * lab.global_batch + 2))
    return distance(job.train(STEPS), solve(job.task, job.run.config, STEPS))


@STRATEGIES.law("resume")
def eight_bit_moments(lab: Lab) -> Measured:
    """With adamw8bit, losses are near AdamW's, a checkpoint has AdamW's moments, and a resumed run
    is bit for bit.
    """
    declared = lab.hooks.capabilities
    name = "adamw8bit"
    needs(name in registry.offers("optimizers"), f"the optimizer {name} is not installed")
    needs(
        declared.takes_optimizer(name, elementwise=False),
        f"the strategy refuses the optimizer {name}",
    )
    needs(
        "bit-for-bit" not in declared.exempt,
        f"as bit-for-bit: {declared.exempt.get('bit-for-bit')}",
    )
    optimizer = {"name": name, "eps": 1e-2}
    whole = lab.job(LongRows(), optimizer=optimizer)
    other = lab.job(LongRows(), optimizer=optimizer)
    first_half = whole.train(STEPS)
    plain = solve(whole.task, whole.run.config, STEPS)
    # Moments in 8 bits are not those of AdamW, so only losses and gradient norms can be near.
    losses_and_norms = replace(first_half, state=plain.state)
    error_of_losses = distance(losses_and_norms, plain, NEAR).error
    progress, _ = checkpoint.load(other.run, other.hooks, whole.save(first_half.progress))
    expected = whole.train(STEPS, progress)
    resumed = other.train(STEPS, progress)
    error, where = largest_difference(resumed.state, expected.state)
    unlike_adamw = _forms(expected.state) ^ _forms(plain.state)
    note = (
        f"{len(unlike_adamw)} tensors are not as AdamW's; losses {error_of_losses:.1e} off;"
        f" resumed, worst tensor {where}"
    )
    error += len(unlike_adamw)
    error += max(0, error_of_losses - NEAR)
    return Measured(error=error, bound=EXACT, note=note)


def _forms(state: Mapping[str, Tensor]) -> set[tuple[str, torch.dtype, torch.Size]]:
    """Return name, dtype and shape of each tensor of a checkpoint."""
    return {(name, tensor.dtype, tensor.shape) for name, tensor in state.items()}


def _compare_with_wide(lab: Lab, dtype: torch.dtype) -> Measured:
    """Compare training with a frozen weight in ``dtype`` with training with its values in fp32.

    The weight must not change, must be saved as ``dtype``, and must be held in as few bytes.
    """
    wide = lab.job(Stored(stored=dtype, wide=True))
    stored = lab.job(Stored(stored=dtype, wide=False))
    fresh = lab.job(Stored(stored=dtype, wide=False))
    bytes_held = _bytes_held(stored)
    max_bytes = _bytes_held(wide) * dtype.itemsize // 4  # an element in fp32 has 4 bytes
    expected = wide.train(STEPS)
    trained = stored.train(STEPS)
    initial_weight = build_untrained(stored.task, stored.run.config, stored.data).get_parameter(
        FROZEN
    )
    expected_state = {**expected.state, f"model/{FROZEN}": initial_weight}
    error, where = largest_difference(trained.state, expected_state)
    for loss, expected_loss in zip(trained.losses, expected.losses, strict=True):
        error += abs(loss - expected_loss)
    checkpoint.load(fresh.run, fresh.hooks, stored.save(trained.progress))
    saved_again = checkpoint.read_tensors(fresh.save(trained.progress))
    error_of_round_trip, _ = largest_difference(saved_again, trained.state)
    error += error_of_round_trip
    saved_dtype = trained.state[f"model/{FROZEN}"].dtype
    error += saved_dtype != dtype
    error += max(0, bytes_held - max_bytes)
    note = (
        f"worst tensor {where}; it is saved as {saved_dtype}; a rank holds {bytes_held} bytes of"
        f" {max_bytes}"
    )
    bound = EXACT if lab.hooks.capabilities.deterministic else FP32
    return Measured(error=error, bound=bound, note=note)


def _bytes_held(job: Job) -> int:
    """Return how many bytes of the frozen weight this rank holds; 0 if it is on another rank."""
    # A forward pass without backward leaves the weight gathered.
    dtensors.reshard(job.run.module)
    parameters = dict(job.run.module.named_parameters())
    if FROZEN not in parameters:
        return 0
    local_values, *_ = dtensors.local_part(parameters[FROZEN])
    return local_values.nbytes
