"""Options, Accelerate files and Accelerate's launcher give one set of
settings; contradictions are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from distcore import ConfigError, Run, RunConfig, StrategyError, World, load_config
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Problem
from distcore_accelerate.deepspeed_config import user_config
from distcore_accelerate.settings import read_launcher, read_settings
from distcore_accelerate.strategy import AccelerateStrategy
from distcore_accelerate.trackers import AccelerateTrackers
from distcore_deepspeed import resolve as resolve_json

ZERO3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {"stage": 3},
}


def write_config(folder: Path, **changes: Any) -> str:
    """A file of ``accelerate config`` with the keys that it always writes."""
    tree: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_CPU",
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "rdzv_backend": "static",
        "same_network": True,
        "tpu_env": [],
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": True,
    }
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(tree | changes), encoding="utf-8")
    return str(path)


def resolved(options: dict[str, Any], started: int | None = None, **changes: Any) -> RunConfig:
    """The config that ranks get."""
    settings = {"device": "cpu", "lr": 0.01} | changes
    config = load_config(None, {"strategy": "accelerate", "strategy_options": options} | settings)
    return resolve(config, started, task=Problem()).config


def test_a_file_fills_in_what_the_user_left_open(tmp_path: Path) -> None:
    config = resolved(
        {"config_file": write_config(tmp_path, mixed_precision="bf16", num_processes=4)}
    )
    assert (config.precision, config.nproc, config.device) == ("bf16", 4, "cpu")


def test_a_section_for_deepspeed_fills_in_batch_and_clipping(tmp_path: Path) -> None:
    section = {"zero_stage": 2, "gradient_clipping": 0.5, "gradient_accumulation_steps": 4}
    file = write_config(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=section)
    config = resolved({"config_file": file}, global_batch_size=64)
    assert (config.clip.norm, config.micro_batch_size, config.schedule.name) == (0.5, 8, "linear")


def test_a_section_for_deepspeed_becomes_its_json(tmp_path: Path) -> None:
    section = {
        "zero_stage": 3,
        "gradient_clipping": 1.0,
        "offload_param_device": "cpu",
        "zero3_init_flag": True,
    }
    options = AccelerateStrategy(
        config_file=write_config(
            tmp_path, distributed_type="DEEPSPEED", deepspeed_config=section, use_cpu=False
        )
    )
    tree = user_config(options, options.settings).tree
    assert tree["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
    assert tree["gradient_clipping"] == 1.0
    assert options.capabilities.shards_parameters


def test_a_deepspeed_json_is_filled_in_and_brings_its_own_optimizer(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3), encoding="utf-8")
    section = {"deepspeed_config_file": str(tmp_path / "zero3.json"), "zero3_init_flag": True}
    file = write_config(
        tmp_path, distributed_type="DEEPSPEED", deepspeed_config=section, mixed_precision="bf16"
    )
    options = AccelerateStrategy(config_file=file)
    config = resolved({"config_file": file}, global_batch_size=32, micro_batch_size=4, lr=1e-3)
    world = World(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    model = torch.nn.Linear(2, 2)
    run = Run(
        config=config,
        world=world,
        capabilities=options.capabilities,
        module=model,
        model=model,
        total_steps=10,
    )
    tree = resolve_json(user_config(options, options.settings), run, model)
    assert tree["gradient_accumulation_steps"] == 4
    assert tree["bf16"]["enabled"] is True
    assert tree["optimizer"]["params"]["lr"] == 1e-3
    assert tree["optimizer"]["params"]["torch_adam"] is True


def test_the_arguments_of_accelerate_launch_are_read_from_its_environment() -> None:
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }
    assert read_launcher(environ) == {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 1.0},
        "mixed_precision": "bf16",
    }
    settings = read_settings(AccelerateStrategy(), environ)
    assert (settings.backend, settings.precision) == ("deepspeed", "bf16")


def test_sections_that_ask_for_nothing_are_taken(tmp_path: Path) -> None:
    sizes = {
        f"parallelism_config_{name}_size": 1 for name in ("dp_replicate", "dp_shard", "tp", "cp")
    }
    sections: dict[str, Any] = {
        "dynamo_config": {
            "dynamo_backend": "NO",
            "dynamo_mode": "default",
            "dynamo_use_dynamic": False,
        },
        "parallelism_config": sizes | {"parallelism_config_cp_comm_strategy": "allgather"},
        "megatron_lm_config": {},
    }
    assert resolved({"config_file": write_config(tmp_path, **sections)}).nproc == 2
    asks = {"parallelism_config": sizes | {"parallelism_config_tp_size": 2}}
    with pytest.raises(ConfigError, match="parallelism_config is not supported"):
        resolved({"config_file": write_config(tmp_path, **asks)})


def test_a_variable_that_says_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"ACCELERATE_USE_FSDP = '“true”': expected true or false"
    ):
        read_launcher({"ACCELERATE_USE_FSDP": "“true”"})
    assert read_launcher({"ACCELERATE_USE_DEEPSPEED": "on"})["distributed_type"] == "DEEPSPEED"
    assert read_launcher({"ACCELERATE_USE_DEEPSPEED": "False"}) == {}


def test_the_launchers_default_precision_asks_for_nothing() -> None:
    assert (
        read_settings(AccelerateStrategy(), {"ACCELERATE_MIXED_PRECISION": "no"}).precision is None
    )


def test_a_file_for_two_machines_fits_the_ranks_that_a_launcher_starts_on_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    file = write_config(tmp_path, num_machines=2, num_processes=4)
    assert resolved({"config_file": file}, started=4).nproc == 4
    with pytest.raises(ConfigError, match="num_processes = 4, but there are 2"):
        resolved({"config_file": file}, started=2)


def test_two_processes_that_became_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(
        ConfigError, match=r"told to start several processes and started one.*add --nproc N"
    ):
        resolved({})


BAD_FILES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"distributed_type": "FSDP"},
        {},
        r"FSDP': on a CPU Accelerate silently gives DDP.*use --strategy fsdp",
    ),
    (
        {"distributed_type": "MULTI_GPU", "use_cpu": False},
        {},
        r"MULTI_GPU', but the run is on the CPU.*MULTI_CPU",
    ),
    (
        {"distributed_type": "MULTI_XPU"},
        {},
        r"'MULTI_XPU': not supported \(did you mean 'MULTI_[CG]PU'\?\)",
    ),
    ({"distributed_type": "MEGATRON_LM"}, {}, r"'MEGATRON_LM': not supported"),
    (
        {
            "num_machines": 2,
            "num_processes": 4,
            "main_process_ip": "node0",
            "main_process_port": 9901,
        },
        {},
        (
            r"num_machines = 2, but .* one machine; .* --launcher torchrun:node0:9901 --nodes 2"
            r" --nproc 2, or take it out"
        ),
    ),
    ({"num_machines": 0}, {}, r"num_machines = 0: expected a whole number, 1 or more"),
    (
        {"mixed_precision": "bf16"},
        {"precision": "fp32"},
        r"says bf16, but precision = 'fp32'; use --precision bf16",
    ),
    ({"mixed_precision": "fp8"}, {}, r"mixed_precision = 'fp8': not supported"),
    (
        {"num_processes": 2},
        {"nproc": 3, "global_batch_size": 30},
        r"num_processes = 2, but there are 3 rank",
    ),
    (
        {"distributed_type": "NO"},
        {"nproc": 2},
        r"distributed_type = 'NO', but there are 2 rank.*use --nproc 1",
    ),
    ({"num_processes": "two"}, {}, r"num_processes = 'two': expected a whole number"),
    ({"num_processes": 0}, {}, r"num_processes = 0: expected a whole number, 1 or more"),
    ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {}, r"dynamo_config is not supported"),
    ({"fsdp_confg": {}}, {}, r"unknown key 'fsdp_confg' \(did you mean 'fsdp_config'\?\)"),
    ({"compute_environment": "AMAZON_SAGEMAKER"}, {}, r"only LOCAL_MACHINE"),
    (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stag": 2}},
        {},
        r"unknown key 'deepspeed_config.zero_stag' \(did you mean 'zero_stage'\?\)",
    ),
    (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"zero_stage": 2, "deepspeed_config_file": "x.json"},
        },
        {},
        r"deepspeed_config.zero_stage beside a DeepSpeed JSON file",
    ),
    (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"deepspeed_config_file": "missing.json"},
        },
        {},
        r"deepspeed_config_file = 'missing.json': cannot be read: No such file",
    ),
    (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_accumulation_steps": 4}},
        {"global_batch_size": 32, "micro_batch_size": 8},
        (
            r"accumulation_steps = 4 \(.*accelerate.yaml\) but global_batch_size /"
            r" \(micro_batch_size \* ranks\) = 2"
        ),
    ),
    (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_clipping": 0.5}},
        {"clip.norm": 1.0},
        r"gradient_clipping = 0.5 \(.*accelerate.yaml\) but clip.norm = 1.0",
    ),
]


@pytest.mark.parametrize(
    ("changes", "settings", "message"), BAD_FILES, ids=[case[2][:40] for case in BAD_FILES]
)
def test_a_file_that_cannot_be_followed_is_one_line(
    changes: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved({"config_file": write_config(tmp_path, **changes)}, **settings)
    assert "\n" not in str(caught.value)


BAD_OPTIONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"backend": "fsdp2"},
        {"nproc": 2},
        r"backend = 'fsdp2': on a CPU Accelerate silently gives DDP.*--strategy fsdp",
    ),
    (
        {"backend": "deepspeed", "find_unused": True},
        {},
        r"find_unused = True: has no effect on the backend 'deepspeed'",
    ),
    (
        {"zero_stage": 3},
        {},
        r"zero_stage = 3: has no effect on the backend 'ddp'; .*use .*backend=deepspeed",
    ),
    ({"wrap_classes": ["Block"]}, {}, r"wrap_classes = .*: has no effect on the backend 'ddp'"),
    ({"config_file": "none.yaml"}, {}, r"config_file = 'none.yaml': cannot be read: No such file"),
    (
        {"backend": "deepspeed", "zero_stage": 0},
        {"precision": "bf16"},
        r"stage = 0 with precision = 'bf16'",
    ),
    (
        {"backend": "deepspeed", "deepspeed_config": {"optimizer": {"type": "Lion"}}},
        {},
        r"optimizer.type = 'Lion' in DeepSpeed's config: not supported \(AdamW, Adam\)",
    ),
    (
        {"backend": "deepspeed", "deepspeed_config": {"scheduler": {"type": "OneCycle"}}},
        {},
        r"scheduler.type = 'OneCycle' in DeepSpeed's config: not supported",
    ),
    (
        {"backend": "deepspeed", "zero_stage": 2, "deepspeed_config": ZERO3},
        {},
        r"stage = 3 \(strategy_options.deepspeed_config\) but strategy_options.zero_stage = 2",
    ),
]


@pytest.mark.parametrize(
    ("options", "settings", "message"), BAD_OPTIONS, ids=[case[2][:40] for case in BAD_OPTIONS]
)
def test_options_that_cannot_come_true_are_one_line(
    options: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(options, **settings)
    assert "\n" not in str(caught.value)


def test_an_option_of_training_alone_is_no_obstacle_to_evaluation() -> None:
    options = {
        "backend": "deepspeed",
        "zero_stage": 0,
        "deepspeed_config": {"train_batch_size": 64},
    }
    job = {
        "strategy": "accelerate",
        "strategy_options": options,
        "device": "cpu",
        "precision": "bf16",
        "lr": 0.01,
    }
    assert (
        resolve(load_config(None, job), training=False, task=Problem()).config.precision == "bf16"
    )
    with pytest.raises(ConfigError, match=r"stage = 0 with precision = 'bf16'"):
        resolve(load_config(None, job), task=Problem())


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16")])
def test_precision_auto_takes_bf16_only_where_deepspeed_gets_it_right(
    stage: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distcore.resolve.resolve.has_fast_bf16", lambda: True)
    assert (
        resolved({"backend": "deepspeed", "zero_stage": stage}, nproc=2, precision="auto").precision
        == precision
    )


def test_a_file_that_is_no_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text("debug: false\nuse_cpu: [", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"accelerate.yaml, line 2: not valid YAML: "):
        resolved({"config_file": str(file)})


def test_an_option_and_a_file_that_disagree_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"backend = 'deepspeed', but .*distributed_type = 'MULTI_CPU'"
    ):
        resolved({"backend": "deepspeed", "config_file": write_config(tmp_path)})


def test_ranks_of_a_launcher_are_compared_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_processes = 2, but there are 4 rank"):
        resolved({"config_file": write_config(tmp_path)}, started=4)


def test_an_unknown_tracker_names_the_nearest() -> None:
    with pytest.raises(
        StrategyError, match=r"no tracker 'tensorbord' \(did you mean 'tensorboard'\?\)"
    ):
        AccelerateTrackers(log_with="tensorbord")


SEEDS = Path(__file__).parents[4] / "shared/seeds"


@pytest.mark.skipif(
    not SEEDS.is_dir(), reason=f"no {SEEDS}: the files of the documents are beside the repository"
)
@pytest.mark.parametrize("name", sorted(path.name for path in SEEDS.glob("Y*.yaml")))
def test_the_files_of_the_documents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is taken as it is, but one that names a JSON which is not there, and fp16 where
    no device has it.
    """
    monkeypatch.chdir(SEEDS)
    try:
        config = resolved({"config_file": name})
    except ConfigError as error:
        reason = str(error)
        assert "no fp16 on a CPU" in reason or (name == "Y2x.yaml" and "cannot be read" in reason)
    else:
        assert config.nproc == 2
        assert config.precision == ("fp32" if "c." in name else "fp16")
