"""Each option of ``accelerate`` has an effect on its backends; an option or a key of a file
without one is refused.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from option_effects import Effect, Wide, assert_effects, trains
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from traffic import Traffic

from distcore import ConfigError, RunConfig, StrategyError, World
from distcore.resolve.resolve import resolve
from distcore.testing.lab import Job
from distcore.testing.problem import Problem
from distcore_accelerate import accelerator, strategy
from distcore_accelerate.checks import check_settings
from distcore_accelerate.deepspeed_config import user_config
from distcore_accelerate.fsdp2 import plugin_arguments
from distcore_accelerate.settings import Settings, read_settings
from distcore_accelerate.strategy import AccelerateStrategy

ON_FSDP2 = ("reshard_after_forward", "wrap_classes")
"""Options of the backend that needs GPUs: it is told that it has some."""


def engine(job: Job) -> str:
    return type(job.run.model).__name__


def stage(job: Job) -> int:
    model: Any = job.run.model
    return int(model.zero_optimization_stage())


def buckets(job: Job) -> int:
    job.train(2)
    return int(job.run.strategy_state._get_ddp_logging_data()["num_buckets_reduced"])


def gathers_again(job: Job) -> bool:
    """Return True if a step gathers more often than there are units."""
    with Traffic() as traffic:
        job.train(1)
    return bool(traffic.count("_allgather_base_") > len(units(job)))


def units(job: Job) -> set[str]:
    return {
        name for name, module in job.run.module.named_modules() if isinstance(module, FSDPModule)
    }


def effects(folder: Path) -> dict[str, Effect]:
    """Return one for each option: a new option comes with its effect. ``folder``
    gets an Accelerate file.
    """
    file = folder / "accelerate.yaml"
    file.write_text(
        yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}})
    )
    zero, sharded = {"backend": "deepspeed"}, {"backend": "fsdp2", "wrap_classes": ["Block"]}
    json = {"zero_optimization": {"stage": 1}}
    return {
        "backend": Effect(
            measured=engine, default="DistributedDataParallel", changed=((zero, "DeepSpeedEngine"),)
        ),
        "config_file": Effect(
            measured=stage, without=zero, default=2, changed=(({"config_file": str(file)}, 1),)
        ),
        "zero_stage": Effect(
            measured=stage, without=zero, default=2, changed=((zero | {"zero_stage": 3}, 3),)
        ),
        "deepspeed_config": Effect(
            measured=stage,
            without=zero,
            default=2,
            changed=((zero | {"deepspeed_config": json}, 1),),
        ),
        "find_unused": Effect(
            measured=trains,
            problem=Problem(unused=True),
            default=False,
            changed=(({"find_unused": True}, True),),
        ),
        "bucket_mb": Effect(
            measured=buckets, problem=Wide(), default=2, changed=(({"bucket_mb": 1}, 4),)
        ),
        "reshard_after_forward": Effect(
            measured=gathers_again,
            without=sharded,
            default=True,
            changes={"micro_batch_size": 6},
            changed=((sharded | {"reshard_after_forward": False}, False),),
        ),
        "wrap_classes": Effect(
            measured=units,
            without=sharded,
            default={"", "blocks.0", "blocks.1"},
            changed=(
                (sharded | {"wrap_classes": ["LayerNorm"]}, {"", "blocks.0.norm", "blocks.1.norm"}),
            ),
        ),
    }


def test_each_option_has_an_effect_in_the_table(tmp_path: Path) -> None:
    with_a_test_below = {"cpu_offload"}
    assert effects(tmp_path).keys() | with_a_test_below == {
        field.name for field in fields(AccelerateStrategy)
    }


@pytest.mark.ranks
def test_each_option_of_ddp_and_deepspeed_has_its_effect(tmp_path: Path) -> None:
    assert_effects(
        "accelerate",
        {name: it for name, it in effects(tmp_path).items() if name not in ON_FSDP2},
        tmp_path,
    )


def on_supposed_gpus(settings: Settings, world: World, arguments: dict[str, Any]) -> Accelerator:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    return accelerator.new_accelerator(settings, world, {"cpu": False} | arguments)


@pytest.mark.ranks
def test_each_option_of_fsdp2_has_its_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "new_accelerator", on_supposed_gpus)
    monkeypatch.setattr(
        PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU)
    )
    assert_effects(
        "accelerate",
        {name: it for name, it in effects(tmp_path).items() if name in ON_FSDP2},
        tmp_path,
    )


def test_offload_is_a_policy_of_accelerate() -> None:
    """Without ranks, because memory is pinned for an accelerator."""
    arguments = [
        of_fsdp2_with(AccelerateStrategy(cpu_offload=offload)) for offload in (False, True)
    ]
    plugins = [FullyShardedDataParallelPlugin(fsdp_version=2, **each) for each in arguments]
    assert [isinstance(plugin.cpu_offload, CPUOffloadPolicy) for plugin in plugins] == [False, True]


@pytest.mark.parametrize("option", ["split_batches", "dispatch_batches"])
def test_a_setting_of_accelerates_data_loader_is_no_option(option: str) -> None:
    job: dict[str, Any] = {
        "strategy": "accelerate",
        "device": "cpu",
        "lr": 0.1,
        "out": "never-made",
    }
    with pytest.raises(StrategyError, match=f"unknown option '{option}'"):
        resolve(RunConfig(strategy_options={option: True}, **job), task=Problem())


def of_fsdp2(**section: Any) -> dict[str, Any]:
    """Return the arguments of Accelerate's plugin for a section of a file."""
    return of_fsdp2_with(AccelerateStrategy(), **section)


def of_fsdp2_with(options: AccelerateStrategy, **section: Any) -> dict[str, Any]:
    """Return the same, with options beside the file."""
    settings = Settings(
        backend="fsdp2", source="f.yaml", distributed_type="FSDP", fsdp={"version": 2, **section}
    )
    return plugin_arguments(options, settings)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"sharding_strategy": "SHARD_GRAD_OP"},
            r"sharding_strategy = .*: has no effect here: use fsdp_reshard_after",
        ),
        (
            {"backward_prefetch": "NO_PREFETCH"},
            r"fsdp_backward_prefetch = 'NO_PREFETCH': has no effect here",
        ),
        (
            {"forward_prefetch": True},
            r"forward_prefetch = True: .* for FSDP1 only; use --strategy fsdp; take it out",
        ),
        (
            {"ignored_modules": "head"},
            r"ignored_modules = 'head': .* gradients would be summed over no ranks",
        ),
        (
            {"activation_checkpointing_offload": True},
            r"_offload = True: .* use --set extensions.activation_offload=true",
        ),
        (
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "transformer_layer_cls_to_wrap": "Block"},
            (
                r"fsdp_auto_wrap_policy = 'SIZE_BASED_WRAP' ignores transformer_cls_names_to_wrap ="
                r" \['Block'\]; it is for"
            ),
        ),
        (
            {"auto_wrap_policy": "NO_WRAP", "min_num_params": 100},
            (
                r"fsdp_auto_wrap_policy = 'NO_WRAP' ignores min_num_params = 100; it is for"
                r" SIZE_BASED_WRAP"
            ),
        ),
    ],
)
def test_a_key_of_fsdp_that_accelerate_would_ignore_is_refused(
    section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        of_fsdp2(**section)
    assert "\n" not in str(caught.value)


def test_keys_of_fsdp1_that_ask_for_what_fsdp2_does_are_taken() -> None:
    old = {
        "sharding_strategy": "FULL_SHARD",
        "backward_prefetch": "BACKWARD_PRE",
        "forward_prefetch": False,
    }
    assert of_fsdp2(use_orig_params=True, sync_module_states=True, **old) == of_fsdp2()


def test_an_option_that_the_file_contradicts_is_refused() -> None:
    section = {"version": 2, "offload_params": False, "transformer_layer_cls_to_wrap": "Block"}
    settings = Settings(backend="fsdp2", source="f.yaml", distributed_type="FSDP", fsdp=section)
    with pytest.raises(
        ConfigError, match=r"cpu_offload = True, but f.yaml: fsdp_config says False; leave one of"
    ):
        plugin_arguments(AccelerateStrategy(cpu_offload=True), settings)
    with pytest.raises(
        ConfigError, match=r"wrap_classes = \['Layer'\], but f.yaml: fsdp_config says \['Block'\]"
    ):
        plugin_arguments(AccelerateStrategy(wrap_classes=("Layer",)), settings)
    assert plugin_arguments(AccelerateStrategy(wrap_classes=("Block",)), settings)


BY_LAUNCHER = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
}
"""The variables that ``accelerate launch --use_fsdp`` sets, with the layers to wrap."""


def test_layers_that_accelerate_launch_was_told_are_units() -> None:
    arguments = plugin_arguments(
        AccelerateStrategy(), read_settings(AccelerateStrategy(), BY_LAUNCHER)
    )
    assert arguments["transformer_cls_names_to_wrap"] == ["Block"]
    assert arguments["reshard_after_forward"] is False
    assert "min_num_params" not in arguments


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "ACCELERATE_DYNAMO_BACKEND",
            "INDUCTOR",
            r"dynamo_backend is not supported: use --compile on",
        ),
        ("ACCELERATE_USE_MEGATRON_LM", "true", r"megatron_lm_config is not supported"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", r"parallelism_config is not supported"),
        ("ACCELERATE_CPU_AFFINITY", "1", r"enable_cpu_affinity is not supported: use --bind-cores"),
    ],
)
def test_an_argument_of_accelerate_launch_without_effect_is_refused(
    variable: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"accelerate launch: {message}"):
        read_settings(AccelerateStrategy(), {variable: value})
    assert read_settings(AccelerateStrategy(), {"ACCELERATE_DYNAMO_BACKEND": "NO"}).backend == "ddp"


@pytest.mark.parametrize(
    ("key", "value", "flag"),
    [
        ("num_cpu_threads_per_process", 4, "--env OMP_NUM_THREADS=N"),
        ("mpirun_config", {"mpirun_hostfile": "hosts"}, "--launcher mpi"),
    ],
)
def test_a_key_that_only_accelerate_launch_obeys_is_refused_under_another_launcher(
    key: str, value: Any, flag: str, tmp_path: Path
) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(
        yaml.safe_dump({"distributed_type": "MULTI_CPU", "num_processes": 2, key: value})
    )
    settings, config = (
        read_settings(AccelerateStrategy(config_file=str(file)), {}),
        RunConfig(nproc=2, device="cpu"),
    )
    with pytest.raises(
        ConfigError, match=rf"{key} is for accelerate launch; here use {flag}, or take it out"
    ):
        check_settings(settings, config, {})
    check_settings(settings, config, {"RANK": "0"})


def test_layers_that_deepspeed_must_gather_as_one_are_refused() -> None:
    section = {"zero_stage": 3, "deepspeed_moe_layer_cls_names": "Experts"}
    settings = Settings(backend="deepspeed", source="f.yaml", deepspeed=section)
    with pytest.raises(
        ConfigError,
        match=r"deepspeed_moe_layer_cls_names = 'Experts': has no effect here; take it out",
    ):
        user_config(AccelerateStrategy(), settings)
