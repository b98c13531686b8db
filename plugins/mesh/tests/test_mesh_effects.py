"""Each option of ``mesh`` has an effect on the parts of the model or on what is sent; one
without it is refused.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from option_effects import Effect, assert_effects, gathered_in, summed_in
from sentences import LENGTH, Sentences
from torch import nn
from traffic import Traffic

from distcore import ConfigError, RunConfig, StrategyError
from distcore.resolve.resolve import resolve
from distcore.testing.lab import Job
from distcore.testing.problem import VOCABULARY, Problem
from distcore_mesh import context_parallel
from distcore_mesh.document_attention import attend
from distcore_mesh.strategy import MeshStrategy

IN_BF16 = {"precision": "bf16"}


def rows_of_a_layer(job: Job) -> int:
    """Return how many outputs of a split layer this rank has."""
    return len(job.run.module.get_parameter("blocks.0.up.weight"))


def rows_of_the_head(job: Job) -> int:
    return len(job.run.module.get_parameter("head.weight"))


def layout(job: Job) -> tuple[int, ...]:
    """Return the sizes of the groups of ranks over which parameters are replicated and sharded."""
    parameter: Any = next(job.run.module.parameters())
    return tuple(parameter.device_mesh.shape)


def tokens_of_a_block(job: Job) -> int:
    """Return how many tokens of a row this rank has after a block."""
    seen: list[int] = []
    block = job.run.module.get_submodule("model.layers.0.mlp")
    block.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape[1]))
    job.train(1)
    return seen[0]


def exchanged(job: Job) -> tuple[bool, bool]:
    """Return if ranks exchange tokens for heads, and if attention is by documents."""
    with (
        Traffic() as traffic,
        patch.object(context_parallel, "attend", wraps=attend) as by_document,
    ):
        job.train(1)
    names = {name for name, *_ in traffic.sent}
    return any("alltoall" in name for name in names), by_document.called


def experts(job: Job) -> int:
    """Return how many experts a forward pass of this rank computes with."""
    module: Any = job.run.module.get_submodule("blocks.0.experts")
    return int(module.num_experts)


def gathers_logits(job: Job) -> bool:
    """Return True if the parts of the logits are joined, of at least three rows."""
    part = 3 * LENGTH * VOCABULARY // 2
    with Traffic() as traffic:
        job.train(1)
    return any(name == "allgather_" and elements >= part for name, _, elements in traffic.sent)


def blocks(job: Job) -> set[int]:
    """Return the numbers of the blocks that this rank holds."""
    return {
        int(name.split(".")[1])
        for name, _ in job.run.module.named_parameters()
        if name.startswith("blocks.")
    }


def messages(job: Job) -> str:
    """Return the order in which the first rank sends (s) and receives (r) hidden states and
    gradients in a step.
    """
    with Traffic() as traffic:
        job.train(1)
    return "".join(name[0] for name, *_ in traffic.sent if name in ("send", "recv_"))


def computed(job: Job) -> int:
    """Return how often a layer of the last block computes in a step of one micro-batch."""
    ran: list[int] = []
    job.run.module.get_submodule("blocks.1.up").register_forward_hook(lambda *_: ran.append(1))
    job.train(1)
    return len(ran)


def effects(folder: Path) -> dict[str, Effect]:
    """Return one for each option: a new option comes with its effect. ``folder`` gets a plan."""
    plan = folder / "plan.yaml"
    plan.write_text("blocks.*.up: colwise\nblocks.*.down: rowwise\n", encoding="utf-8")
    pipeline, four = {"pp": 2}, {"micro_batch_size": 3}
    return {
        "tp": Effect(
            measured=rows_of_a_layer,
            default=32,
            without={"replicate": 2},
            changed=(({"tp": 2}, 16),),
        ),
        "plan": Effect(
            measured=rows_of_the_head,
            without={"tp": 2},
            default=2,
            changed=(({"tp": 2, "plan": str(plan)}, 4),),
        ),
        "sequence_parallel": Effect(
            measured=tokens_of_a_block,
            problem=Sentences(),
            without={"tp": 2},
            default=LENGTH,
            changed=(({"tp": 2, "sequence_parallel": True}, LENGTH // 2),),
        ),
        "loss_parallel": Effect(
            measured=gathers_logits,
            problem=Sentences(),
            without={"tp": 2},
            default=True,
            changed=(({"tp": 2, "loss_parallel": True}, False),),
        ),
        "cp": Effect(
            measured=tokens_of_a_block,
            problem=Sentences(),
            default=LENGTH,
            changed=(({"cp": 2}, LENGTH // 2),),
        ),
        "cp_exchange": Effect(
            measured=exchanged,
            problem=Sentences(),
            without={"cp": 2},
            default=(True, False),
            changed=(
                ({"cp": 2, "cp_exchange": "heads"}, (True, False)),
                ({"cp": 2, "cp_exchange": "blocks"}, (True, True)),
                ({"cp": 2, "cp_exchange": "keys"}, (False, True)),
            ),
        ),
        "ep": Effect(
            measured=experts,
            problem=Problem(experts=4),
            default=4,
            changed=(({"ep": 2}, 2),),
        ),
        "replicate": Effect(measured=layout, default=(2,), changed=(({"replicate": 2}, (2, 1)),)),
        "shard": Effect(
            measured=layout,
            without={"replicate": 2},
            default=(2, 1),
            changed=(({"shard": 2}, (2,)),),
        ),
        "pp": Effect(measured=blocks, default={0, 1}, changed=((pipeline, {0}),)),
        "pp_schedule": Effect(
            measured=messages,
            changes=four,
            without=pipeline,
            default="ssrsrsrr",
            changed=(
                (pipeline | {"pp_schedule": "gpipe"}, "ssssrrrr"),
                (pipeline | {"pp_schedule": "interleaved"}, "ssrsrssrssrsrsrrsrrsrsrr"),
            ),
        ),
        "pp_chunks": Effect(
            measured=blocks,
            without=pipeline | {"pp_schedule": "interleaved"},
            default={0, 2},
            changed=((pipeline | {"pp_schedule": "interleaved", "pp_chunks": 3}, {0, 2, 4}),),
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
        "activation_checkpointing": Effect(
            measured=computed,
            changes={"micro_batch_size": 6},
            default=1,
            changed=(
                ({"activation_checkpointing": True}, 2),
                ({"activation_checkpointing": 2}, 2),
                ({"activation_checkpointing": "products"}, 2),
            ),
        ),
    }


def test_each_option_has_an_effect_in_the_table(tmp_path: Path) -> None:
    assert effects(tmp_path).keys() == {field.name for field in fields(MeshStrategy)}


@pytest.mark.ranks
def test_each_option_has_its_effect(tmp_path: Path) -> None:
    assert_effects("mesh", effects(tmp_path), tmp_path)


IDLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"precision": "fp32"},
        {"param_dtype": "precision"},
        r"param_dtype = 'precision': has no effect with precision",
    ),
    (
        {"precision": "fp32"},
        {"reduce_dtype": "precision"},
        r"reduce_dtype = 'precision': has no effect with precision",
    ),
    (
        IN_BF16,
        {"tp": 2, "param_dtype": "precision"},
        r"param_dtype = 'precision': has no effect on 2 ranks: nothing is",
    ),
    (
        IN_BF16,
        {"pp": 2, "param_dtype": "precision"},
        r"param_dtype = 'precision': has no effect on 2 ranks: nothing is",
    ),
    (
        IN_BF16,
        {"tp": 2, "reduce_dtype": "precision"},
        r"reduce_dtype = 'precision': has no effect on 2 ranks",
    ),
]


@pytest.mark.parametrize(
    ("changes", "options", "message"), IDLE, ids=[str(options) for _, options, _ in IDLE]
)
def test_an_option_without_effect_is_one_line_and_none_to_an_evaluation(
    changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    job: dict[str, Any] = {
        "strategy": "mesh",
        "nproc": 2,
        "device": "cpu",
        "lr": 0.1,
        "out": "never-made",
    } | changes
    config = RunConfig(strategy_options=options, **job)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(config, task=Problem())
    assert "\n" not in str(caught.value)
    assert resolve(config, task=Problem(), training=False).config.strategy_options == options


def test_a_dtype_of_shards_is_taken_where_other_ranks_shard() -> None:
    four = RunConfig(nproc=4, precision="bf16", device="cpu")
    MeshStrategy(tp=2, param_dtype="precision", reduce_dtype="precision").check_config(four)


def test_a_model_in_which_nothing_repeats_has_nothing_to_recompute() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(
        StrategyError,
        match=r"= true: has no effect on Sequential, in which nothing repeats; leave it",
    ):
        MeshStrategy(activation_checkpointing=True).check_model(RunConfig(), model)
