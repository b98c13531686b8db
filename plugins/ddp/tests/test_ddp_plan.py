"""Memory of DDP in a plan, what an evaluation runs, and buckets of
gradients on tensors without ranks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from torch import nn

from distcore import Capabilities, Memory, Run, RunConfig
from distcore_ddp import TracedBuckets
from distcore_ddp.data_parallel import DataParallelStrategy
from distcore_ddp.strategy import BROADCAST, DDPStrategy


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad]
    )


def on_meta(*sizes: int) -> nn.Module:
    """Parameters of so many elements; the first is frozen."""
    module = nn.ParameterList([nn.Parameter(torch.empty(size, device="meta")) for size in sizes])
    module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize(("compression", "element"), [("none", 4), ("fp16", 2)])
def test_memory_is_that_of_the_whole_model(
    compression: Literal["none", "fp16"], element: int
) -> None:
    memory = DDPStrategy(compression=compression).plan_memory(
        RunConfig(), on_meta(100, 20, 10), 4, adamw
    )
    states = {"parameters": 4 * 130, "gradients": 4 * 30, "optimizer": 2 * 4 * 30 + 2 * 4}
    assert memory == Memory(**states, sent=2 * element * 30 * 3 // 4, starting=4 * 130)
    assert DataParallelStrategy().plan_memory(
        RunConfig(), on_meta(100, 20, 10), 1, adamw
    ) == Memory(**states)


def test_rank_0_sends_no_more_than_a_part_of_the_weights_at_once() -> None:
    memory = DDPStrategy().plan_memory(RunConfig(), on_meta(1, BROADCAST), 2, adamw)
    assert memory.starting == BROADCAST == 250 * 2**20


def run_on_cpu(**fields: Any) -> Run:
    world = SimpleNamespace(device=torch.device("cpu"), size=2)
    return cast("Run", SimpleNamespace(world=world, **fields))


@pytest.mark.parametrize("strategy", [DDPStrategy(), DataParallelStrategy(), TracedBuckets(1)])
def test_an_evaluation_on_a_cpu_runs_the_model_itself(strategy: Any) -> None:
    model = nn.Linear(2, 2)
    prepared = strategy.wrap_model(run_on_cpu(), model, None)
    assert prepared.model is model
    assert prepared.optimizer is None


@pytest.mark.parametrize("strategy", [DataParallelStrategy(), TracedBuckets(1)])
def test_one_process_trains_the_model_itself(strategy: Any) -> None:
    model = nn.Linear(2, 2)
    prepared = strategy.wrap_model(run_on_cpu(), model, adamw)
    assert prepared.model is model
    assert prepared.optimizer.param_groups[0]["params"] == [model.weight, model.bias]


def test_traced_buckets_are_filled_from_the_last_parameter_on_by_size_and_dtype() -> None:
    mib = 2**18  # elements in fp32
    sizes = [
        (1, torch.float32),
        (mib, torch.float32),
        (1, torch.bfloat16),
        (mib - 1, torch.float32),
        (1, torch.float32),
    ]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    model = nn.ParameterList([*parameters, nn.Parameter(torch.zeros(5), requires_grad=False)])
    traced = DDPStrategy(bucket_mb=1).traced()
    assert isinstance(traced, TracedBuckets)
    assert traced.capabilities == Capabilities(spec_version=3)
    traced.wrap_model(run_on_cpu(), model, None)

    def backward() -> None:
        torch.stack([parameter.sum().float() for parameter in parameters]).sum().backward()

    with traced.accumulate(run_on_cpu(), last=False):
        backward()
    assert (
        len(
            {
                parameter.grad.untyped_storage().data_ptr()
                for parameter in parameters
                if parameter.grad is not None
            }
        )
        == 5
    )
    with traced.accumulate(run_on_cpu(), last=True):
        backward()
    held = [cast("torch.Tensor", parameter.grad).untyped_storage() for parameter in parameters]
    # The last two fill a bucket exactly; another dtype begins one, and so does the one after it.
    assert [storage.nbytes() for storage in held] == [4, 4 * mib, 2, 4 * mib, 4 * mib]
    assert held[3].data_ptr() == held[4].data_ptr()
    assert all(torch.equal(cast("torch.Tensor", p.grad), torch.full_like(p, 2)) for p in parameters)


def test_copies_of_buckets_are_on_the_wire_until_the_last_gradient() -> None:
    """Two buckets: the first gradients fill one, whose copy in 16 bits stays until the
    second one is sent.
    """
    sizes = (2**17, 2**18)
    first, last = (nn.Parameter(torch.zeros(size)) for size in sizes)
    traced = DDPStrategy(bucket_mb=1, compression="bf16").traced()
    assert isinstance(traced, TracedBuckets)
    traced.wrap_model(run_on_cpu(), nn.ParameterList([first, last]), None)
    held: list[list[int]] = []
    for parameter in (first, last):
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append([copy.nbytes for copy in traced.on_the_wire])
        )
    for _ in range(2):
        last.sum().backward()  # the last parameter's bucket comes first
        first.sum().backward()
        assert traced.on_the_wire == []
    assert held == [[2 * sizes[1]], []] * 2
