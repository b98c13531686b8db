"""A rank whose peers are gone saves the last whole step: only when that is what it holds, whole, and once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_cases import Disk, saver
from torch import Tensor

import distcore
from distcore.checkpoint import find, read_tensors
from distcore.checkpoint.commit import staging_of
from distcore.checkpoint.rescue import Rescue, can_save_alone, save_alone
from distcore.engine.evaluation import evaluate_sets
from distcore.launchers.processes.failures import Failure
from distcore.launchers.processes.rank import RECORDS, outlives_peers
from distcore.plugin.strategy.contract import Progress
from distcore.plugin.strategy.state import Piece, State


class Plain(distcore.Simple):
    """A model without buffers."""

    def data(self) -> list[Any]:
        rows = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8))
        return [rows, rows]

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 1)

    def row_loss(self, model: torch.nn.Module, batch: Any) -> Tensor:
        loss: Tensor = (model(batch[0])[:, 0] - batch[1]) ** 2
        return loss


LOST = RuntimeError("gloo: Connection closed by peer [127.0.0.1]:1234")


def trained(fails_in: str, error: Exception = LOST, hooked: bool = True) -> tuple[list[int], list[int]]:
    """Train three steps on one weight; in the third ``error`` is raised. Return the steps that came, and were saved."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    run: Any = SimpleNamespace(optimizer=optimizer)
    steps_it = optimizer if hooked else torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1)
    came: list[int] = []
    saved: list[int] = []

    def steps() -> Iterator[Any]:
        for number in range(1, 4):
            if number == 3 and fails_in == "forward":
                raise error
            steps_it.step()
            if number == 3 and fails_in == "after the optimizer":
                raise error
            yield Progress(step=number), None, None

    def fit() -> None:
        with Rescue(run, lambda whole: saved.append(whole.step)) as rescue:
            for progress, _, _ in steps():
                came.append(progress.step)
                if progress.step == 2 and fails_in == "evaluation":
                    raise error
                rescue.is_whole(progress)
                if progress.step == 2 and fails_in == "log":
                    raise error

    with pytest.raises(type(error)):
        fit()
    assert not optimizer._optimizer_step_pre_hooks
    return came, saved


@pytest.mark.parametrize("fails_in", ["forward", "log"])
def test_the_last_whole_step_is_saved(fails_in: str) -> None:
    assert trained(fails_in) == ([1, 2], [2])


@pytest.mark.parametrize("fails_in", ["after the optimizer", "evaluation"])
def test_half_a_step_is_not(fails_in: str) -> None:
    assert trained(fails_in) == ([1, 2], [])


def test_an_optimizer_that_is_not_seen_to_step_is_not_trusted() -> None:
    assert trained("forward", hooked=False) == ([1, 2], [])


def test_an_error_of_its_own_saves_nothing() -> None:
    assert trained("forward", ValueError("a bad row")) == ([1, 2], [])


@pytest.mark.parametrize(("kind", "saved"), [("error", []), ("lost", [2])])
def test_nor_does_that_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, saved: list[int]) -> None:
    monkeypatch.setenv(RECORDS, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    failure = Failure(rank=1, kind=kind, cause="a bad row", when=0.0)
    (tmp_path / "failed-1.json").write_text(json.dumps(asdict(failure)))
    assert trained("forward") == ([1, 2], saved)
    assert not (tmp_path / "outlives-0").exists()  # the launcher waits no longer


def test_the_launcher_waits_while_a_rank_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORDS, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    run: Any = SimpleNamespace(optimizer=optimizer)
    for can in (True, False):
        with Rescue(run, lambda _: None, can):
            assert outlives_peers(tmp_path, 0) is can
        assert not outlives_peers(tmp_path, 0)


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"saves_alone": False}, False),
        ({"size": 1}, False),
        ({"own": True}, False),
        ({"device": "cuda"}, False),
    ],
)
def test_who_may_save_alone(changes: dict[str, Any], can: bool) -> None:
    given: dict[str, Any] = {"saves_alone": True, "size": 2, "own": False, "device": "cpu"} | changes
    run: Any = SimpleNamespace(
        capabilities=SimpleNamespace(saves_alone=given["saves_alone"]),
        world=SimpleNamespace(size=given["size"], device=torch.device(given["device"])),
    )
    assert can_save_alone(run, given["own"]) is can


def test_a_step_is_whole_when_its_evaluation_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume would leave out what was due after the step."""
    told: list[str] = []

    class Telling(Rescue):
        def is_whole(self, progress: Progress) -> None:
            told.append(f"whole {progress.step}")

    def evaluated(*given: Any) -> Any:
        told.append("evaluation")
        return evaluate_sets(*given)

    monkeypatch.setattr("distcore.engine.fit.Rescue", Telling)
    monkeypatch.setattr("distcore.engine.fit.evaluate_sets", evaluated)
    changes = {"eval_every": 2, "eval_at_epoch_end": False, "max_steps": 4, "global_batch_size": 4, "lr": 0.1}
    distcore.train(distcore.RunConfig(out=str(tmp_path / "run"), device="cpu", **changes), Plain())
    assert told == ["whole 1", "evaluation", "whole 2", "whole 3", "evaluation", "whole 4"]


def test_what_is_saved_is_what_a_save_of_all_ranks_has(tmp_path: Path) -> None:
    saving, _ = saver(tmp_path / "all", Disk(), asynchronous=False, task=Plain())
    alone, _ = saver(tmp_path / "alone", Disk(), asynchronous=False, task=Plain())
    best = {"step": 1, "metric": "loss", "value": 0.5}
    saving.save(Progress(step=3, samples=24), best)
    alone.rescue(Progress(step=3, samples=24), best)
    paths = [find("auto", tmp_path / out) for out in ("all", "alone")]
    one, other = (read_tensors(path) for path in paths if path)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    first, second = (json.loads((path / "state.json").read_text()) for path in paths if path)
    assert first | {"config": None} == second | {"config": None}  # which names the run folder


def test_a_full_disk_leaves_nothing_and_raises_nothing(tmp_path: Path) -> None:
    disk = Disk()
    disk.full = True
    saver(tmp_path, disk, asynchronous=False, task=Plain())[0].rescue(Progress(step=3), None)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_checkpoint_of_the_step_stays(tmp_path: Path) -> None:
    saving, _ = saver(tmp_path, Disk(), asynchronous=False, task=Plain())
    saving.save(Progress(step=3), None)
    before = (tmp_path / "checkpoints/step-00000003/manifest.json").read_bytes()
    saving.rescue(Progress(step=3, samples=1), None)
    assert (tmp_path / "checkpoints/step-00000003/manifest.json").read_bytes() == before


def states() -> dict[str, State]:
    whole: State = {"model/weight": torch.ones(4), "optimizer/weight/step": torch.tensor(3.0)}
    piece = Piece(values=torch.ones(2), start=0, shape=(4,))
    nan: Tensor = torch.tensor([1.0, math.nan, 1.0, 1.0])
    return {
        "whole": whole,
        "a part": whole | {"model/weight": piece},
        "not finite": whole | {"model/weight": nan},
        "a buffer": whole | {"model/running_mean": torch.ones(4)},
    }


@pytest.mark.parametrize("case", states())
def test_only_what_is_whole_and_finite_and_no_buffer_is_saved(tmp_path: Path, case: str) -> None:
    module = torch.nn.Linear(4, 1, bias=False)
    final = tmp_path / "checkpoints/step-00000003"
    assert save_alone(SimpleNamespace(module=module), states()[case], final, Disk(), {}) is (case == "whole")  # type: ignore[arg-type]
    assert final.exists() is (case == "whole")
    assert not staging_of(final).exists()


def test_of_several_ranks_one_saves(tmp_path: Path) -> None:
    final = tmp_path / "checkpoints/step-00000003"
    staging_of(final).mkdir(parents=True)
    run: Any = SimpleNamespace(module=torch.nn.Linear(4, 1, bias=False))
    assert not save_alone(run, states()["whole"], final, Disk(), {})
    assert staging_of(final).exists()  # the other one writes on
