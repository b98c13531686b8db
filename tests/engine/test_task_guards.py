"""A task that breaks its contract ends in one line, before the first step or after it, and
not after an hour.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore import Datasets, RunConfig, launch, train
from distcore.errors import AgreementError, TaskError
from distcore.testing.problem import Classifier, Problem, RandomRows


def config(out: Path, **changes: Any) -> RunConfig:
    given = {
        "out": str(out),
        "max_steps": 3,
        "global_batch_size": 8,
        "lr": 0.01,
        "device": "cpu",
        "log_every": 1,
    }
    return RunConfig.model_validate(given | {"extensions": {"progress": False}} | changes)


def steps_in(out: Path) -> int:
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


class PerToken(Problem):
    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().outputs(model, batch) | {"token": batch["tokens"].reshape(-1)}


class NoTensor(Problem):
    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        # the mistake
        return {**super().outputs(model, batch), "names": ["a"]}  # type: ignore[dict-item]


class Total(Problem):
    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().outputs(model, batch) | {"total": batch["tokens"].sum()}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            PerToken(),
            r"outputs\(\) returned 'token' of shape \(\d+,\) for 8 rows; expected \(8, …\)",
        ),
        (Total(), r"outputs\(\) returned 'total' of shape \(\) for 8 rows; expected \(8, …\)"),
        (NoTensor(), r"outputs\(\) returned list as 'names'; expected a tensor \(8, …\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Problem) else "",
)
def test_a_task_that_cannot_be_evaluated_fails_before_the_first_step(
    task: Problem, message: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=message):
        train(config(tmp_path / "run"), task)
    assert steps_in(tmp_path / "run") == 0


class Widths(Problem):
    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().outputs(model, batch) | {"tokens": batch["tokens"]}


def test_rows_of_unlike_widths_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"returned 'tokens' with rows of shapes \(\d+,\) and \(\d+,\)"
    ):
        train(config(tmp_path / "run", micro_batch_size=2), Widths(evaluation_rows=30))


class OtherNumbers(Problem):
    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        return super().report(outputs, data) | {
            "f1": np.float32(0.5),
            "rank": torch.tensor(3),
            "sum": np.array(2.0),
        }


def test_numbers_of_numpy_and_tensors_are_numbers_in_the_report(tmp_path: Path) -> None:
    train(config(tmp_path / "run"), OtherNumbers())
    evaluation = json.loads((tmp_path / "run/report.json").read_text())["evaluation"]
    assert (evaluation["f1"], evaluation["rank"], evaluation["sum"]) == (0.5, 3, 2.0)
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/f1"] == 0.5


class Masked(RandomRows):
    """Rows of which none counts, as where every answer of a batch was cut away."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.items = np.zeros(rows, dtype=np.int64)


class NothingCounts(Problem):
    def prepare(self, config: RunConfig) -> Datasets:
        return replace(super().prepare(config), train=Masked(self.rows))


def test_a_step_whose_rows_count_nothing_is_a_step_without_a_gradient(tmp_path: Path) -> None:
    train(config(tmp_path / "run", optimizer={"weight_decay": 0.0}), NothingCounts())
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "train/loss" in line]
    assert [line["train/grad_norm"] for line in logged] == [0.0] * 3
    assert [line["train/loss"] for line in logged] == [0.0] * 3


class RoundTheWrapper(Problem):
    """A loss that calls the model inside the strategy's wrapper."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inner: Any = model.module if hasattr(model, "module") else model
        return F.cross_entropy(inner(batch["tokens"]), batch["labels"], reduction="sum")


def refusal(out: Path, task: Problem) -> str:
    """Train on two ranks; what this rank says of the task."""
    with pytest.raises(AgreementError) as refused:
        train(config(out, strategy="ddp", nproc=2), task)
    return str(refused.value)


@pytest.mark.ranks
def test_a_loss_that_goes_round_the_wrapper_ends_the_run_after_its_first_step(
    tmp_path: Path,
) -> None:
    pytest.importorskip("distcore_ddp")
    for said in launch(refusal, tmp_path / "run", RoundTheWrapper(), nproc=2):
        assert "after step 1 rank 1 has not rank 0's weights" in said
        assert "must call model(...)" in said


class OfItsRank(Problem):
    """As many rows on each rank, of the same lengths, and one label of a rank's own."""

    def prepare(self, config: RunConfig) -> Datasets:
        data = super().prepare(config)
        data.train.labels[3] = int(os.environ["RANK"])  # type: ignore[attr-defined]
        return data


@pytest.mark.ranks
def test_ranks_with_other_rows_are_refused_before_the_first_step(tmp_path: Path) -> None:
    pytest.importorskip("distcore_ddp")
    for said in launch(refusal, tmp_path / "run", OfItsRank(), nproc=2):
        assert (
            "of the training rows (what is random in them belongs into at(epoch)): rank 1 differs"
            " from rank 0" in said
        )
    assert not steps_in(tmp_path / "run")


class ReportOfItsRank(Problem):
    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        return super().report(outputs, data) | {"luck": 0.5 + int(os.environ["RANK"]) / 10}


class MetricOfItsRank(Problem):
    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        return super().report(outputs, data) | {f"of {os.environ['RANK']}": 0.5}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("task", "disagreement"),
    [
        (ReportOfItsRank(), "the metric 'luck': 0.5 on rank 0, 0.6 on rank 1"),
        (MetricOfItsRank(), "the names of the metrics: rank 1 differs from rank 0"),
    ],
    ids=["value", "name"],
)
def test_reports_that_differ_between_ranks_are_refused(
    tmp_path: Path, task: Problem, disagreement: str
) -> None:
    pytest.importorskip("distcore_ddp")
    for said in launch(refusal, tmp_path / "run", task, nproc=2):
        assert f"ranks disagree on {disagreement}" in said


class Running(Classifier):
    """Keeps a running mean of what it saw while training, and subtracts it in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        if self.training:
            self.mean.mul_(0.5).add_(logits.detach().float().mean(0), alpha=0.5)
            return logits
        return logits - self.mean


@dataclass(frozen=True, kw_only=True)
class RunningMean(Problem):
    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return Running()


def train_with_running_mean(strategy: str, out: Path) -> float:
    report = train(config(out, strategy=strategy, nproc=2, eval_every=1), RunningMean())
    return float(report["evaluation"]["loss"])


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_running_statistics_mean_the_same_in_a_run_and_in_its_checkpoint(
    strategy: str, tmp_path: Path
) -> None:
    pytest.importorskip(f"distcore_{strategy}")
    losses = launch(train_with_running_mean, strategy, tmp_path / "run", nproc=2)
    assert losses[0] == losses[1]
    from evaluated import evaluate_checkpoint

    saved = config(tmp_path / "again", micro_batch_size=8)
    again = evaluate_checkpoint(saved, tmp_path / "run/checkpoints/step-00000003", RunningMean())
    assert again["evaluation"]["loss"] == pytest.approx(losses[0], rel=1e-6)
