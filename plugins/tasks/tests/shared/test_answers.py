"""Answers of a frozen model that are computed once: those of each row alone, at any ranks, cuts
and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from distcore import Datasets, Progress, Run, RunConfig, hookimpl, train
from distcore.checkpoint import read_tensors
from distcore.testing.reference import largest_difference
from distcore_tasks.distillation.task import Distillation
from distcore_tasks.preference.task import Preference

pytestmark = pytest.mark.programs

TESTS = Path(__file__).parents[1]
OPTIONS: dict[str, dict[str, Any]] = {
    "Distils": {
        "data": str(TESTS / "text_classification/rows.json"),
        "tokenizer": {"vocab_size": 200},
    },
    "Prefers": {
        "data": str(TESTS / "preference/pairs.jsonl"),
        "tokenizer": {"vocab_size": 400},
        "max_seq_len": 40,
        "loss": "kto",
        "beta": 0.3,
    },
}
SMALL = {"Distils": {"teacher": "bert-tiny"}, "Prefers": {}}


class Tells:
    """A task that writes the answers of its training rows, and counts how often it
    asks after the start.
    """

    asked: ClassVar[int] = 0

    @hookimpl
    def on_run_start(self, run: Run, progress: Progress, data: Datasets) -> None:
        super().on_run_start(run, progress, data)  # type: ignore[misc]
        rows: Any = data.train
        torch.save(
            getattr(rows, "answers", {}), Path(str(run.config.out), f"answers-{run.world.rank}.pt")
        )
        Tells.asked = 0

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        Path(str(run.config.out), "asked").write_text(str(Tells.asked))

    def consult(
        self, frozen: Mapping[str, Callable[..., Any]], batch: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        answered: dict[str, Tensor] = super().consult(frozen, batch)  # type: ignore[misc]
        Tells.asked += answered is not batch
        return answered


@dataclass(frozen=True, kw_only=True)
class Distils(Tells, Distillation):
    pass


@dataclass(frozen=True, kw_only=True)
class Prefers(Tells, Preference):
    pass


def run(out: Path, task: str, *, once: bool = True, **changes: Any) -> dict[str, Tensor]:
    """Train for two epochs of five steps, without evaluations; return the last checkpoint."""
    config: dict[str, Any] = {
        "task": f"{__file__}:{task}",
        "out": str(out),
        "max_steps": 10,
        "global_batch_size": 4,
        "lr": 0.01,
        "device": "cpu",
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
        "save_every": 5,
        "optimizer": {"eps": 1e-2},
        "task_options": OPTIONS[task] | SMALL[task] | {"consult_once": once},
        "eval_at_epoch_end": False,
        "micro_batch_size": 1,
        "precision": "fp32",
        "prove": "off",  # its copy would ask, too
    }
    train(RunConfig.model_validate(config | changes))
    return dict(read_tensors(out / "checkpoints/step-00000010"))


@pytest.fixture(scope="module", params=["Distils", "Prefers"])
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp(request.param) / "run"
    return request.param, out, run(out, request.param)


def known(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors but for those of key biases, whose gradient is 0 but for rounding."""
    return {
        name: value
        for name, value in weights.items()
        if "key.bias" not in name and "c_attn.bias" not in name
    }


def answers(out: Path, rank: int = 0) -> dict[str, Tensor]:
    told: dict[str, Tensor] = torch.load(out / f"answers-{rank}.pt")
    return told


def test_stored_answers_equal_those_of_each_epoch_bit_for_bit(alone: Any, tmp_path: Path) -> None:
    task, out, weights = alone
    assert answers(out)
    again = run(tmp_path / "each", task, once=False)
    assert not answers(tmp_path / "each")
    assert largest_difference(again, weights)[0] == 0
    in_each, once = (int((folder / "asked").read_text()) for folder in (tmp_path / "each", out))
    assert in_each > 10 * 4  # micro-batches; kto passes over most of them twice
    assert once == 1  # of the sanity check


def test_micro_batches_do_not_change_an_answer(alone: Any, tmp_path: Path) -> None:
    task, out, weights = alone
    other = run(tmp_path / "run", task, micro_batch_size=4)
    assert largest_difference(answers(tmp_path / "run"), answers(out))[0] == 0
    assert largest_difference(other, known(weights))[0] < 1e-5


def test_a_resume_goes_on_bit_for_bit(alone: Any, tmp_path: Path) -> None:
    task, out, weights = alone
    on = run(tmp_path / "run", task, resume=str(out / "checkpoints/step-00000005"))
    assert largest_difference(on, weights)[0] == 0


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp", "distcore-fsdp", "distcore-horovod")
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", pytest.param("horovod", marks=pytest.mark.slow)]
)
def test_ranks_share_the_rows_and_all_have_the_same_answers(
    strategy: str, alone: Any, tmp_path: Path
) -> None:
    task, out, weights = alone
    two = run(tmp_path / "run", task, strategy=strategy, nproc=2)
    for rank in range(2):
        assert largest_difference(answers(tmp_path / "run", rank), answers(out))[0] == 0
    assert largest_difference(two, known(weights))[0] < 1e-5
