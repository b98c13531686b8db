"""Commands of TRL, LLaMA-Factory, Axolotl and Lightning: what stands behind the file, and
what starts their ranks.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from distcore.errors import ConfigError
from distcore_migrate import migrate
from distcore_migrate.migration import Migration

AXOLOTL = """
base_model: owner/model
datasets: [{path: rows.jsonl, type: alpaca}]
learning_rate: 1.0
gradient_accumulation_steps: 4
"""
FACTORY = """
model_name_or_path: owner/model
stage: sft
finetuning_type: full
dataset: mine
learning_rate: 1.0
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
"""
LIGHTNING = """
trainer:
  max_epochs: 2
  devices: 4
  num_nodes: 2
  strategy: ddp_find_unused_parameters_true
  callbacks:
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: val_loss, patience: 5}
    - {class_path: lightning.pytorch.callbacks.ModelCheckpoint}
model: {class_path: models.Classifier}
data: {class_path: rows.Rows, init_args: {batch_size: 16}}
"""
TRL = "trl sft --model_name_or_path owner/model --dataset_name owner/data"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("ax.yaml", AXOLOTL), ("lf.yaml", FACTORY), ("li.yaml", LIGHTNING)):
        Path(name).write_text(text)
    Path("more.yaml").write_text("trainer: {devices: 2}\n")


def of(line: str) -> Migration:
    return migrate([], shlex.split(line))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "axolotl train ax.yaml --learning-rate 1e-5 --micro-batch-size 2",
            {"lr": 1e-5, "global_batch_size": 8},
        ),
        ("axolotl train ax.yaml", {"lr": 1.0, "global_batch_size": 4, "micro_batch_size": 1}),
        (
            "axolotl train ax.yaml --launcher torchrun -- --nproc_per_node=2",
            {"nproc": 2, "global_batch_size": 8},
        ),
        (
            "llamafactory-cli train lf.yaml --learning_rate 1e-3",
            {"lr": 1e-3, "global_batch_size": 8},
        ),
        ("llamafactory-cli train lf.yaml learning_rate=1e-3", {"lr": 1e-3}),
        ("NPROC_PER_NODE=4 llamafactory-cli train lf.yaml", {"nproc": 4, "global_batch_size": 32}),
        ("torchrun --nproc_per_node 2 src/train.py lf.yaml", {"nproc": 2, "global_batch_size": 16}),
        (
            "python src/train_bash.py --stage sft --model_name_or_path owner/model",
            {"task": "causal-lm"},
        ),
        (
            "python main.py fit -c li.yaml",
            {"global_batch_size": 128, "patience": 5, "strategy": "ddp"},
        ),
        ("python main.py fit --config li.yaml --config more.yaml", {"global_batch_size": 64}),
        ("python main.py fit --config=li.yaml --trainer.devices 1", {"global_batch_size": 32}),
        (
            f"{TRL} --accelerate_config zero3 --num_processes 4",
            {"nproc": 4, "strategy": "deepspeed", "lr": 2e-5},
        ),
        ("trl grpo --model_name_or_path owner/model --dataset_name owner/data", {"lr": 1e-6}),
    ],
)
def test_arguments_behind_the_file_override_it(line: str, expected: dict[str, Any]) -> None:
    config = of(line).config
    assert {key: getattr(config, key) for key in expected} == expected


def test_variables_start_torchrun_on_several_machines() -> None:
    made = of(
        "FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=4 MASTER_ADDR=host llamafactory-cli train lf.yaml"
    )
    assert made.start == ("--launcher", "torchrun:host:29500", "--nodes", "2", "--nproc", "4")


def test_callbacks_and_options_of_lightning_have_their_keys() -> None:
    made = of("python main.py fit --config li.yaml")
    assert made.config.strategy_options == {"find_unused": True}
    assert made.instead == ("trainer.callbacks: ModelCheckpoint",)
    assert "trainer.callbacks: EarlyStopping: evaluations without a better val_loss" in " ".join(
        made.text.split("\n# ")
    )


def test_lora_of_trl_has_its_dropout_and_says_which_layers_differ() -> None:
    made = of(f"{TRL} --use_peft --completion_only_loss false --packing")
    assert (made.config.lora.rank, made.config.lora.alpha, made.config.lora.dropout) == (
        16,
        32,
        0.05,
    )
    said = " ".join(made.differs)
    for word in (
        "lora_target_modules, not given",
        "completion_only_loss = false",
        "packing = true",
    ):
        assert word in said


@pytest.mark.parametrize(("kind", "kept"), [("dpo", False), ("kto", False), ("rm", True)])
def test_dropout_that_a_trainer_of_preferences_switches_off_is_off_in_lora_too(
    kind: str, kept: bool
) -> None:
    """LLaMA-Factory's trainers of dpo and kto, and TRL's, set the probability of each
    dropout module to 0.
    """
    text = (
        f"model_name_or_path: m\nstage: {kind}\nfinetuning_type: lora\nlora_dropout:"
        " 0.1\ndataset: d\n"
    )
    Path("pairs.yaml").write_text(text)
    config = of("llamafactory-cli train pairs.yaml").config
    assert config.task_options["dropout"] == (None if kept else 0.0)
    assert config.lora.dropout == (0.1 if kept else 0.0)
    if kind == "dpo":
        line = "trl dpo --model_name_or_path m --dataset_name o/d --use_peft --lora_dropout 0.1"
        assert of(line).config.lora.dropout == 0.0
        assert of(f"{line} --disable_dropout False").config.lora.dropout == 0.1


def test_two_files_agree_or_are_refused() -> None:
    Path("ds.json").write_text(
        json.dumps({"train_batch_size": 4, "zero_optimization": {"stage": 2}})
    )
    accelerate = (
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: %d}\nnum_processes: %d\n"
    )
    for name, stage, ranks in (("a.yaml", 2, 2), ("b.yaml", 3, 2), ("c.yaml", 2, 4)):
        Path(name).write_text(accelerate % (stage, ranks))
    config = migrate(["ds.json", "a.yaml"], []).config
    assert (config.global_batch_size, config.strategy_options["stage"], config.nproc) == (4, 2, 2)
    with pytest.raises(ConfigError, match=r"stage = 2, but zero_stage = 3: both say zero_stage"):
        migrate(["ds.json", "b.yaml"], [])
    with pytest.raises(
        ConfigError, match=r"num_processes = 4 in c.yaml, but 2 in another file of accelerate"
    ):
        migrate(["a.yaml", "c.yaml"], [])


def test_deepspeeds_warm_up_and_cosine_keep_their_lengths() -> None:
    file: dict[str, Any] = {
        "train_batch_size": 4,
        "optimizer": {"type": "adamw", "params": {"lr": 1e-4}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    Path("ds.json").write_text(json.dumps(file))
    assert migrate(["ds.json"], []).config.schedule.warmup_steps == 1000
    file["scheduler"] = {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 10, "total_num_steps": 100},
    }
    Path("ds.json").write_text(json.dumps(file))
    schedule = migrate(["ds.json"], []).config.schedule
    assert (schedule.name, schedule.warmup_steps) == ("cosine", 10)


def test_a_models_config_is_no_job() -> None:
    Path("config.json").write_text(
        '{"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8}'
    )
    with pytest.raises(
        ConfigError,
        match=r"config\.json: describes a model; it trains by distcore train --model FOLDER",
    ):
        migrate(["config.json"], [])


@pytest.mark.parametrize("flag", ["-N 2", "-npernode 2", "-ppn 2"])
def test_mpirun_fills_a_part_of_each_machine(flag: str) -> None:
    Path("hosts").write_text("a slots=4\nb slots=4\n")
    line = (
        f"mpirun --hostfile hosts {flag} -x A -x B python run_glue.py --task_name mrpc --do_train"
        " --output_dir o"
    )
    made = of(line)
    assert made.config.global_batch_size == 32  # 8 rows on each of 4 ranks
    assert "x = A, B" in made.text


def test_words_before_the_program_are_said() -> None:
    assert "taskset = -c 0-3" in of("taskset -c 0-3 python train.py").text
    line = (
        "accelerate launch --multi_gpu --num_processes 2 --gpu_ids 0,1 train.py"
        " --torch_compile_backend inductor"
    )
    made = of(line)
    assert (made.start, made.config.compile) == (("--include", "localhost:0,1"), "on")
