"""The flags that everybody sets: warm-up, weight decay, clipping and the schedule."""

from __future__ import annotations

from typing import Any

import pytest

from distcore.cli.commands.train import config_of
from distcore.cli.main import command_parser, main
from distcore.config import RunConfig


def config(flags: str) -> RunConfig:
    return config_of(command_parser("train").parse(flags.split()))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--warmup 100", {"warmup_steps": 100, "warmup_ratio": 0.0}),
        ("--warmup 0.06", {"warmup_steps": "auto", "warmup_ratio": 0.06}),
        ("--warmup 0", {"warmup_steps": 0, "warmup_ratio": 0.0}),
        ("--schedule cosine --warmup 1", {"name": "cosine", "warmup_steps": 1}),
        (
            "--warmup 0.1 --set schedule.warmup_ratio=0.2",
            {"warmup_steps": "auto", "warmup_ratio": 0.1},
        ),
    ],
)
def test_warm_up_is_steps_or_a_part_of_the_run(flags: str, expected: dict[str, Any]) -> None:
    schedule = config(flags).schedule.model_dump()
    assert {key: schedule[key] for key in expected} == expected


def test_weight_decay_and_clipping() -> None:
    assert config("--weight-decay 0.1").optimizer.weight_decay == 0.1
    assert config("--clip-norm 0.5").clip.norm == 0.5
    assert config("--clip-norm off").clip.norm is None
    assert config("--set clip.norm=off").clip.norm is None
    assert config("").clip.norm == 1.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--warmup soon", "--warmup 'soon': "),
        ("--warmup 1.5", "--warmup '1.5': "),
        ("--clip-norm 0", "--clip-norm '0': must be greater than 0"),
        ("--weight-decay -1", "--weight-decay '-1': "),
        (
            "--schedule linaer",
            "schedule.name = 'linaer': no such schedule (did you mean 'linear'?)",
        ),
        ("--num-workers 3", "unknown flag '--num-workers' (here it is --set loader.workers=N)"),
        ("--max_grad_norm 3", "unknown flag '--max_grad_norm' (here it is --clip-norm)"),
        ("--gpus 3", "unknown flag '--gpus' (here it is --nproc)"),
    ],
)
@pytest.mark.needs("distcore-tasks")
def test_a_value_that_cannot_be_is_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--device", "cpu", *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
