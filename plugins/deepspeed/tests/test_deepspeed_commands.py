"""Whole commands: ``eval`` over shards, ``checkpoint export`` with tied weights, and a
DeepSpeed that is broken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from first_line import after_first_line
from text_task import FIRST, LAST, PADDING, TEXTS
from transformers import BartConfig, BartForSequenceClassification

from distcore import RankInfo, launch, load_config
from distcore.checkpoint import Checkpoint
from distcore.cli.main import main
from distcore.engine.build import build_run
from distcore.engine.trainer import set_up
from distcore.rank_environment.environment import join
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Problem

QUIET = "--set device=cpu --set extensions.progress=false"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, and a tiny BART, whose encoder and decoder share one embedding."""
    home = tmp_path_factory.mktemp("commands")
    rows = [
        {"text": f"{word} text {number}", "label": word}
        for number in range(30)
        for word in ("good", "bad")
    ]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 128,
        "num_labels": 2,
        "pad_token_id": PADDING,
        "bos_token_id": FIRST,
        "eos_token_id": LAST,
        "decoder_start_token_id": LAST,
    }
    BartForSequenceClassification(BartConfig(**shape)).save_pretrained(home / "bart")
    return home


@pytest.fixture(scope="module")
def run_folder(folder: Path) -> Path:
    """BART trained at stage 3, in bf16, with DeepSpeed's own JSON."""
    given = {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}}
    scheduler = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
    }
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    (folder / "ds.json").write_text(
        json.dumps(given | {"scheduler": scheduler, "zero_optimization": zero})
    )
    command = (
        f"train --strategy deepspeed --set strategy_options.config={folder}/ds.json --nproc 2"
        " --precision bf16 "
    )
    command += (
        f"--task {TEXTS} --model {folder}/bart --data {folder}/rows.jsonl --global-batch-size 8 "
    )
    command += f"--max-steps 4 --lr 0.01 --set schedule.warmup_steps=1 --out {folder}/run {QUIET}"
    assert main(command.split()) == 0
    return folder / "run"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "way",
    [
        # of the training, another batch
        "--nproc 2 --strategy deepspeed --set strategy_options.config={json}",
        "--nproc 2 --strategy deepspeed --set strategy_options.stage=0",
        "--nproc 1 --strategy deepspeed --set strategy_options.stage=1",
        "--nproc 3 --strategy deepspeed --set strategy_options.stage=3",
        (
            "--nproc 2 --strategy deepspeed --set strategy_options.stage=3 --set"
            " strategy_options.offload_param=cpu"
        ),
        "--nproc 1 --strategy single --set precision=fp32",
    ],
)
def test_the_weights_are_evaluated_at_every_stage(
    run_folder: Path, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = way.format(json=run_folder.parent / "ds.json")
    assert main(["eval", str(run_folder), "--json", *given.split()]) == 0
    captured = capfd.readouterr()
    evaluation = json.loads(captured.out.splitlines()[-1])["evaluation"]
    reported = json.loads((run_folder / "report.json").read_text())["evaluation"]
    assert evaluation["loss"] == pytest.approx(reported["loss"], rel=2e-2)
    assert (evaluation["evaluated"], evaluation["unique"]) == (
        reported["evaluated"],
        reported["unique"],
    )


def parts_held(options: dict[str, Any]) -> tuple[int, int, int]:
    """Elements of parameters that this rank keeps, holds whole, and that there are, in a
    run that only evaluates.
    """
    settings = {
        "strategy": "deepspeed",
        "strategy_options": options,
        "device": "cpu",
        "nproc": 2,
        "out": "unused",
    }
    config = load_config(
        None, settings | {"global_batch_size": 4, "micro_batch_size": 2, "lr": 0.01}
    )
    rank_info, task = join(os.environ) or RankInfo(), Problem()
    resolved = resolve(config, rank_info.size, rank_info.launcher, training=False, task=task)
    hooks, world = set_up(resolved, rank_info)
    run = build_run(
        resolved.config, hooks, world, task, task.prepare(resolved.config), training=False
    )
    parameters = [cast(Any, parameter) for parameter in run.module.parameters()]
    kept, whole = (
        sum(each)
        for each in zip(*((p.ds_tensor.numel(), p.numel()) for p in parameters), strict=True)
    )
    total = sum(p.ds_numel for p in parameters)
    del run, parameters
    hooks.teardown(world)
    return kept, whole, total


@pytest.mark.ranks
def test_a_model_that_is_evaluated_at_stage_3_is_sharded() -> None:
    for kept, whole, total in launch(
        parts_held, {"stage": 3, "stage3_param_persistence_threshold": 0}, nproc=2
    ):
        assert whole == 0
        assert total / 2 <= kept < 0.51 * total + 32


@pytest.mark.needs("distcore-tasks")
@pytest.mark.ranks
def test_an_export_of_a_sharded_run_keeps_weights_tied_and_warns_of_nothing(
    run_folder: Path, tmp_path: Path
) -> None:
    ended = distcore(f"checkpoint export {run_folder} --to {tmp_path}/hf", dict(os.environ))
    assert (ended.returncode, ended.stdout) == (0, f"exported to {tmp_path}/hf\n"), ended.stderr
    assert "accelerator" not in ended.stderr
    model = BartForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert model.model.encoder.embed_tokens.weight is model.model.decoder.embed_tokens.weight
    saved = Checkpoint(run_folder / "checkpoints/step-00000004")
    for name, value in model.named_parameters():
        assert torch.equal(value, saved[f"model/{name}"]), name
        assert value.dtype == torch.float32


def distcore(arguments: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distcore", *arguments.split()]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environ
    )


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """An environment in which the first deepspeed on the path raises when it is imported."""
    package = tmp_path / "path" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        'raise OSError("libcudart.so.12: cannot open shared object file")\n'
    )
    return {**os.environ, "PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}


def train(folder: Path, strategy: str, out: Path) -> str:
    job = (
        f"train --strategy {strategy} --task {TEXTS} --data {folder}/rows.jsonl --global-batch-size"
        " 8 --max-steps 1"
    )
    return f"{job} --nproc 1 --out {out} {QUIET}"


@pytest.mark.programs
def test_a_broken_deepspeed_is_one_line_when_it_is_selected(
    folder: Path, tmp_path: Path, broken: dict[str, str]
) -> None:
    ended = distcore(train(folder, "deepspeed", tmp_path / "run"), broken)
    assert ended.returncode == 2
    assert after_first_line(ended.stderr).startswith(
        "error: strategy 'deepspeed' is installed (distcore-deepspeed 0.1.0)"
    )
    assert "OSError: libcudart.so.12: cannot open shared object file" in ended.stderr
    assert after_first_line(ended.stderr).count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.programs
def test_a_broken_deepspeed_costs_other_strategies_nothing(
    folder: Path, tmp_path: Path, broken: dict[str, str]
) -> None:
    ended = distcore(train(folder, "single", tmp_path / "run"), broken)
    assert ended.returncode == 0, ended.stderr
    assert "libcudart" not in ended.stdout + ended.stderr
