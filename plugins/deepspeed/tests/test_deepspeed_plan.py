"""Memory by ``plan_memory`` at ZeRO-2 and ZeRO-3, beside DeepSpeed's
published estimates for T0_3B.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from torch import nn

from distcore import Memory, RunConfig, load_config
from distcore_deepspeed.strategy import DeepSpeedStrategy

LAYER, COUNT = 32_000_000, 2_851_000_000
"""Of T0_3B, as DeepSpeed's page on memory gives them: parameters of the largest layer,
and of the model.
"""


def t0_3b() -> nn.Module:
    """A model of so many parameters in layers of that size and a smaller last one; no weights."""
    whole, rest = divmod(COUNT, LAYER)
    with torch.device("meta"):
        return nn.ParameterList(
            [nn.Parameter(torch.empty(size)) for size in [LAYER] * whole + [rest]]
        )


def planned(ranks: int, **options: Any) -> Memory:
    config: RunConfig = load_config(
        None, {"precision": "fp16", "nproc": ranks, "device": "cpu", "lr": 1e-4}
    )
    strategy = DeepSpeedStrategy(**options)
    return strategy.plan_memory(
        config, t0_3b(), ranks, lambda module: torch.optim.AdamW(module.parameters())
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_are_counted_in_their_own_dtype(stage: Literal[2, 3]) -> None:
    module = nn.ParameterList([nn.Parameter(torch.empty(2**20, device="meta"))])
    for dtype in (torch.bfloat16, torch.uint8):
        module.append(
            nn.Parameter(torch.empty(2**20, dtype=dtype, device="meta"), requires_grad=False)
        )
    config = load_config(None, {"precision": "fp32", "nproc": 2, "device": "cpu", "lr": 1e-4})

    def adamw(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad]
        )

    memory = DeepSpeedStrategy(stage=stage).plan_memory(config, module, 2, adamw)
    assert memory.parameters == (4 + 2 + 1) * 2**20 // (2 if stage == 3 else 1)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_zero_2_is_the_published_estimate_but_for_what_lives_during_the_step(gpus: int) -> None:
    _, published = estimate_zero2_model_states_mem_needs(COUNT, gpus, 1, cpu_offload=False)
    # The estimate counts gradients in fp16 and again in fp32; the second copy is made by
    # the step itself.
    made_by_step = 4 * COUNT // gpus
    assert planned(gpus, stage=2).states + made_by_step == pytest.approx(published, rel=1e-6)


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_zero_2_with_offload_is_the_published_estimate_and_the_buffer_of_updated_weights(
    gpus: int,
) -> None:
    host, published = estimate_zero2_model_states_mem_needs(
        COUNT, gpus, 1, additional_buffer_factor=1.0
    )
    memory = planned(gpus, stage=2, offload_optimizer="cpu")
    assert memory.states == pytest.approx(published, rel=1e-6)
    # What all ranks of the machine keep; DeepSpeed copies the updated weights to the device through
    # 2 bytes each.
    assert gpus * memory.host - 2 * COUNT == pytest.approx(host, rel=1e-6)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_zero_3_is_the_published_estimate_but_for_the_largest_layer(gpus: int) -> None:
    _, published, layer = estimate_zero3_model_states_mem_needs(COUNT, LAYER, gpus, 1, False, False)
    # The estimate counts the fp32 gradients of the step where the plan has the fp16 ones before it.
    assert planned(gpus, stage=3).states + 2 * COUNT // gpus == pytest.approx(
        published - layer, rel=1e-6
    )


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_zero_3_with_offload_is_the_published_estimate(gpus: int) -> None:
    host, published, layer = estimate_zero3_model_states_mem_needs(
        COUNT,
        LAYER,
        gpus,
        1,
        cpu_offload=True,
        cpu_offload_params=False,
        additional_buffer_factor=1.0,
    )
    memory = planned(gpus, stage=3, offload_optimizer="cpu")
    assert memory.states == pytest.approx(published - layer, rel=1e-6)
    # as above: fp32 gradients
    assert gpus * (memory.host + 2 * COUNT // gpus) == pytest.approx(host, rel=1e-6)

    host, published, layer = estimate_zero3_model_states_mem_needs(
        COUNT, LAYER, gpus, 1, additional_buffer_factor=1.0
    )
    memory = planned(gpus, stage=3, offload_optimizer="cpu", offload_param="cpu")
    assert (memory.states, published) == (0, layer)
    assert gpus * (memory.host + 2 * COUNT // gpus) == pytest.approx(host, rel=1e-6)


def small(stage: Literal[1, 2, 3], **options: Any) -> Memory:
    """Of one frozen and three trained parameters on four ranks, in fp32."""
    with torch.device("meta"):
        sizes = (10, 7, 200_000)
        module = nn.ParameterList([nn.Parameter(torch.empty(6), requires_grad=False)])
        module.extend(nn.Parameter(torch.empty(size)) for size in sizes)

    def adamw(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad]
        )

    config = load_config(None, {"precision": "fp32", "nproc": 4, "device": "cpu", "lr": 1e-4})
    strategy = DeepSpeedStrategy(stage=stage, reduce_bucket_size=1000, **options)
    return strategy.plan_memory(config, module, 4, adamw)


FLAT = 200_024
"""Elements of the flat buffer: 10 and 7 padded to 12 and 8, and the sum to a multiple of eight."""


def test_stages_1_and_2_hold_the_model_and_a_partition_of_the_flat_buffer() -> None:
    part, whole = FLAT // 4, 4 * FLAT
    held = {
        "parameters": whole + 4 * 6,
        "gradients": 4 * part,
        "optimizer": 2 * 4 * part + 4,
        "copies": 4 * part,
    }
    first, second = small(1, overlap_comm=False), small(2, overlap_comm=True)
    assert first == Memory(**held, buffers=4 * 1000, sent=whole * 3 // 4 + 2 * whole * 3 // 4)
    assert second == Memory(
        **held, buffers=2 * 4 * 1000, sent=whole * 3 // 4, sent_each=2 * whole * 3 // 4
    )


def test_stage_3_cuts_each_parameter_and_keeps_small_ones_whole_beside() -> None:
    part, gathered = 3 + 2 + 50_000, 4 * 4 * (2 + 3 + 2 + 50_000)
    small_ones, frozen_part = 4 * (6 + 10 + 7), 4 * 2
    held = small(3, stage3_param_persistence_threshold=100)
    assert held == Memory(
        parameters=4 * part + frozen_part + small_ones,
        starting=4 * 200_000,
        gradients=4 * part,
        optimizer=2 * 4 * part + 4,
        copies=4 * part,
        buffers=4 * 1000,
        sent=small_ones * 3 // 4,
        sent_each=(4 * 4 * part + gathered - small_ones) * 3 // 4,
    )
    assert held.host == 0
