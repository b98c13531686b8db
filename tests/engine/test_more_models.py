"""Additional terms of a loss, frozen models and losses over the global batch, in whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distcore import (
    INITIAL,
    Capabilities,
    ConfigError,
    Datasets,
    FrozenModel,
    PreparedModel,
    RunConfig,
    TaskError,
    hookimpl,
    load_config,
    train,
)
from distcore.checkpoint import Checkpoint, read_tensors
from distcore.errors import CheckpointError
from distcore.plugin.task.bound import BoundTask
from distcore.resolve.check_capabilities import check_task
from distcore.strategies.single import SingleStrategy
from distcore.testing.problem import Classifier, Problem, RandomRows
from distcore.testing.reference import largest_difference
from distcore.testing.variants import Referenced, TwoTerms, WholeBatch


def run(out: Path, task: Any, **changes: Any) -> list[dict[str, Any]]:
    """The log lines of a run."""
    config: dict[str, Any] = {
        "out": str(out),
        "lr": 1e-2,
        "max_steps": 4,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "device": "cpu",
        "log_every": 1,
        "optimizer": {"eps": 1e-2},
        "extensions": {"progress": False},
    }
    train(RunConfig(**config | changes), task)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def last(out: Path) -> Path:
    return max((out / "checkpoints").iterdir())


@pytest.mark.needs("distcore-fsdp")
@pytest.mark.ranks
@pytest.mark.parametrize(
    "task", [TwoTerms(), Referenced(), WholeBatch()], ids=lambda task: type(task).__name__
)
def test_a_run_ends_alike_in_one_process_and_sharded_over_two(
    task: Problem, tmp_path: Path
) -> None:
    one = run(tmp_path / "one", task, micro_batch_size=8)
    two = run(tmp_path / "two", task, strategy="fsdp", nproc=2)
    for name in (
        "train/loss",
        "train/grad_norm",
        *(f"train/{name}" for name in getattr(task, "logs", ())),
    ):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-5)
    assert (
        largest_difference(
            read_tensors(last(tmp_path / "two")), read_tensors(last(tmp_path / "one"))
        )[0]
        <= 1e-5
    )


@pytest.mark.needs("distcore-ddp", "distcore-fsdp")
@pytest.mark.ranks
def test_a_run_beside_a_frozen_model_goes_on_under_another_strategy(tmp_path: Path) -> None:
    run(tmp_path / "whole", Referenced())
    run(tmp_path / "cut", Referenced(), strategy="ddp", nproc=2, save_every=2)
    resume = str(tmp_path / "cut/checkpoints/step-00000002")
    run(tmp_path / "on", Referenced(), strategy="fsdp", nproc=2, resume=resume)
    assert (
        largest_difference(
            read_tensors(last(tmp_path / "on")), read_tensors(last(tmp_path / "whole"))
        )[0]
        <= 1e-5
    )


@dataclass(frozen=True, kw_only=True)
class Taught(Referenced):
    """By a model of its own, of this seed."""

    taught_by: int = 1

    def frozen(self, config: RunConfig, data: Datasets) -> Any:
        def teacher(config: RunConfig, data: Datasets) -> nn.Module:
            torch.manual_seed(self.taught_by)
            return Classifier()

        return {"reference": FrozenModel(teacher)}


class FreelyTaught(Taught):
    """By another one in a resumed run, if nothing but its options counted."""

    on_resume: ClassVar = {"taught_by": "free"}


def test_a_resume_beside_another_frozen_model_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", FreelyTaught())
    named = Checkpoint(last(tmp_path / "run")).job_state()["frozen"]["reference"]
    assert named["what"] == "a Classifier of the task"
    with pytest.raises(
        CheckpointError, match=r"beside a Classifier of the task as its frozen model 'reference'"
    ):
        run(tmp_path / "run", FreelyTaught(taught_by=2), resume="auto")


def test_the_frozen_model_has_no_gradient_and_stays_as_it_was(tmp_path: Path) -> None:
    frozen: list[nn.Module] = []

    class Keeps(Referenced):
        def consult(
            self, models: Mapping[str, Callable[..., Tensor]], batch: dict[str, Tensor]
        ) -> dict[str, Tensor]:
            frozen[:] = [models["reference"]]  # type: ignore[list-item]
            return super().consult(models, batch)

    run(tmp_path / "run", Keeps())
    (model,) = frozen
    assert not model.training
    assert all(
        parameter.grad is None and not parameter.requires_grad for parameter in model.parameters()
    )
    torch.manual_seed(0)
    before = dict(Classifier().named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_a_strategy_wraps_a_frozen_model_as_that_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped: list[bool] = []

    @hookimpl
    def wrap_model(self: Any, run: Any, model: nn.Module, make_optimizer: Any) -> PreparedModel:
        wrapped.append(run.module is model)
        return PreparedModel(model=model, optimizer=make_optimizer and make_optimizer(model))

    monkeypatch.setattr(SingleStrategy, "wrap_model", wrap_model, raising=False)
    run(tmp_path / "run", Referenced())
    assert wrapped == [True, True]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"reference": "first"},
            r"frozen\(\) returned str as 'reference'; expected a FrozenModel or INITIAL",
        ),
        ({"reference": nn.Identity()}, r"frozen\(\) returned Identity as 'reference'"),
    ],
)
def test_a_frozen_that_is_no_model_is_refused(
    given: dict[str, Any], line: str, tmp_path: Path
) -> None:
    task = Referenced()
    object.__setattr__(task, "frozen", lambda config, data: given)
    with pytest.raises(TaskError, match=line):
        run(tmp_path / "run", task)


def test_frozen_without_consult_is_refused(tmp_path: Path) -> None:
    class Silent(Problem):
        def frozen(self, config: RunConfig, data: Datasets) -> Any:
            return {"reference": INITIAL}

    with pytest.raises(TaskError, match=r"task Silent: has frozen\(\) but no consult\(\)"):
        run(tmp_path / "run", Silent())


@pytest.mark.parametrize(
    ("task", "has"),
    [(Referenced(), "frozen models"), (WholeBatch(), "a loss over the global batch")],
)
def test_a_pipeline_refuses_them_before_ranks_start(task: Problem, has: str) -> None:
    declared = Capabilities(spec_version=3, calls_any_time=False)
    with pytest.raises(
        ConfigError,
        match=rf"has {has}, and strategy 'piped' with these options calls the model in a",
    ):
        check_task(load_config(None, {"strategy": "piped"}), declared, BoundTask.wrap(task))
    check_task(load_config(None, {"strategy": "piped"}), declared, BoundTask.wrap(Problem()))


def test_a_term_that_is_not_declared_is_refused(tmp_path: Path) -> None:
    class Undeclared(TwoTerms):
        logs = ("right",)

    with pytest.raises(
        TaskError,
        match=r"loss\(\) returned the term 'size', which `logs` of the task does not name",
    ):
        run(tmp_path / "run", Undeclared())


@pytest.mark.parametrize("names", [("loss",), ("size", "size")])
def test_a_name_that_a_log_line_has_already_is_refused(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    task = type("Doubled", (Problem,), {"logs": names})()
    with pytest.raises(
        TaskError, match=rf"logs: '{names[0]}' is the name of two values of a log line"
    ):
        run(tmp_path / "run", task)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ({}, r"embed\(\) returned dict; expected a dict of tensors"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(3)},
            r"embed\(\) returned \['a', 'b'\] of unlike rows",
        ),
        ({"a": torch.zeros(1, requires_grad=True)}, r"embed\(\) returned 1 rows for 2"),
    ],
)
def test_wrong_embeddings_are_refused(answer: dict[str, Tensor], line: str, tmp_path: Path) -> None:
    class Wrong(WholeBatch):
        def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return answer

    with pytest.raises(TaskError, match=line):
        run(tmp_path / "run", Wrong())


def test_the_two_passes_of_a_global_batch_draw_the_same_masks(tmp_path: Path) -> None:
    drawn: list[Tensor] = []
    seeds: list[int] = []

    class Notes(WholeBatch):
        def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            seeds.append(torch.initial_seed())
            embeddings = super().embed(model, batch)
            if model.training:
                drawn.append(embeddings["logits"].detach())
            return embeddings

    run(tmp_path / "run", Notes(dropout=0.5), max_steps=1, data_guard_steps=0)
    first, last_one, second = drawn[:3], drawn[3], drawn[4:]
    assert len(second) == 3  # the last micro-batch is embedded once
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not any(torch.equal(one, last_one) for one in first)
    # Those that an earlier version drew, too.
    assert seeds[:4] == [(seeds[0] + number * 0x94D049BB133111EB) % 2**63 for number in range(4)]


class FromTheRight(RandomRows):
    """Rows with padding before their tokens."""

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        batch = super().batch(indices)
        tokens = batch["tokens"].flip(1)
        return batch | {"tokens": tokens, "attention_mask": (tokens != 0).long()}


class DropsTokens(nn.Module):
    """Dropout of the vector of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.dropout = (
            nn.Embedding(32, 16),
            nn.Linear(16, 4),
            nn.Dropout(0.5),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.embedding(tokens)) * (tokens != 0).unsqueeze(-1)
        logits: Tensor = self.head(hidden.sum(1))
        return logits


class PadsLeft(Problem):
    def prepare(self, config: RunConfig) -> Datasets:
        return Datasets(train=FromTheRight(32), evaluation=FromTheRight(4), test=FromTheRight(4))

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return DropsTokens()


class PadsLeftOfAll(PadsLeft, WholeBatch):
    """The same with a loss over the global batch."""


@pytest.mark.programs
@pytest.mark.parametrize(
    "task", [PadsLeft(), PadsLeftOfAll()], ids=lambda task: type(task).__name__
)
def test_dropout_is_by_row_with_padding_at_the_left(task: Problem, tmp_path: Path) -> None:
    whole, cut = (run(tmp_path / str(size), task, micro_batch_size=size) for size in (8, 1))
    assert [line["train/loss"] for line in cut] == pytest.approx(
        [line["train/loss"] for line in whole], rel=1e-5
    )


@pytest.mark.programs
@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_each_copy_of_a_row_has_a_gradient_of_its_own(
    micro_batch_size: int, tmp_path: Path
) -> None:
    began: list[nn.Module] = []

    class Placed(WholeBatch):
        def prepare(self, config: RunConfig) -> Datasets:
            data = super().prepare(config)
            twice: Any = data.train
            twice.row_order = lambda seed, epoch: np.repeat(np.arange(len(twice) // 2)[::-1], 2)
            return data

        def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            began.append(deepcopy(model))
            return super().embed(model, batch)

        def batch_loss(self, embeddings: dict[str, Tensor], rows: Tensor) -> Tensor:
            return (embeddings["loss"] * torch.arange(1, len(rows) + 1)).mean()

    task = Placed()
    (line,) = run(
        tmp_path / "run", task, max_steps=1, micro_batch_size=micro_batch_size, data_guard_steps=0
    )
    rows = np.repeat(np.arange(21, 25), 2)
    loss = task.batch_loss(
        task.embed(began[0], task.prepare(RunConfig()).train.batch(rows)), torch.as_tensor(rows)
    )
    trained = [parameter for parameter in began[0].parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trained)
    assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    assert line["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
