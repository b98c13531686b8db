"""Files of TrainingArguments, Accelerate and DeepSpeed: every key of the installed
versions has its row.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from migrate_cases import CIFAR, FSDP_YAML, ZERO_3, ZERO_YAML

from distcore.config import flatten
from distcore.errors import ConfigError
from distcore_migrate import accelerate_config, fsdp_config, migrate, training_arguments


def flat(made: Any) -> dict[str, Any]:
    tree: dict[str, Any] = made.config.model_dump(mode="json")
    return tree | flatten(tree)


def write(folder: Path, name: str, content: Any) -> str:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / name)


def names(tree: dict[str, Any]) -> set[str]:
    """Every key of a tree, whatever it is below."""
    inner = (names(value) for value in tree.values() if isinstance(value, dict))
    return set(tree).union(*inner)


def test_the_json_of_the_trainer_becomes_a_config_that_names_every_key(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir="runs/here",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-5,
        weight_decay=0.1,
        warmup_steps=0.1,
        num_train_epochs=2,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=100,
        save_total_limit=3,
        adam_beta2=0.98,
        max_grad_norm=0.5,
        seed=7,
        gradient_checkpointing=True,
        use_cpu=True,
        neftune_noise_alpha=3,
        lr_scheduler_type="cosine",
        report_to=["tensorboard"],
        dataloader_num_workers=2,
        ddp_find_unused_parameters=True,
    )
    text = arguments.to_json_string()
    made = migrate([write(tmp_path, "args.json", text)], [], nproc=2)
    expected = {
        "out": "runs/here",
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "lr": 3e-5,
        "optimizer.weight_decay": 0.1,
        "schedule.warmup_ratio": 0.1,
        "schedule.name": "cosine",
        "epochs": 2,
        "eval_every": 50,
        "save_every": 100,
        "checkpoints.keep_last": 3,
        "optimizer.betas": [0.9, 0.98],
        "clip.norm": 0.5,
        "seed": 7,
        "device": "cpu",
        "gradient_checkpointing": True,
        "extensions.tensorboard": True,
        "loader.workers": 2,
        "strategy": "ddp",
        "strategy_options.find_unused": True,
        "timeout": 1800,
        "log_every": 500,
    }
    assert {key: flat(made).get(key) for key in expected} == expected
    assert made.no_equal == ("neftune_noise_alpha = 3",)
    assert not [key for key in json.loads(text) if key not in made.text]


def test_every_argument_of_the_installed_trainer_has_a_row() -> None:
    from transformers import Seq2SeqTrainingArguments

    assert {field.name for field in fields(Seq2SeqTrainingArguments) if field.init} <= set(
        training_arguments.ROWS
    )


def test_every_flag_of_the_installed_accelerate_has_a_row() -> None:
    from accelerate.commands.launch import launch_command_parser

    flags = {action.dest for action in launch_command_parser()._actions if action.option_strings}
    rows = (
        set(accelerate_config.ROWS) | set(accelerate_config.SECTION_ROWS) | {"config_file", "help"}
    )
    left = {
        flag
        for flag in flags - rows
        if not flag.startswith(("megatron_lm_", "parallelism_config_", "fp8_"))
    }
    assert not {flag for flag in left if flag.removeprefix("fsdp_") not in fsdp_config.ROWS}


def test_zero_3_goes_with_the_trainers_arguments(tmp_path: Path) -> None:
    arguments = {
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "learning_rate": 2e-5,
        "bf16": True,
        "warmup_steps": 10,
        "weight_decay": 0.1,
        "deepspeed": write(tmp_path, "ds.json", ZERO_3),
    }
    made = migrate([write(tmp_path, "args.json", arguments)], [], nproc=4)
    expected = {
        "strategy": "deepspeed",
        "strategy_options.stage": 3,
        "strategy_options.offload_param": "cpu",
        "strategy_options.sub_group_size": 10**9,
        "strategy_options.reduce_bucket_size": "auto",
        "precision": "bf16",
        "strategy_options.scheduler": "WarmupLR",
        "schedule.warmup_steps": 10,
        "global_batch_size": 8,
        "nproc": 4,
        "optimizer.weight_decay": 0.1,
        "lr": 2e-5,
        "strategy_options.config.zero_optimization.offload_param.pin_memory": True,
        "strategy_options.config.zero_optimization.contiguous_gradients": True,
    }
    assert {key: flat(made).get(key) for key in expected} == expected
    assert not [name for name in names(ZERO_3) if name not in made.text]


@pytest.mark.parametrize("nproc", [None, 2])
def test_ranks_that_the_sizes_of_the_batch_imply_have_these_as_their_origin(
    nproc: int | None, tmp_path: Path
) -> None:
    sizes = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }
    made = migrate([write(tmp_path, "ds.json", sizes)], [], nproc=nproc)
    assert made.config.nproc == 2
    assert ("nproc: 2  # --nproc" in made.text) == (nproc is not None)


@pytest.mark.parametrize("value", [-1, 0, -1.0])
def test_a_norm_below_0_clips_nothing(value: float, tmp_path: Path) -> None:
    """As trainers take it; the Trainer clips by its default where it is left out."""
    for name, tree in {
        "arguments.json": {
            "max_grad_norm": value,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1,
        },
        "zero.json": {"gradient_clipping": value, "train_batch_size": 8},
    }.items():
        assert migrate([write(tmp_path, name, tree)], []).config.clip.norm is None


def test_deepspeeds_json_alone(tmp_path: Path) -> None:
    made = migrate([write(tmp_path, "ds_config.json", CIFAR)], [], nproc=2)
    expected = {
        "global_batch_size": 16,
        "lr": 0.001,
        "optimizer.betas": [0.8, 0.999],
        "optimizer.weight_decay": 3e-7,
        "strategy_options.stage": 2,
        "strategy_options.scheduler": "WarmupLR",
        "schedule.warmup_steps": 1000,
        "precision": "bf16",
        "clip.norm": 1.0,
        "strategy_options.allgather_bucket_size": 50000000,
        "nproc": 2,
    }
    assert {key: flat(made).get(key) for key in expected} == expected
    assert "one step at the least rate" in made.text
    assert "task, model, data" in made.text


def test_a_key_that_deepspeed_dropped_is_left_out(tmp_path: Path) -> None:
    gone = {
        "sparse_attention": {"mode": "fixed"},
        "optimizer": {"type": "OneBitAdam"},
        "amp": {"enabled": True},
    }
    tree = CIFAR | gone | {"autotuning": {"enabled": False}}
    made = migrate([write(tmp_path, "ds.json", tree)], [])
    assert sorted(name.partition(" ")[0] for name in made.no_equal) == [
        "optimizer.type",
        "sparse_attention",
    ]
    assert made.instead == ("amp",)
    assert "sparse_attention" not in made.config.strategy_options.get("config", {})


def test_a_batch_that_says_the_number_of_processes(tmp_path: Path) -> None:
    batch = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }
    made = migrate([write(tmp_path, "ds.json", batch | {"zero_optimization": {"stage": 1}})], [])
    assert (made.config.global_batch_size, made.config.nproc) == (64, 8)


def test_fsdp_of_accelerate(tmp_path: Path) -> None:
    words = (
        "accelerate launch run_glue.py --model_name_or_path bert-base-cased --task_name rte"
        " --do_train --output_dir o"
    )
    made = migrate([write(tmp_path, "fsdp.yaml", FSDP_YAML)], words.split())
    expected = {
        "strategy": "fsdp",
        "nproc": 8,
        "precision": "bf16",
        "global_batch_size": 64,
        "strategy_options.sharding": "full",
        "strategy_options.wrap": ["BertLayer"],
        "strategy_options.activation_checkpointing": True,
        "strategy_options.reduce_dtype": "precision",
        "strategy_options.backward_prefetch": 1,
    }
    assert {key: flat(made).get(key) for key in expected} == expected
    assert (
        "fsdp_cpu_ram_efficient_loading = true: the weights of a folder are read by slices"
        in made.text
    )


def test_layers_that_are_recomputed_twice_are_recomputed_once(tmp_path: Path) -> None:
    words = (
        "accelerate launch run_glue.py --model_name_or_path bert-base-cased --task_name rte"
        " --do_train --output_dir o"
    )
    made = migrate(
        [write(tmp_path, "fsdp.yaml", FSDP_YAML)],
        [*words.split(), "--gradient_checkpointing", "true"],
    )
    assert flat(made)["gradient_checkpointing"] is True
    assert "strategy_options.activation_checkpointing" not in flat(made)
    assert "gradient_checkpointing recomputes all layers already" in made.text


def test_deepspeed_of_accelerate(tmp_path: Path) -> None:
    made = migrate([write(tmp_path, "zero.yaml", ZERO_YAML)], [])
    expected = {
        "strategy": "deepspeed",
        "nproc": 2,
        "precision": "bf16",
        "clip.norm": 0.7,
        "strategy_options.stage": 3,
        "strategy_options.offload_optimizer": "cpu",
    }
    assert {key: flat(made).get(key) for key in expected} == expected


def test_two_sources_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    words = ["python", "run_glue.py", "--learning_rate", "1e-4"]
    with pytest.raises(
        ConfigError, match=r"learning_rate = 0.0001 on the command line, but 2e-05 in the file"
    ):
        migrate([write(tmp_path, "args.json", {"learning_rate": 2e-5, "output_dir": "out"})], words)
    file = write(tmp_path, "ds.json", ZERO_3 | {"train_micro_batch_size_per_gpu": 16})
    with pytest.raises(
        ConfigError,
        match=r"train_micro_batch_size_per_gpu = 16, but per_device_train_batch_size = 8",
    ):
        migrate(
            [file],
            [
                "python",
                "run_clm.py",
                "--model_name_or_path",
                "gpt2",
                "--per_device_train_batch_size",
                "8",
            ],
        )
    with pytest.raises(ConfigError, match=r"--nproc 3, but num_processes = 2: leave --nproc out"):
        migrate([write(tmp_path, "zero.yaml", ZERO_YAML)], [], nproc=3)
