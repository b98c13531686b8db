"""Cases of what saves memory: a frozen weight in 16 bits or in bytes, a loss in chunks,
moments in 8 bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

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
    name, declared = "adamw8bit", lab.hooks.capabilities
    needs(name in registry.offers("optimizers"), f"the optimizer {name} is not installed")
    needs(
        declared.takes_optimizer(name, elementwise=False),
        f"the strategy refuses the optimizer {name}",
    )
    needs(
        "bit-for-bit" not in declared.exempt,
        f"as bit-for-bit: {declared.exempt.get('bit-for-bit')}",
    )
    whole, other = (lab.job(LongRows(), optimizer={"name": name, "eps": 1e-2}) for _ in range(2))
    begun, plain = whole.train(STEPS), solve(whole.task, whole.run.config, STEPS)
    far = distance(replace(begun, state=plain.state), plain, NEAR).error
    progress, _ = checkpoint.load(other.run, other.hooks, whole.save(begun.progress))
    expected, resumed = (job.train(STEPS, progress) for job in (whole, other))
    error, where = largest_difference(resumed.state, expected.state)
    saved, due = (
        {(key, t.dtype, t.shape) for key, t in state.items()}
        for state in (expected.state, plain.state)
    )
    note = (
        f"{len(saved ^ due)} tensors are not as AdamW's; losses {far:.1e} off; resumed, worst"
        f" tensor {where}"
    )
    return Measured(error=error + len(saved ^ due) + max(0, far - NEAR), bound=EXACT, note=note)


def _compare_with_wide(lab: Lab, dtype: torch.dtype) -> Measured:
    wide, stored, fresh = (
        lab.job(Stored(stored=dtype, wide=is_wide)) for is_wide in (True, False, False)
    )
    held, most = _bytes_held(stored), _bytes_held(wide) * dtype.itemsize // 4
    expected, trained = wide.train(STEPS), stored.train(STEPS)
    began = build_untrained(stored.task, stored.run.config, stored.data).get_parameter(FROZEN)
    error, where = largest_difference(trained.state, {**expected.state, f"model/{FROZEN}": began})
    error += sum(abs(a - b) for a, b in zip(trained.losses, expected.losses, strict=True))
    checkpoint.load(fresh.run, fresh.hooks, stored.save(trained.progress))
    error += largest_difference(
        checkpoint.read_tensors(fresh.save(trained.progress)), trained.state
    )[0]
    saved = trained.state[f"model/{FROZEN}"].dtype
    note = f"worst tensor {where}; it is saved as {saved}; a rank holds {held} bytes of {most}"
    bound = EXACT if lab.hooks.capabilities.deterministic else FP32
    return Measured(error=error + (saved != dtype) + max(0, held - most), bound=bound, note=note)


def _bytes_held(job: Job) -> int:
    dtensors.reshard(job.run.module)
    parameters = dict(job.run.module.named_parameters())
    return dtensors.local_part(parameters[FROZEN])[0].nbytes if FROZEN in parameters else 0
