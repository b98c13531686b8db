"""Each option of ``fsdp`` has an effect on FSDP2 itself or on what it sends; an option
without one is refused.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from option_effects import GATHER, Effect, assert_effects, gathered_in, summed_in
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from traffic import Traffic

from distcore import ConfigError, RunConfig, StrategyError
from distcore.resolve.resolve import resolve
from distcore.testing.lab import Job
from distcore.testing.problem import ModelShape, Problem, meta_model
from distcore_fsdp.strategy import FSDPStrategy

MATRICES = frozenset({"mm", "addmm"})


def gathers(job: Job) -> int:
    """Return how often parameters are gathered in a step of three micro-batches."""
    with Traffic() as traffic:
        job.train(1)
    return int(traffic.count(GATHER))


def layout(job: Job) -> tuple[int, ...]:
    """Return the replicas and the shards of a parameter."""
    parameter: Any = next(job.run.module.parameters())
    return tuple(parameter.device_mesh.shape)


def units(job: Job) -> set[str]:
    return {
        name for name, module in job.run.module.named_modules() if isinstance(module, FSDPModule)
    }


def is_offloaded(job: Job) -> bool:
    root: Any = job.run.module
    return any(
        parameter.offload_to_cpu
        for parameter in root._get_fsdp_state()._fsdp_param_group.fsdp_params
    )


class Computed(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


def recomputed(job: Job) -> tuple[int, int]:
    """Return how many activation functions and how many products a step of one micro-batch
    computes in both passes.
    """
    with Computed() as computed:
        job.train(1)
    return computed.count["gelu"], sum(computed.count[name] for name in MATRICES)


def ahead(job: Job) -> list[tuple[int, int]]:
    """Return how many units each unit gathers ahead in forward and in backward, as FSDP2 has it."""
    states = [
        module._get_fsdp_state()
        for module in job.run.module.modules()
        if isinstance(module, FSDPModule)
    ]
    return [
        (len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch))
        for state in states
    ]


BLOCKS = {"blocks.0", "blocks.1"}
IN_BF16 = {"precision": "bf16"}
THREE = {"micro_batch_size": 2}
EFFECTS = {
    # Three units are gathered for each of three micro-batches, in backward again but for the root.
    "sharding": Effect(
        measured=gathers,
        changes=THREE,
        default=15,
        changed=(
            ({"sharding": "grad"}, 3),
            ({"sharding": "none"}, 0),
            ({"sharding": "hybrid", "shard_size": 2}, 15),
        ),
    ),
    "shard_size": Effect(
        measured=layout,
        without={"sharding": "hybrid"},
        default=(1, 2),
        changed=(({"sharding": "hybrid", "shard_size": 1}, (2, 1)),),
    ),
    "wrap": Effect(
        measured=units,
        default={"", *BLOCKS},
        changed=(
            ({"wrap": "embedding"}, {"", "embedding"}),
            ({"wrap": ["Embedding", "blocks.*"]}, {"", "embedding", *BLOCKS}),
            ({"wrap": 1_000_000}, {""}),
        ),
    ),
    "param_dtype": Effect(
        measured=gathered_in,
        changes=IN_BF16,
        default={torch.float32},
        changed=(({"param_dtype": "precision"}, {torch.bfloat16}),),
    ),
    "reduce_dtype": Effect(
        measured=summed_in,
        changes=IN_BF16,
        default={torch.float32},
        changed=(({"reduce_dtype": "precision"}, {torch.bfloat16}),),
    ),
    "cpu_offload": Effect(
        measured=is_offloaded, default=False, changed=(({"cpu_offload": True}, True),)
    ),
    "activation_checkpointing": Effect(
        measured=recomputed,
        changes={"micro_batch_size": 6},
        default=(2, 17),
        changed=(
            ({"activation_checkpointing": True}, (4, 19)),
            ({"activation_checkpointing": 2}, (3, 18)),
            ({"activation_checkpointing": "products"}, (4, 17)),
        ),
    ),
    "forward_prefetch": Effect(
        measured=ahead,
        default=[(0, 0)] * 3,
        changed=(({"forward_prefetch": 1}, [(0, 0), (1, 0), (0, 0)]),),
    ),
    "backward_prefetch": Effect(
        measured=ahead,
        default=[(0, 0)] * 3,
        changed=(({"backward_prefetch": 1}, [(0, 0), (0, 0), (0, 1)]),),
    ),
}
"""One for each option: a new option comes with its effect."""


def test_each_option_has_an_effect_in_the_table() -> None:
    assert EFFECTS.keys() == {field.name for field in fields(FSDPStrategy)}


@pytest.mark.ranks
def test_each_option_has_its_effect(tmp_path: Path) -> None:
    assert_effects("fsdp", EFFECTS, tmp_path)


def resolved(changes: dict[str, Any], options: dict[str, Any], training: bool = True) -> RunConfig:
    job: dict[str, Any] = {
        "strategy": "fsdp",
        "nproc": 2,
        "device": "cpu",
        "lr": 0.1,
        "out": "never-made",
    }
    config = RunConfig(strategy_options=options, **job | changes)
    return resolve(config, task=Problem(), training=training).config


IDLE: list[tuple[dict[str, Any], str]] = [
    (
        {"param_dtype": "precision"},
        r"param_dtype = 'precision': has no effect with precision = 'fp32'; use .*bf16",
    ),
    (
        {"reduce_dtype": "precision"},
        r"reduce_dtype = 'precision': has no effect with precision = 'fp32'",
    ),
    ({"cpu_offload": True}, r"cpu_offload = true: has no effect on a CPU"),
    (
        {"sharding": "none", "forward_prefetch": 1},
        r"forward_prefetch = 1: has no effect with sharding = 'none'",
    ),
    (
        {"sharding": "hybrid", "shard_size": 1, "backward_prefetch": 2},
        r"backward_prefetch = 2: .* each rank has all",
    ),
    (
        {"sharding": "grad", "backward_prefetch": 1},
        r"backward_prefetch = 1: .* kept until the end of backward",
    ),
]


@pytest.mark.parametrize(("options", "message"), IDLE, ids=[message[:30] for _, message in IDLE])
def test_an_option_without_effect_is_one_line_and_none_to_an_evaluation(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved({"precision": "fp32"}, options)
    assert "\n" not in str(caught.value)
    assert resolved({"precision": "fp32"}, options, training=False).strategy_options == options


def test_a_base_in_16_bits_is_gathered_in_fp32_if_that_is_the_precision() -> None:
    changes = {"precision": "fp32", "lora": {"rank": 2}}
    assert resolved(changes, {"param_dtype": "precision"}).strategy_options == {
        "param_dtype": "precision"
    }


def test_an_option_of_gathering_is_accepted_on_one_rank() -> None:
    assert resolved({"nproc": 1}, {"sharding": "grad", "backward_prefetch": 1}).nproc == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"wrap": 10**6, "activation_checkpointing": True},
            r"= true: has no effect on Classifier, in which nothing rep",
        ),
        (
            {"wrap": "embedding", "forward_prefetch": 1},
            r"forward_prefetch = 1: .*Classifier, which has fewer than two",
        ),
        ({"wrap": "Nowhere"}, r"wrap = 'Nowhere': no module of the model has that class"),
    ],
)
def test_a_model_in_which_an_option_finds_nothing_is_refused_before_ranks_start(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        FSDPStrategy(**options).check_model(RunConfig(), meta_model(ModelShape(2)))
    FSDPStrategy(activation_checkpointing=2, forward_prefetch=1).check_model(
        RunConfig(), meta_model(ModelShape(2))
    )
