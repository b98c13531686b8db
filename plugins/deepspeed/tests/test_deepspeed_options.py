"""Each option keeps the laws: its checkpoints have the right weights by name, and go on
elsewhere and come back.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from distcore import RunConfig, launch
from distcore.plugin.strategy.hooks import Hooks
from distcore.testing import STRATEGIES
from distcore.testing.findings import Finding
from distcore.testing.lab import Job
from distcore.testing.problem import Problem
from distcore.testing.rank import lab_of
from distcore.testing.subject import Subject
from distcore_deepspeed.strategy import DeepSpeedStrategy

TOGETHER: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, "round_robin_gradients": True},
    "secondary partitions": {
        "stage": 3,
        "config": {"zero_optimization": {"zero_hpz_partition_size": 2}},
    },
}
"""Options that the quick tests measure."""
APART: dict[str, dict[str, Any]] = {
    "round robin at stage 2": {"stage": 2, "round_robin_gradients": True},
    "round robin with offload": {
        "stage": 2,
        "round_robin_gradients": True,
        "offload_optimizer": "cpu",
    },
    "aligned parameters": {
        "stage": 2,
        "config": {"zero_optimization": {"parameter_alignment": True}},
    },
    "small buckets at stage 1": {
        "stage": 1,
        "reduce_bucket_size": 500,
        "allgather_bucket_size": 500,
    },
    "small buckets at stage 2": {"stage": 2, "reduce_bucket_size": 500, "overlap_comm": False},
    "overlapped": {"stage": 2, "overlap_comm": True},
    "scaled before": {"stage": 1, "config": {"prescale_gradients": True}},
    "summed whole": {"stage": 2, "config": {"zero_optimization": {"reduce_scatter": False}}},
    "small groups at stage 3": {"stage": 3, "sub_group_size": 300, "reduce_bucket_size": 700},
    "gathered late": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 400,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    },
}
"""Options one by one."""
CASES = ("neutral-names", "clip-after-accumulation", "into-single", "from-single")


@cache
def findings(quick: bool) -> dict[str, dict[str, Finding]]:
    """Measure one of the groups of options in one launch."""
    options = TOGETHER if quick else APART
    subjects = [
        STRATEGIES.subject("deepspeed", 2, {**each}, {"device": "cpu"}, CASES)
        for each in options.values()
    ]
    return {
        label: {finding.case: finding for finding in of_one}
        for label, of_one in zip(options, STRATEGIES.measure_all(subjects), strict=True)
    }


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "label", [*TOGETHER, *(pytest.param(label, marks=pytest.mark.slow) for label in APART)]
)
def test_a_law_holds_with_options(label: str, case: str) -> None:
    finding = findings(label in TOGETHER)[label][case]
    assert finding.held, str(finding)


STATE: dict[str, tuple[dict[str, Any], str, Any]] = {
    "reduce_bucket_size": ({"stage": 1, "reduce_bucket_size": 500}, "reduce_bucket_size", 500),
    "allgather_bucket_size": (
        {"stage": 2, "allgather_bucket_size": 600},
        "allgather_bucket_size",
        600,
    ),
    "overlap_comm": ({"stage": 2, "overlap_comm": True}, "overlap_comm", True),
    "round_robin_gradients": (
        {"stage": 1, "round_robin_gradients": True},
        "round_robin_gradients",
        True,
    ),
    "offload_optimizer": ({"stage": 2, "offload_optimizer": "cpu"}, "cpu_offload", True),
    "offload_param": ({"stage": 3, "offload_param": "cpu"}, "offload_param", True),
    "communication_data_type": (
        {"stage": 2, "communication_data_type": "bf16"},
        "communication_data_type",
        torch.bfloat16,
    ),
    "sub_group_size": ({"stage": 3, "sub_group_size": 300}, "sub_group_size", 300),
    "stage3_prefetch_bucket_size": (
        {"stage": 3, "stage3_prefetch_bucket_size": 70},
        "prefetch_bucket_sz",
        70,
    ),
    "stage3_max_live_parameters": (
        {"stage": 3, "stage3_max_live_parameters": 80},
        "max_n_available_params",
        80,
    ),
    "stage3_max_reuse_distance": (
        {"stage": 3, "stage3_max_reuse_distance": 90},
        "max_reuse_dist_in_numel",
        90,
    ),
    "stage3_param_persistence_threshold": (
        {"stage": 3, "stage3_param_persistence_threshold": 0},
        "persistent",
        0,
    ),
}
"""By option: options, an attribute of DeepSpeed's optimizer or of its parameter
coordinator, and its value.
"""


def states(folder: Path) -> dict[str, list[Any]]:
    """Train a step with each option, and without it; the attribute in DeepSpeed both times."""
    config = RunConfig(strategy="deepspeed", strategy_options={"stage": 2}, nproc=2, device="cpu")
    seen = {}
    with lab_of(Subject(config=config, cases=()), folder) as lab:
        for name, (options, attribute, _) in STATE.items():
            seen[name] = [
                attribute_of(
                    lab.job(Problem(), Hooks("deepspeed", DeepSpeedStrategy(**each))), attribute
                )
                for each in (options, {"stage": options["stage"]})
            ]
    return seen


def attribute_of(job: Job, name: str) -> Any:
    job.train(1)
    optimizer = job.run.strategy_state.optimizer
    if name == "persistent":
        parameters: list[Any] = list(job.run.module.parameters())
        return sum(parameter.ds_persist for parameter in parameters)
    if hasattr(optimizer, name):
        return getattr(optimizer, name)
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    return getattr(coordinator, f"_PartitionedParameterCoordinator__{name}")


@pytest.mark.ranks
def test_each_option_reaches_deepspeed(tmp_path: Path) -> None:
    for seen in launch(states, tmp_path, nproc=2):
        for name, (_, _, value) in STATE.items():
            with_option, without = seen[name]
            assert with_option == value, name
            assert without != value, name
