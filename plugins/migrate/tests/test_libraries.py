"""YAML of TRL, Axolotl, LLaMA-Factory and Lightning: the right task, LoRA, lengths, and
nothing dropped in silence.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from distcore.cli.main import main
from distcore.config import flatten
from distcore.errors import ConfigError
from distcore_migrate import Migration, migrate

SFT = """\
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
packing: true
max_length: 2048
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
dataset_text_field: text
"""
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
val_size: 0.1
output_dir: saves/sft
plot_loss: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""
AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
adapter: lora
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
wandb_project: mine
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
warmup_ratio: 0.1
evals_per_epoch: 4
weight_decay: 0.0
fsdp_config:
  fsdp_version: 2
  reshard_after_forward: true
special_tokens:
  pad_token: "<|end|>"
"""
LIGHTNING = """\
seed_everything: 7
trainer:
  max_epochs: 4
  accelerator: cpu
  devices: 2
  strategy: ddp
  precision: bf16-mixed
  gradient_clip_val: 0.5
  accumulate_grad_batches: 2
model:
  class_path: my.models.Classifier
  init_args:
    width: 64
data:
  class_path: my.data.Rows
  init_args:
    batch_size: 16
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.001
"""
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "trl": (
        SFT,
        {
            "task": "causal-lm",
            "task_options.model": "Qwen/Qwen2.5-0.5B",
            "task_options.max_seq_len": 2048,
            "task_options.data": "trl-lib/Capybara@train",
            "lora.rank": 32,
            "lora.alpha": 16.0,
            "lr": 2e-4,
            "lora.targets": ["q_proj", "v_proj"],
            "gradient_checkpointing": True,
        },
    ),
    "llama-factory": (
        LLAMA_FACTORY,
        {
            "task": "causal-lm",
            "task_options.max_seq_len": 2048,
            "task_options.eval_fraction": 0.1,
            "lora.rank": 8,
            "lora.targets": "all-linear",
            "global_batch_size": 8,
            "schedule.name": "cosine",
            "precision": "bf16",
        },
    ),
    "llama-factory, documents": (
        LLAMA_FACTORY.replace("stage: sft", "stage: pt").replace("type: lora", "type: full"),
        {"task": "causal-lm", "lora.rank": None},
    ),
    "llama-factory, preferences": (
        LLAMA_FACTORY.replace("stage: sft", "stage: dpo") + "pref_loss: hinge\npref_beta: 0.2\n",
        {
            "task": "preference",
            "task_options.loss": "hinge",
            "task_options.beta": 0.2,
            "lora.rank": 8,
        },
    ),
    "llama-factory, kto": (
        LLAMA_FACTORY.replace("stage: sft", "stage: kto"),
        {"task": "preference", "task_options.loss": "kto", "task_options.max_seq_len": 2048},
    ),
    "llama-factory, rewards": (
        LLAMA_FACTORY.replace("stage: sft", "stage: rm"),
        {"task": "reward-model"},
    ),
    "llama-factory, another loss": (
        LLAMA_FACTORY.replace("stage: sft", "stage: dpo") + "pref_loss: simpo\n",
        {"task": "simpo.py:SIMPO"},
    ),
    "llama-factory, by its own rewards": (
        LLAMA_FACTORY.replace("stage: sft", "stage: ppo"),
        {"task": "ppo.py:PPO"},
    ),
    "axolotl": (
        AXOLOTL,
        {
            "task": "causal-lm",
            "task_options.model": "NousResearch/Llama-3.2-1B",
            "task_options.max_seq_len": 2048,
            "task_options.data": "teknium/GPT4-LLM-Cleaned@train",
            "task_options.columns.prompt": "instruction",
            "lora.rank": 16,
            "lora.alpha": 32.0,
            "lora.dropout": 0.05,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "optimizer.name": "adamw",
            "precision": "auto",
            "strategy": "fsdp",
            "epochs": 1,
        },
    ),
    "axolotl, preferences": (
        AXOLOTL.replace("type: alpaca", "type: chatml.intel") + "rl: ipo\nrl_beta: 0.3\n",
        {
            "task": "preference",
            "task_options.loss": "ipo",
            "task_options.beta": 0.3,
            "lora.rank": 16,
            "task_options.columns.prompt": "question",
            "task_options.max_seq_len": 2048,
        },
    ),
    "axolotl, columns of preferences": (
        AXOLOTL.replace(
            "type: alpaca", "type: {field_prompt: a, field_chosen: b, field_rejected: c}"
        )
        + "rl: kto\n",
        {
            "task": "preference",
            "task_options.loss": "kto",
            "task_options.beta": 0.1,
            "task_options.columns.prompt": "a",
            "task_options.columns.chosen": "b",
            "task_options.columns.rejected": "c",
        },
    ),
    "axolotl, rewards": (AXOLOTL + "reward_model: true\n", {"task": "reward-model"}),
    "axolotl, groups": (AXOLOTL + "rl: grpo\n", {"task": "grpo.py:GRPO"}),
    "lightning": (
        LIGHTNING,
        {
            "task": "models.py:Classifier",
            "epochs": 4,
            "device": "cpu",
            "nproc": 2,
            "strategy": "ddp",
            "seed": 7,
            "precision": "bf16",
            "clip.norm": 0.5,
            "global_batch_size": 64,
            "micro_batch_size": 16,
            "lr": 1e-3,
        },
    ),
}


def flat(made: Migration) -> dict[str, Any]:
    tree: dict[str, Any] = made.config.model_dump(mode="json")
    return tree | flatten(tree)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("text", "expected"), FILES.values(), ids=FILES)
def test_a_file_becomes_a_config_of_the_right_task(
    text: str, expected: dict[str, Any], folder: Path
) -> None:
    (folder / "job.yaml").write_text(text)
    made = migrate(["job.yaml"], [])
    assert {key: flat(made).get(key, "nothing") for key in expected} == expected
    assert not [
        key
        for key in yaml.safe_load(text)
        if key not in made.text and key not in ("trainer", "model", "data")
    ]


COMMANDS = {
    "trl": (
        "trl sft --config job.yaml --output_dir out --learning_rate 1e-3",
        SFT,
        {"lr": 1e-3, "task": "causal-lm"},
    ),
    "trl's script": (
        (
            "accelerate launch --num_processes 2 --multi_gpu trl/scripts/sft.py"
            " --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara --use_peft"
            " --lora_r 8"
        ),
        SFT,
        {"lora.rank": 8, "nproc": 2, "global_batch_size": 16, "lr": 2e-5},
    ),
    "trl's preferences": (
        "trl dpo --config job.yaml --loss_type ipo --beta 0.5 --label_smoothing 0.1",
        SFT,
        {
            "task": "preference",
            "task_options.loss": "ipo",
            "task_options.beta": 0.5,
            "lr": 2e-4,
            "task_options.label_smoothing": 0.1,
            "task_options.max_seq_len": 2048,
            "lora.rank": 32,
        },
    ),
    "trl's defaults": (
        (
            "trl dpo --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name"
            " trl-lib/ultrafeedback_binarized"
        ),
        SFT,
        {
            "task_options.loss": "dpo",
            "task_options.beta": 0.1,
            "lr": 1e-6,
            "task_options.max_seq_len": 1024,
            "task_options.dropout": 0.0,
        },
    ),
    "trl's kto": (
        "trl kto --config job.yaml",
        SFT,
        {"task": "preference", "task_options.loss": "kto"},
    ),
    "trl's rewards": (
        "trl reward --config job.yaml --center_rewards_coefficient 0.01",
        SFT,
        {"task": "reward-model", "task_options.center": 0.01},
    ),
    "another loss": (
        "trl dpo --config job.yaml --loss_type sigmoid bco_pair",
        SFT,
        {"task": "sigmoid_bco_pair.py:SIGMOID_BCO_PAIR"},
    ),
    "trl's groups": ("trl grpo --config job.yaml", SFT, {"task": "grpo.py:GRPO"}),
    "llama-factory": (
        "llamafactory-cli train job.yaml learning_rate=1e-5",
        LLAMA_FACTORY,
        {"lr": 1e-5, "task": "causal-lm"},
    ),
    "axolotl": ("axolotl train job.yaml", AXOLOTL, {"task": "causal-lm", "lora.rank": 16}),
    "axolotl by accelerate": (
        "accelerate launch --num_processes 2 -m axolotl.cli.train job.yaml",
        AXOLOTL,
        {"task": "causal-lm", "nproc": 2},
    ),
}


@pytest.mark.parametrize(("line", "text", "expected"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_of_a_library_reads_its_file(
    line: str, text: str, expected: dict[str, Any], folder: Path
) -> None:
    (folder / "job.yaml").write_text(text)
    made = migrate([], shlex.split(line))
    assert {key: flat(made).get(key, "nothing") for key in expected} == expected


def test_the_config_of_preferences_is_one_that_trains(folder: Path) -> None:
    (folder / "job.yaml").write_text(
        "beta: 0.2\nloss_type: [hinge]\nuse_peft: false\ndisable_dropout: true\n"
    )
    for action in ("dpo", "kto", "reward"):
        words = f"trl {action} --config job.yaml {'--loss_type kto' * (action == 'kto')}"
        assert main(["migrate", "--out", f"{action}.yaml", "--", *shlex.split(words)]) == 0
        words_of_run = ["train", f"{action}.yaml", "--model", "gpt2-tiny", "--dry-run"]
        assert main(words_of_run) == 2
        assert main([*words_of_run, "--data", "stdlib-preferences"]) == 0


def test_a_file_that_names_a_model_and_no_task_is_no_text_classification(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "job.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nlearning_rate: 0.0001\nreport_to: none\n"
    )
    assert main(["migrate", "job.yaml", "--out", "new.yaml"]) == 0
    assert main(["train", "new.yaml", "--dry-run"]) == 2
    assert "no task named 'SAY-WHICH'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "text", "expected"),
    [
        (
            "axolotl train job.yaml",
            "base_model: x/y\ndatasets: [{path: rows.jsonl, type: completion}]\n",
            {"epochs": 1, "schedule.name": "cosine", "precision": "fp32"},
        ),
        (
            "trl sft --config job.yaml",
            "model_name_or_path: x/y\ndataset_name: a/b\n",
            {"precision": "bf16", "epochs": 3},
        ),
        (
            "trl dpo --config job.yaml",
            "model_name_or_path: x/y\ndataset_name: a/b\nfp16: true\n",
            {"precision": "fp16"},
        ),
    ],
    ids=["axolotl", "sft", "dpo in fp16"],
)
def test_a_key_that_a_file_leaves_out_has_the_default_of_its_library(
    line: str, text: str, expected: dict[str, Any], folder: Path
) -> None:
    (folder / "job.yaml").write_text(text)
    made = flat(migrate([], shlex.split(line)))
    assert {key: made[key] for key in expected} == expected


def test_a_file_without_training_says_what_there_is_instead(folder: Path) -> None:
    (folder / "job.yaml").write_text(
        "model_name_or_path: x\ntemplate: y\ninfer_backend: huggingface\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"infer_backend = huggingface: this file trains nothing; distcore predict",
    ):
        migrate(["job.yaml"], [])


def test_a_nested_value_that_is_not_understood_is_named(folder: Path) -> None:
    (folder / "job.yaml").write_text(
        AXOLOTL.replace("gradient_checkpointing: true", "gradient_checkpointing: offload")
    )
    assert (
        "gradient_checkpointing = offload: a value that is not understood"
        in migrate(["job.yaml"], []).text
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "fsdp.json",
            '{"min_num_params": 2000, "fsdp_backward_prefetch": "backward_pre"}',
            "--fsdp_config fsdp.json",
        ),
        ("hostfile", "host0 slots=4\nhost1 slots=4\n", "is a hostfile; .* --hostfile hostfile"),
    ],
)
def test_a_file_that_belongs_to_a_command_says_so(
    name: str, text: str, said: str, folder: Path
) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"file {name}: .*{said}"):
        migrate([name], [])
