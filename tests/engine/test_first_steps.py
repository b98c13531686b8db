"""In its first steps a run compares what its ranks call, and finds whose error ends it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distcore import RunConfig, Simple, TaskError, hookimpl, train
from distcore.distributed.dtensors import sharded_units
from distcore.engine import backend_errors, trainer
from distcore.engine.lockstep import compare_ranks, leaves_of
from distcore.strategies.single import SingleStrategy

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers, the second of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more = nn.Linear(8, 8), nn.Linear(8, 8)
        self.takes = True

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.more(x) if self.takes else x


class TwoRanks:
    """Stands for the hooks of rank 0, which are told what rank 1 would have said."""

    name = "sharded"
    before_backward: Any = None

    def __init__(self, told: list[list[int]]) -> None:
        self.told = told
        self.said: list[list[int]] = []

    def gathering_modules(self, run: Any) -> dict[str, nn.Module]:
        return dict(run.module.named_modules())

    def gather_outputs(self, run: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        mine = outputs["numbers"]
        self.said += mine.tolist()
        other = self.told[len(self.said) - 1]
        return {"numbers": torch.cat([mine, torch.tensor([other])])}


def pass_of(takes: bool, told: list[list[int]], steps: int = 0) -> TwoRanks:
    """Run a forward pass and compare the parameters of its loss, after so many ``steps``."""
    hooks: Any = TwoRanks(told)
    net = Net()
    net.takes = takes
    world = SimpleNamespace(size=2, device=torch.device("cpu"))
    run: Any = SimpleNamespace(module=net, world=world, config=RunConfig())
    with compare_ranks(run, hooks, lambda: steps >= 2):
        loss = net(X).sum()
        if hooks.before_backward:
            hooks.before_backward(loss, False)
            hooks.before_backward(loss, True)
    assert hooks.before_backward is None
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
    return hooks  # type: ignore[no-any-return]


WHOLE = [[0], [1], [2], [3], [1, 1, 1, 1, 0]]
"""What a rank says of a whole pass: the model, both layers, the end; and which parameters."""


def test_ranks_that_call_alike_go_on_and_are_compared_in_the_first_steps_alone() -> None:
    assert pass_of(True, WHOLE).said == WHOLE
    assert pass_of(True, [], steps=2).said == []


@pytest.mark.parametrize(
    ("takes", "told", "line"),
    [
        (True, [[0], [1], [3]], "comes to the module 'more' where rank 1 comes to the end of the"),
        (False, [[0], [1], [2]], "comes to the end of the forward pass where rank 1 comes to the "),
        (True, [[0], [2]], "rank 0 comes to the module 'first' where rank 1 comes to the module "),
        (True, [[1]], "rank 0 comes to the model itself where rank 1 comes to the module 'first'"),
        (
            False,
            [[0], [1], [3], [1, 1, 1, 1, 0]],
            "rank 1 has that of 'more.weight', and rank 0 has not: what forward calls must not",
        ),
        (
            True,
            [[0], [1], [2], [3], [1, 1, 1, 1, 2]],
            "rank 0 has those of 4 parameters, rank 1 those of 6: what forward calls must not",
        ),
    ],
)
def test_ranks_that_call_other_modules_are_told_so(
    takes: bool, told: list[list[int]], line: str
) -> None:
    with pytest.raises(TaskError, match=line) as refusal:
        pass_of(takes, told)
    assert "--strategy single" in str(refusal.value)


def test_the_parameters_of_a_loss_are_found_in_its_graph() -> None:
    net = Net()
    used = {id(leaf) for leaf in leaves_of((net.first(X).sum() * 2).exp())}
    assert used == {id(parameter) for parameter in net.first.parameters()}
    assert not list(leaves_of(X.sum()))
    assert not sharded_units(net)


class Own(Simple):
    """A user's task, whose forward pass may fail by itself."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self._fails = fails

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return TensorDataset(X), TensorDataset(X[:4])

    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        if self._fails and model.training:
            raise RuntimeError("the task is wrong")
        return model(batch[0]).square()[:, 0]


def config(out: Path, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "lr": 1e-2, "max_steps": 4, "global_batch_size": 8, "micro_batch_size": 4, "nproc": 1,
        "device": "cpu", "extensions": {"progress": False, "metrics": False},
        "checkpoints": {"best": None}, "log_level": "error",
    }  # fmt: skip
    return RunConfig(**settings | {"out": str(out / "run")} | changes)


def breaks(
    monkeypatch: pytest.MonkeyPatch, at: int = 0, kind: type[Exception] = RuntimeError
) -> None:
    """Have the strategy fail in a backward pass."""
    calls = list[None]()

    def failing(self: SingleStrategy, run: Any, loss: Tensor) -> Tensor:
        calls.append(None)
        if len(calls) > at:
            raise kind("the backend\ncannot take it")
        loss.backward()
        return loss.detach()

    monkeypatch.setattr(SingleStrategy, "backward", hookimpl(failing), raising=False)


@pytest.mark.parametrize("at", [0, 3])
def test_a_backend_that_fails_where_plain_pytorch_does_not_is_named_in_one_line(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch, at)
    says = (
        "strategy 'single' cannot train this model as it is: RuntimeError: the backend cannot take "
        "it, where one plain process computes the same rows; .*; traceback in .*rank-0.txt; .*$"
    )
    with pytest.raises(TaskError, match=says) as refusal:
        train(config(tmp_path), Own())
    assert refusal.value.exit_code == 2
    assert "the backend" in (tmp_path / "run/errors/rank-0.txt").read_text()


def test_an_error_without_words_is_told_by_its_place() -> None:
    with pytest.raises(AssertionError) as error:
        assert not X.numel()
    error.value.args = ()
    told = backend_errors._describe(error.value)
    assert re.fullmatch(r"AssertionError in test_an_\w+\(\), test_first_steps.py:\d+", told)


def breaks_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the strategy fail where a second model would not fit."""
    breaks(monkeypatch)
    monkeypatch.setattr(backend_errors, "COPIES", 1e15)


CAUSES: dict[str, Any] = {
    "the task": lambda patch: Own(fails=True),
    "a third step": partial(breaks, at=4),
    "memory": partial(breaks, kind=MemoryError),
    "a peer": partial(breaks, kind=ConnectionResetError),
    "a large model": breaks_a_large_model,
}


@pytest.mark.parametrize("cause", CAUSES)
def test_another_error_stays_as_it_is(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = CAUSES[cause](monkeypatch)
    with pytest.raises(Exception, match=r"wrong|cannot take") as error:
        train(config(tmp_path), task if isinstance(task, Own) else Own())
    assert not isinstance(error.value, TaskError)


def test_without_a_proof_an_error_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    with pytest.raises(Exception, match="cannot take it") as error:
        train(config(tmp_path, prove="off"), Own())
    assert not isinstance(error.value, TaskError)


class Listens:
    """An extension that fails after a step."""

    @hookimpl
    def on_step_end(self) -> None:
        raise KeyError("of the extension")


def test_an_error_of_a_listener_is_none_of_the_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "load_extensions", lambda config: {"mine": Listens()})
    with pytest.raises(Exception, match="of the extension") as error:
        train(config(tmp_path), Own())
    assert not isinstance(error.value, TaskError)
