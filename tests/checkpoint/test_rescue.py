"""A rank whose peers are gone saves the last whole step: only when that is what it
holds, whole, and once.
"""

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
from distcore.checkpoint import Checkpoint, find, read_tensors
from distcore.checkpoint.commit import STAGING, clean_up, staging_of
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


def trained(
    fails_in: str, error: Exception = LOST, hooked: bool = True
) -> tuple[list[int], list[int]]:
    """Train three steps on one weight; in the third ``error`` is raised. Return the steps that
    came, and were saved.
    """
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
def test_half_a_step_is_not_saved(fails_in: str) -> None:
    assert trained(fails_in) == ([1, 2], [])


def test_an_optimizer_that_is_not_seen_to_step_is_not_trusted() -> None:
    assert trained("forward", hooked=False) == ([1, 2], [])


def test_an_error_of_its_own_saves_nothing() -> None:
    assert trained("forward", ValueError("a bad row")) == ([1, 2], [])


@pytest.mark.parametrize(("kind", "saved"), [("error", []), ("lost", [2])])
def test_an_error_of_a_peer_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, saved: list[int]
) -> None:
    monkeypatch.setenv(RECORDS, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    failure = Failure(rank=1, kind=kind, cause="a bad row", when=0.0)
    (tmp_path / "failed-1.json").write_text(json.dumps(asdict(failure)))
    assert trained("forward") == ([1, 2], saved)
    assert not (tmp_path / "outlives-0").exists()  # the launcher waits no longer


def test_the_launcher_waits_while_a_rank_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    given: dict[str, Any] = {
        "saves_alone": True,
        "size": 2,
        "own": False,
        "device": "cpu",
    } | changes
    run: Any = SimpleNamespace(
        capabilities=SimpleNamespace(saves_alone=given["saves_alone"]),
        world=SimpleNamespace(size=given["size"], device=torch.device(given["device"])),
    )
    assert can_save_alone(run, given["own"]) is can


def test_a_step_is_whole_when_its_evaluation_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume would leave out what was due after the step."""
    told: list[str] = []

    class Telling(Rescue):
        def is_whole(self, progress: Progress) -> None:
            told.append(f"whole {progress.step}")

    def evaluated(*given: Any) -> Any:
        told.append("evaluation")
        return evaluate_sets(*given)

    monkeypatch.setattr("distcore.engine.fit.Rescue", Telling)
    monkeypatch.setattr("distcore.engine.training.evaluate_sets", evaluated)
    changes = {
        "eval_every": 2,
        "eval_at_epoch_end": False,
        "max_steps": 4,
        "global_batch_size": 4,
        "lr": 0.1,
    }
    distcore.train(distcore.RunConfig(out=str(tmp_path / "run"), device="cpu", **changes), Plain())
    assert told == ["whole 1", "evaluation", "whole 2", "whole 3", "evaluation", "whole 4"]


def test_a_rescued_checkpoint_equals_a_save_of_all_ranks(tmp_path: Path) -> None:
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


def held_by(rank: int = 0) -> Any:
    """Return a run of four ranks after its first step."""
    module = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    world = SimpleNamespace(rank=rank, size=4)
    return SimpleNamespace(module=module, optimizer=optimizer, world=world, base=None, ema=None)


WHOLE: State = {
    "model/weight": torch.arange(4.0)[None],
    "optimizer/weight/momentum_buffer": torch.ones(1, 4),
}


def part_of(half: int, replica: bool) -> State:
    """Return the state that a rank of two shards holds."""
    return {
        name: Piece(
            values=value.flatten()[2 * half : 2 * half + 2],
            start=2 * half,
            shape=(1, 4),
            replica=replica,
        )
        for name, value in WHOLE.items()
        if isinstance(value, Tensor)
    }


def states() -> dict[str, State]:
    nan: Tensor = torch.tensor([[1.0, math.nan, 1.0, 1.0]])
    return {
        "whole": WHOLE,
        "a part": part_of(0, replica=False),
        "the model whole, moments in parts": (
            part_of(0, replica=False) | {"model/weight": WHOLE["model/weight"]}
        ),
        "without moments": {"model/weight": WHOLE["model/weight"]},
        "not finite": WHOLE | {"model/weight": nan},
        "a buffer": WHOLE | {"model/running_mean": torch.ones(4)},
    }


@pytest.mark.parametrize("case", states())
def test_a_state_that_is_not_whole_and_finite_is_not_saved(tmp_path: Path, case: str) -> None:
    final = tmp_path / "checkpoints/step-00000003"
    assert save_alone(held_by(), states()[case], final, Disk(), {}) is (case == "whole")
    assert final.exists() is (case == "whole")


def test_one_of_several_ranks_saves(tmp_path: Path) -> None:
    final = tmp_path / "checkpoints/step-00000003"
    assert [save_alone(held_by(rank), WHOLE, final, Disk(), {}) for rank in (1, 2)] == [True, False]
    assert [path.name for path in final.parent.iterdir()] == [final.name]


@pytest.mark.parametrize(
    "left", [[(0, True), (1, False)], [(1, False), (1, True), (0, True)], [(0, False), (0, True)]]
)
def test_ranks_that_hold_all_shards_complete_it_together(
    tmp_path: Path, left: list[tuple[int, bool]]
) -> None:
    final = tmp_path / "checkpoints/step-00000003"
    done = [
        save_alone(held_by(rank), part_of(half, replica), final, Disk(), {"progress": {"step": 3}})
        for rank, (half, replica) in enumerate(left, 1)
    ]
    all_halves = len({half for half, _ in left}) == 2
    assert done == [False] * (len(left) - 1) + [all_halves]
    assert final.exists() is all_halves
    if all_halves:
        saved = read_tensors(final)
        assert saved.keys() == WHOLE.keys()
        assert all(
            torch.equal(saved[name], value)
            for name, value in WHOLE.items()
            if isinstance(value, Tensor)
        )
        Checkpoint(final).verify()
    clean_up(Disk(), final.parent)
    assert [path.name for path in final.parent.iterdir()] == [final.name] * all_halves


@pytest.mark.parametrize("what", ["gathered", "frozen and gathered", "averaged"])
def test_parts_that_may_not_be_all_are_not_saved(tmp_path: Path, what: str) -> None:
    """A step that failed can leave a weight gathered, in another dtype; it is none
    that the optimizer steps.
    """
    final = tmp_path / "checkpoints/step-00000003"
    for rank in (0, 1):
        run, state = held_by(rank), part_of(rank, replica=False)
        if what == "gathered":
            run.module.weight = torch.nn.Parameter(run.module.weight.detach().clone())
        elif what == "averaged":
            run.ema = {"ema/weight": torch.ones(1, 4)}
        else:
            run.module.register_parameter(
                "frozen", torch.nn.Parameter(torch.ones(2), requires_grad=False)
            )
            state["model/frozen"] = torch.ones(2)
        assert not save_alone(run, state, final, Disk(), {})
    assert not final.parent.exists()


def test_a_rank_waits_for_its_turn_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distcore.checkpoint.rescue.LONGEST_TURN", 0.1)
    final = tmp_path / "checkpoints/step-00000003"
    turn = final.with_name(f"{STAGING}turn-{final.name}")
    turn.mkdir(parents=True)
    assert not save_alone(held_by(), WHOLE, final, Disk(), {})
    turn.rmdir()
    assert save_alone(held_by(), WHOLE, final, Disk(), {})


def test_a_save_of_all_ranks_that_has_begun_is_left_alone(tmp_path: Path) -> None:
    final = tmp_path / "checkpoints/step-00000003"
    staging_of(final).mkdir(parents=True)
    assert save_alone(held_by(), WHOLE, final, Disk(), {})
    assert staging_of(final).exists()
