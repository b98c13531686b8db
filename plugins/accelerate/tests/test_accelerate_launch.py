"""``distcore train`` under ``accelerate launch``, and what happens where Accelerate falls
back without a word.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator

from distcore import StrategyError, World, load_config, train
from distcore.testing import problem
from distcore.testing.problem import Problem
from distcore_accelerate.accelerator import check_no_fallback, rank_environment, reset_state
from distcore_accelerate.settings import Settings

TRAIN = (
    "-m",
    "distcore",
    "train",
    "--strategy",
    "accelerate",
    "--task",
    f"{problem.__file__}:Problem",
    "--max-steps",
    "2",
)
SMALL = ("--lr", "0.01", "--global-batch-size", "4", "--set", "device=cpu")


def accelerate_launch(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *arguments]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *TRAIN, *SMALL, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environ,
    )


@pytest.mark.ranks
def test_two_processes_of_accelerate_launch_train_together(tmp_path: Path) -> None:
    ranks = (
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--main_process_port",
        "0",
    )
    ended = accelerate_launch(*ranks, out=tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "report.json").read_text())["world_size"] == 2


@pytest.mark.slow
@pytest.mark.ranks
def test_a_deepspeed_file_given_to_the_launcher_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.yaml"
    tree = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "num_machines": 1,
        "mixed_precision": "bf16",
    }
    file.write_text(
        yaml.safe_dump(tree | {"deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0}})
    )
    ended = accelerate_launch(
        "--config_file", str(file), "--main_process_port", "0", out=tmp_path / "run"
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["world_size"], report["precision"]) == (2, "bf16")


@pytest.mark.ranks
def test_one_process_where_two_were_asked_for_is_refused_in_one_line(tmp_path: Path) -> None:
    ended = accelerate_launch(
        "--cpu", "--num_processes", "2", "--num_machines", "1", out=tmp_path / "run"
    )
    assert (
        "error: accelerate launch was told to start several processes and started one"
        in ended.stderr
    )
    assert not (tmp_path / "run").exists()


ONE_STEP = """
import sys
from distcore import load_config, train
from distcore.testing import problem
from distcore.testing.problem import Problem
job = {"strategy": "accelerate", "device": "cpu", "max_steps": 1, "lr": 0.01}
job["global_batch_size"] = 4
train(load_config(None, job | {"out": sys.argv[1], "extensions": {"progress": False}}), Problem())
print({"deepspeed", "distcore_deepspeed"} & sys.modules.keys())
"""


@pytest.mark.ranks
def test_deepspeed_is_only_imported_where_it_is_the_backend(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ONE_STEP, str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (0, "set()\n"), ended.stderr


def test_a_parameter_without_a_gradient_is_named_before_a_step_is_taken(tmp_path: Path) -> None:
    job = {
        "strategy": "accelerate",
        "device": "cpu",
        "max_steps": 1,
        "lr": 0.01,
        "global_batch_size": 4,
    }
    config = load_config(
        None, job | {"out": str(tmp_path / "run"), "extensions": {"progress": False}}
    )
    with pytest.raises(
        StrategyError,
        match=r"'unused.weight' got no gradient .* strategy_options.find_unused=true$",
    ):
        train(config, Problem(unused=True))
    reset_state()
    torch.distributed.destroy_process_group()


def test_a_backend_that_fell_back_is_named() -> None:
    world = World(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    reset_state()
    with rank_environment(world):
        del os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]
        accelerator = Accelerator(cpu=True)
    with pytest.raises(
        StrategyError, match=r"fell back: deepspeed was asked for \(DEEPSPEED on 2.*reports NO on 1"
    ):
        check_no_fallback(Settings(backend="deepspeed"), world, accelerator)
    reset_state()
