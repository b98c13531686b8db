"""Accelerate's DeepSpeed has what the strategy ``deepspeed`` has: its JSON, its checks, its
limits and its messages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from distcore import ConfigError, RunConfig, World, launch, load_config, train
from distcore.errors import RankError
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Problem
from distcore_accelerate import zero
from distcore_accelerate.strategy import AccelerateStrategy

import_module("transformers.optimization")  # once, here, rather than in every rank that is forked

JOB = {
    "strategy": "accelerate",
    "device": "cpu",
    "nproc": 2,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "lr": 0.01,
    "max_steps": 6,
    "log_every": 1,
    "schedule.warmup_steps": 2,
    "extensions": {"progress": False, "metrics": True},
}


def config(deepspeed_config: str | dict[str, Any] | None, **changes: Any) -> RunConfig:
    options = {"backend": "deepspeed", "deepspeed_config": deepspeed_config}
    return load_config(None, JOB | {"strategy_options": options} | changes)


def test_an_unknown_key_of_a_section_is_refused_with_the_nearest() -> None:
    given = {"zero_optimization": {"stage": 2, "overlap_com": True}}
    with pytest.raises(
        ConfigError,
        match=r"unknown key 'zero_optimization\.overlap_com' \(did you mean 'overlap_comm'",
    ):
        resolve(config(given), task=Problem())


def test_a_key_that_deepspeed_ignores_is_a_warning_with_the_nearest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    resolve(config({"zero_optimization": {"stage": 2}, "gradient_cliping": 1.0}), task=Problem())
    assert "DeepSpeed ignores 'gradient_cliping' (did you mean 'gradient_clipping'?)" in caplog.text


def test_the_json_may_have_comments_and_text_for_numbers(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_batch_size": "8", /* as before */ "zero_optimization": {"stage": "3"} #'
        " gathered\n}"
    )
    resolve(config(str(file)), task=Problem())
    assert AccelerateStrategy(
        backend="deepspeed", deepspeed_config=str(file)
    ).capabilities.shards_parameters


def test_a_key_that_the_json_gives_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {}, "bf16": {}}')
    with pytest.raises(
        ConfigError,
        match=r"deepspeed_config = '.*ds.json': not valid JSON: key 'bf16' is given twice",
    ):
        resolve(config(str(file)), task=Problem())


def test_an_optimizer_that_the_engine_would_not_step_will_be_refused() -> None:
    assert "optimizer" in AccelerateStrategy(backend="deepspeed").capabilities.owns
    assert "optimizer" not in AccelerateStrategy(backend="ddp").capabilities.owns


@pytest.mark.parametrize("capable", [False, True])
def test_fp16_on_a_cpu_is_refused_only_where_deepspeed_has_none(
    capable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # some CPUs multiply in it
    monkeypatch.setattr("distcore_deepspeed.library.fp16_on_cpu", lambda: capable)
    if capable:
        assert resolve(config(None, precision="fp16"), task=Problem()).config.precision == "fp16"
    else:
        with pytest.raises(ConfigError, match="DeepSpeed has no fp16 on a CPU"):
            resolve(config(None, precision="fp16"), task=Problem())


def test_without_distcore_deepspeed_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what an absent package looks like to an import
    monkeypatch.setitem(sys.modules, "distcore_deepspeed", None)
    for name in ("distcore_accelerate.zero", "distcore_accelerate.deepspeed_config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        ConfigError, match=r"'deepspeed': .*; install it as you installed distcore-accelerate"
    ) as caught:
        resolve(config(None), task=Problem())
    assert "\n" not in str(caught.value)


ONE_STEP = """
import sys
from distcore import load_config, train
from distcore.testing.problem import Problem
job = {"strategy": "accelerate", "strategy_options": {"backend": "deepspeed"},
       "device": "cpu", "max_steps": 1, "lr": 0.01, "global_batch_size": 4,
       "out": sys.argv[1], "extensions": {"progress": False}}
train(load_config(None, job), Problem())
import deepspeed
print(vars(deepspeed.ops)["__compatible_ops__"])
"""


@pytest.mark.programs
def test_no_extension_of_deepspeed_is_probed(tmp_path: Path) -> None:
    """DeepSpeed fills its table by running the compiler for each of its extensions,
    when it is first read.
    """
    command = [sys.executable, "-c", ONE_STEP, str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (0, "{'deepspeed_shm_comm': False}\n"), ended.stderr


def rates_and_losses(
    out: Path, deepspeed_config: dict[str, Any], **changes: Any
) -> list[tuple[float, float]]:
    launch(train, config(deepspeed_config, out=str(out), **changes), Problem(), nproc=2)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["train/lr"], line["train/loss"]) for line in records if "train/loss" in line]


@pytest.mark.ranks
def test_a_scheduler_of_deepspeeds_goes_on_where_it_was(tmp_path: Path) -> None:
    auto = dict.fromkeys(
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
    )
    given = {
        "scheduler": {"type": "WarmupDecayLR", "params": auto},
        "zero_optimization": {"stage": 1},
    }
    whole = rates_and_losses(tmp_path / "whole", given, save_every=3)
    (tmp_path / "half").mkdir()
    again = rates_and_losses(
        tmp_path / "half", given, resume=str(tmp_path / "whole/checkpoints/step-00000003")
    )
    assert again == whole[3:]


class Stuck(Problem):
    """A task of which rank 1 comes to a stop."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if os.environ["RANK"] == "1":
            time.sleep(60)
        return super().loss(model, batch)


@pytest.mark.ranks
def test_a_rank_that_hangs_ends_the_job(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 of 2 failed.*Timed out"):
        launch(train, config(None, out=str(tmp_path / "run"), timeout=5), Stuck(), nproc=2)
    assert time.monotonic() - started < 40


def test_transformers_is_not_told_to_build_later_models_in_parts() -> None:
    """Such as a teacher that is read beside a student at stage 3."""
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    tree = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    given = zero._arguments(RunConfig(device="cpu"), world, tree)
    assert (given["deepspeed_plugin"].zero3_init_flag, given["cpu"]) == (False, False)
    assert not is_deepspeed_zero3_enabled()
