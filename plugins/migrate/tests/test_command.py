"""``distcore migrate`` as a command: what it prints, that ``distcore train`` takes it,
and what it refuses.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import work_folder as work
import yaml
from migrate_cases import CIFAR, FSDP_YAML, ZERO_3, ZERO_YAML

from distcore.cli.main import main
from distcore_migrate import draft, migrate, training_arguments

CLM = "run_clm.py --model_name_or_path ./gpt2 --train_file text.jsonl --block_size 32"
GLUE = "--model_name_or_path ./bert --train_file glue.jsonl"
CPU = "--use_cpu --output_dir run --do_train"
JOBS = {
    "run_glue": f"python run_glue.py {GLUE} --max_steps 5 {CPU}",
    "run_glue, ddp": (
        f"torchrun --nproc_per_node 2 run_glue.py {GLUE} "
        f"--validation_file glue.jsonl --max_seq_length 32 --ddp_find_unused_parameters True {CPU}"
    ),
    "run_clm": f"python {CLM} {CPU}",
    "run_mlm": (
        "python run_mlm.py --model_name_or_path ./bert --train_file text.jsonl --line_by_line"
        f" {CPU} --max_seq_length 64 --bf16"
    ),
    "run_ner": (
        "python run_ner.py --model_name_or_path ./bert --train_file ner.jsonl --max_seq_length 64"
        f" {CPU} --metric_for_best_model f1 --num_train_epochs 2"
    ),
    "run_summarization": (
        f"python run_summarization.py --model_name_or_path ./t5 --train_file news.csv {CPU}"
        " --predict_with_generate --max_source_length 32 --max_target_length 16 --source_prefix"
        " 'summarize: '"
    ),
    "run_translation": (
        f"python run_translation.py --model_name_or_path ./t5 --train_file en-ro.jsonl {CPU} "
        "--source_lang en_XX --target_lang ro_RO"
    ),
    "run_image_classification": (
        f"python run_image_classification.py --model_name_or_path ./vit --train_dir images {CPU}"
    ),
    "fsdp": (
        f"torchrun --nproc_per_node 2 {CLM} --bf16 --fsdp 'full_shard auto_wrap' --fsdp_config"
        f" fsdp.json {CPU}"
    ),
    "fsdp of accelerate": f"accelerate launch --config_file fsdp.yaml run_glue.py {GLUE} {CPU}",
    "zero of accelerate": (
        f"accelerate launch --config_file zero.yaml run_glue_no_trainer.py {GLUE} --output_dir run"
    ),
    "zero-3": (
        f"deepspeed --num_gpus 2 {CLM} --deepspeed zero3.json --bf16 --warmup_ratio 0.1 {CPU}"
    ),
    "zero-2": (
        f"deepspeed --include localhost:0,1 {CLM} {CPU} --deepspeed cifar.json --learning_rate"
        " 0.001 --adam_beta1 0.8 --weight_decay 3e-7 --warmup_steps 1000"
    ),
}
"""Published kinds of jobs on small files, whose configs a dry run looks at."""


@pytest.fixture
def folder(files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The files as the current folder, with the files of Accelerate and DeepSpeed."""
    work.enter(files, monkeypatch)
    (files / "zero3.json").write_text(json.dumps(ZERO_3))
    (files / "cifar.json").write_text(json.dumps(CIFAR))
    (files / "fsdp.yaml").write_text(FSDP_YAML.replace("num_processes: 8", "num_processes: 2"))
    (files / "zero.yaml").write_text(ZERO_YAML)
    (files / "fsdp.json").write_text(
        '{"transformer_layer_cls_to_wrap": ["GPT2Block"], "min_num_params": 0}'
    )
    return tmp_path


@pytest.mark.slow
def test_distcore_train_takes_what_is_printed(
    models: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {}
    for name, command in JOBS.items():
        out = folder / f"{name}.yaml"
        assert main(["migrate", "--out", str(out), "--", *shlex.split(command)]) == 0, name
        if main(["train", str(out), "--set", "device=cpu", "--dry-run"]):
            refused[name] = capsys.readouterr().err
    assert not refused


def test_the_config_goes_to_stdout_and_what_to_look_at_to_stderr(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = shlex.split(JOBS["run_glue"])
    assert main(["migrate", "--nproc", "2", "--", *job, "--neftune_noise_alpha", "5"]) == 0
    out, err = capsys.readouterr()
    tree = yaml.safe_load(out)
    assert (tree["global_batch_size"], tree["strategy"], tree["max_steps"]) == (16, "ddp", 5)
    assert tree["task_options"]["columns"] == {"text": "sentence1", "text_pair": "sentence2"}
    assert err.startswith("no equal here: neftune_noise_alpha = 5\n")


def test_a_file_that_is_there_is_not_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", "zero.yaml", "--out", str(folder / "new.yaml")]) == 0
    assert main(["migrate", "zero.yaml", "--out", str(folder / "new.yaml")]) == 2
    assert "is there already; remove it, or name another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", r"give files, or a command line behind --"),
        ("none.json", r"file none.json: cannot be read: No such file"),
        ("glue.jsonl", r"file glue.jsonl.*: neither JSON nor YAML|file glue.jsonl: unknown format"),
        ("broken.json", r"file broken.json: not valid JSON: .* line 1 column 10"),
        ("list.yaml", r"file list.yaml: has no keys and values; taken are a DeepSpeed JSON, "),
        ("other.yaml", r"file other.yaml: unknown format; known are TrainingArguments as JSON"),
        (
            "-- srunn run_glue.py",
            r"command 'srunn': not known \(did you mean 'srun'\?\); known programs are python",
        ),
        ("-- torchrun --nproc_per_node 2", r"names no script, a word that ends in .py"),
        ("-- python run_glue.py data", r"argument 'data': expected a flag such as --learning_rate"),
        (
            "-- python run_glue.py --learning_rate high",
            r"learning_rate = 'high': expected a number",
        ),
        ("-- python run_glue.py --seed 1.5", r"seed = 1.5: expected a whole number"),
        (
            "-- python run_glue.py --lr_scheduler_type up",
            r"lr_scheduler_type = 'up': no schedule of transformers",
        ),
        ("-- python run_glue.py --deepspeed none.json", r"file none.json: cannot be read"),
        ("tpu.yaml", r"distributed_type = XLA: no strategy for it"),
        ("--nproc 0 zero.yaml", r"--nproc 0: expected a number of processes"),
        ("zero.yaml --frob", r"unknown flag '--frob'.*; distcore migrate --help lists the flags"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.json").write_text('{"lr": 3 ')
    Path("list.yaml").write_text("- lr\n")
    Path("other.yaml").write_text("name: x\nversion: 3\nseed: 1\n")
    Path("tpu.yaml").write_text("distributed_type: XLA\nnum_processes: 8\n")
    assert main(["migrate", *shlex.split(arguments)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert re.search(message, err), err


def test_every_row_says_something_about_its_key() -> None:
    """The name of an argument stands in the file for every value: as the origin of a
    key or in a comment.
    """
    values: dict[str, Any] = {"report_to": "tensorboard", "optim": "adafactor", "log_level": "info"}
    for name, row in training_arguments.ROWS.items():
        for value in (values.get(name, True if "do_" in name else 1), None):
            given = draft.Draft()
            row(given, name, value)
            facts = [fact.origin for fact in given.facts.values()]
            assert any(
                name in text for text in [*given.origins.values(), *facts, *map(str, given.notes)]
            ), name


def test_every_argument_given_alone_is_named_in_the_file() -> None:
    """Each argument, given alone, is named in the file."""
    words = {
        "deepspeed": "",
        "deepspeed_config": "",
        "fsdp": "full_shard",
        "fsdp_config": "",
        "lr_scheduler_type": "linear",
    }
    for name in training_arguments.ROWS:
        made = migrate([], ["python", "run_clm.py", f"--{name}={words.get(name, 1)}"])
        assert name.replace("-", "_") in made.text, name


@pytest.mark.programs
def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from distcore.cli.main import main; main(['migrate', '--', 'python',"
        " 'run_glue.py', '--bf16'])\nassert 'torch' not in sys.modules and 'transformers' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
