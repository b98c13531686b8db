"""Memory of FSDP in a plan, declarations, dtypes, and units that are gathered
ahead: all without ranks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy

from distcore import Capabilities, Memory, RunConfig, World
from distcore_fsdp.strategy import FSDPStrategy, _set_prefetch


class Block(nn.Module):
    """Ten rows of four, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(10, 4)), nn.Parameter(torch.empty(4))


class Model(nn.Module):
    """A frozen embedding of seven rows, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(7, 4), requires_grad=False)
        self.first, self.second = Block(), Block()


def planned(ranks: int, wrap: str | int = "Block", **options: Any) -> Memory:
    def adamw(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad]
        )

    with torch.device("meta"):
        model = Model()
    config = RunConfig.model_validate({"precision": "bf16"})
    return FSDPStrategy(wrap=wrap, **options).plan_memory(config, model, ranks, adamw)


BLOCK, EMBEDDING = 4 * 12 + 4, 4 * 8
"""Elements with the padding of four shards: twelve rows and one bias a rank, and eight rows."""
ROWS = 2 * (4 * 3 + 1)
"""Trained elements of a shard."""
STATES = {"parameters": 4 * (ROWS + 8), "gradients": 4 * ROWS, "optimizer": 2 * 4 * ROWS + 4 * 4}


def test_a_rank_holds_its_shards_and_the_gathered_weights_of_the_root_and_one_unit() -> None:
    reduced, gathered = 4 * 4 * ROWS * 3 // 4, 4 * (EMBEDDING + 2 * 2 * BLOCK) * 3 // 4
    assert planned(4) == Memory(
        **STATES, buffers=4 * (EMBEDDING + BLOCK), sent=reduced, sent_each=gathered
    )
    assert planned(4, cpu_offload=True) == Memory(
        parameters=0,
        gradients=0,
        optimizer=0,
        host=sum(STATES.values()),
        buffers=4 * (EMBEDDING + BLOCK),
        sent=reduced,
        sent_each=gathered,
    )


def test_a_model_that_is_one_unit_is_gathered_whole() -> None:
    assert planned(4, wrap=10**6).buffers == 4 * (EMBEDDING + 2 * BLOCK)


def test_weights_that_are_kept_are_gathered_once_a_step() -> None:
    whole, reduced = 4 * (EMBEDDING + 2 * BLOCK), 4 * 4 * ROWS * 3 // 4
    assert planned(4, sharding="grad") == Memory(
        **STATES, buffers=whole, sent=reduced + whole * 3 // 4, sent_each=0
    )


def test_replicas_of_shards_average_what_is_left_of_gradients() -> None:
    memory = planned(8, sharding="hybrid", shard_size=4)
    assert memory.sent == 4 * 4 * ROWS * 3 // 4 + 2 * 4 * ROWS // 2


def test_half_precision_halves_what_is_gathered_and_averaged() -> None:
    memory = planned(4, param_dtype="precision", reduce_dtype="precision")
    assert memory.buffers == 2 * (EMBEDDING + BLOCK)
    assert memory.sent == 2 * 4 * ROWS * 3 // 4


@pytest.mark.parametrize(
    ("sharding", "alone"), [("full", False), ("grad", False), ("hybrid", True), ("none", True)]
)
def test_fsdp_declares_its_capabilities(sharding: Any, alone: bool) -> None:
    assert FSDPStrategy(sharding=sharding).capabilities == Capabilities(
        spec_version=3,
        gradients="sum",
        optimizers=frozenset({"adamw", "adamw8bit", "muon"}),
        other_optimizers="elementwise",
        shards_parameters=True,
        inner_gradients="first",
        lacks=frozenset({"sparse gradients", "complex parameters", "parameters without elements"}),
        phases=True,
        own_steps=True,
        ema=True,
        saves_alone=alone,
        compiles=frozenset({"regions"}),
        forward_cost=3.5,
        exact=frozenset({"fp32", "bf16"}),
        limits=(
            "a rank builds a model whole if its weights can be neither read nor drawn in parts",
            "reduce_dtype=precision rounds gradients",
            "a parameter without dimensions cannot be sharded",
        ),
    )


@pytest.mark.parametrize(
    ("options", "gathered", "reduced"),
    [
        ({}, None, None),
        ({"param_dtype": "precision"}, torch.bfloat16, torch.float32),
        ({"reduce_dtype": "precision"}, None, torch.bfloat16),
        ({"param_dtype": "precision", "reduce_dtype": "precision"}, torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtypes_follow_from_the_precision(
    options: Any, gathered: torch.dtype | None, reduced: torch.dtype | None
) -> None:
    policy = FSDPStrategy(**options)._policy(RunConfig.model_validate({"precision": "bf16"}))
    assert (policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs) == (
        gathered,
        reduced,
        False,
    )


def test_shards_are_offloaded_if_asked_and_pinned_for_accelerators_alone() -> None:
    def policy(kind: str, offload: bool) -> OffloadPolicy:
        world = cast("World", SimpleNamespace(device=SimpleNamespace(type=kind)))
        return FSDPStrategy(cpu_offload=offload)._offload(world)

    assert not isinstance(policy("cpu", offload=False), CPUOffloadPolicy)
    pinned = [
        cast("CPUOffloadPolicy", policy(kind, offload=True)).pin_memory for kind in ("cpu", "cuda")
    ]
    assert pinned == [False, True]


@pytest.mark.parametrize(
    ("sharding", "environ", "ranks"),
    [("full", "2", 4), ("none", "2", 1), ("hybrid", "2", 2), ("hybrid", "", 4)],
)
def test_ranks_of_one_copy(
    sharding: Any, environ: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if environ:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", environ)
    assert FSDPStrategy(sharding=sharding).shard_ranks(4) == ranks
    assert FSDPStrategy(sharding="hybrid", shard_size=1).shard_ranks(4) == 1


class Unit:
    """Notes what it is told to gather ahead."""

    forward: Any = None
    backward: Any = None

    def set_modules_to_forward_prefetch(self, units: list[Any]) -> None:
        self.forward = units

    def set_modules_to_backward_prefetch(self, units: list[Any]) -> None:
        self.backward = units


def test_units_ahead_are_the_next_ones_in_the_order_of_each_pass() -> None:
    a, b, c, d = units = [Unit() for _ in range(4)]
    _set_prefetch(cast("list[FSDPModule]", units), 1, 2)
    assert [unit.forward for unit in units] == [[b], [c], [d], []]
    assert [unit.backward for unit in units] == [[], [a], [b, a], [c, b]]
    untold = Unit()
    _set_prefetch(cast("list[FSDPModule]", [untold]), 0, 0)
    assert untold.forward is untold.backward is None
