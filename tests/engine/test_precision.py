"""Attention with dropout in bf16 on a CPU, for the run alone; evaluation in a precision of its own,
and when it is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluated import evaluate_checkpoint
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from distcore import ConfigError, RunConfig, hookimpl, train
from distcore.checkpoint import read_tensors
from distcore.distributed.arithmetic import arithmetic_of
from distcore.engine.trainer import load_extensions
from distcore.lab import resolve
from distcore.testing.problem import Problem
from distcore.testing.variants import Referenced


def is_set() -> bool:
    return bool(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())


def config(out: Path, **changes: Any) -> RunConfig:
    given = {"out": str(out), "device": "cpu", "max_steps": 1, "global_batch_size": 4, "lr": 0.01}
    return RunConfig.model_validate(given | changes)


class Sees:
    """Writes down how the run computes."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    @hookimpl
    def on_step_end(self) -> None:
        self.seen.append(is_set())


@pytest.mark.parametrize(
    ("precision", "expected"), [("bf16", True), ("fp32", False), ("fp16", False)]
)
def test_the_attention_for_bf16_lasts_as_long_as_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, expected: bool
) -> None:
    sees = Sees()
    monkeypatch.setattr(
        "distcore.engine.trainer.load_extensions", lambda c: load_extensions(c) | {"sees": sees}
    )
    train(config(tmp_path / "run", precision=precision), Problem(rows=4))
    assert sees.seen == [expected]
    assert not is_set()


def fail_inside(config: RunConfig) -> None:
    with arithmetic_of(config):
        assert is_set()
        raise ValueError("on purpose")


def test_the_attention_that_the_program_had_set_comes_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        fail_inside(config(tmp_path, precision="bf16"))
    assert not is_set()


def test_values_and_gradients_are_those_of_fp32_rounded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    states = [torch.randn(4, 2, 24, 16) for _ in range(3)]
    mask = torch.arange(24) < torch.tensor([24, 20, 13, 7])[:, None, None, None]

    def attended(dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(1)
        query, key, value = given = [state.to(dtype).requires_grad_() for state in states]
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.1)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), given)]

    expected = attended(torch.float32)
    with arithmetic_of(config(tmp_path, precision="bf16")):
        rounded = attended(torch.bfloat16)
    for one, other in zip(expected, rounded, strict=True):
        assert other.dtype == torch.bfloat16
        assert float((one - other).norm() / one.norm()) < 2e-2


@pytest.mark.parametrize("problem", [Problem, Referenced])  # the second asks a frozen model, too
def test_evaluation_has_a_precision_of_its_own(tmp_path: Path, problem: type[Problem]) -> None:
    """Training stays in fp32, bit for bit; the evaluation is that of the same weights in bf16."""
    losses = []
    for name in ("same", "bf16"):
        report = train(config(tmp_path / name, eval_precision=name), problem(rows=8))
        losses.append(report["evaluation"]["loss"])
    steps = [tmp_path / name / "checkpoints" / "step-00000001" for name in ("same", "bf16")]
    first, second = map(read_tensors, steps)
    assert all(torch.equal(first[name], second[name]) for name in first)
    in_bf16 = evaluate_checkpoint(config(tmp_path, precision="bf16"), steps[0], problem(rows=8))
    assert losses[1] == in_bf16["evaluation"]["loss"] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_evaluations_at_epoch_ends_can_be_left_out(tmp_path: Path) -> None:
    """Of two epochs of two steps; the end of the run evaluates all the same."""
    counted = {}
    for at_end in (True, False):
        out = tmp_path / str(at_end)
        train(config(out, max_steps=4, eval_at_epoch_end=at_end), Problem(rows=8))
        records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        counted[at_end] = [record["step"] for record in records if "eval/loss" in record]
    assert counted == {True: [2, 4], False: [4]}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"strategy": "deepspeed", "eval_precision": "bf16"},
            "strategy 'deepspeed' computes evaluations as training",
        ),
        (
            {
                "strategy": "fsdp",
                "eval_precision": "bf16",
                "strategy_options": {"param_dtype": "precision"},
            },
            "eval_precision = 'bf16': parameters are gathered in that of training",
        ),
        (
            {
                "strategy": "mesh",
                "eval_precision": "bf16",
                "strategy_options": {"shard": 2, "param_dtype": "precision"},
            },
            "eval_precision = 'bf16': shards are gathered in that of training",
        ),
        (
            {"schedule": {"interval": "epoch", "warmup_steps": 2}},
            "schedule.interval = 'epoch': not with a warm-up",
        ),
        (
            {"schedule": {"interval": "epoch", "warmup_ratio": 0.1}},
            "schedule.interval = 'epoch': not with a warm-up",
        ),
        (
            {
                "strategy": "deepspeed",
                "schedule": {"interval": "epoch"},
                "strategy_options": {"scheduler": "WarmupLR"},
            },
            "schedule.interval = 'epoch': strategy 'deepspeed' has its own schedule",
        ),
        (
            {"patience": 2, "eval_at_epoch_end": False},
            "patience = 2: nothing is evaluated before the end",
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)):
        resolve(
            config(tmp_path / "run", nproc=1 if "strategy" not in changes else 2, **changes),
            task=Problem(rows=8),
        )
