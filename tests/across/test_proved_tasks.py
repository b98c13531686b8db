"""The proof of the first steps raises no false alarm: each built-in task, in each precision,
however it is cut.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.needs("distcore-tasks")]

TASKS = {
    "text-classification": "--model bert-tiny --max-seq-len 32",
    "token-classification": "--max-seq-len 32",
    "causal-lm": "--max-seq-len 32",
    "masked-lm": "--max-seq-len 32",
    "seq2seq": "",
    "embedding": "",
    "preference": "--max-seq-len 96",
    "reward-model": "--max-seq-len 96",
    "distillation": "",
    "image-classification": "--model resnet-tiny",
}
"""Arguments of a small run of each task."""
CUTS = {
    "one process": "--micro-batch-size 2",
    "ddp": "--strategy ddp --nproc 2 --micro-batch-size 2",
    "fsdp": "--strategy fsdp --nproc 2",
    "deepspeed": "--strategy deepspeed --nproc 2 --set strategy_options.stage=2",
}
NOT_PROVED = {("deepspeed", "bf16"): (0, "strategy 'deepspeed' keeps its weights in bf16")}
"""What the report says instead, by cut and precision."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_proved(task: str, cut: str, precision: str, tmp_path: Path) -> None:
    arguments = (
        f"--task {task} {TASKS[task]} {CUTS[cut]} --precision {precision} --device cpu"
        " --global-batch-size 8"
    )
    command = [
        sys.executable,
        "-m",
        "distcore",
        "train",
        *arguments.split(),
        "--max-steps",
        "3",
        "--prove",
        "on",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    proof = json.loads((tmp_path / "run/report.json").read_text())["proof"]
    assert (proof["steps"], proof["why"]) == NOT_PROVED.get((cut, precision), (2, "")), done.stderr
