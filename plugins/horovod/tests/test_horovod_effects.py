"""Each option of ``horovod`` has an effect on Horovod itself or on what it sends; one
without it is refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from option_effects import Effect, assert_effects, trains
from torch import Tensor, nn

from distcore import ConfigError, RunConfig, StrategyError
from distcore.resolve.resolve import resolve
from distcore.testing.lab import Job
from distcore.testing.problem import Problem

pytest.importorskip("horovod.torch", reason="Horovod is not built here: distcore-horovod build")

import horovod.torch.optimizer as horovod_optimizer

from distcore_horovod.gradients import group_gradients
from distcore_horovod.library import hvd
from distcore_horovod.strategy import HorovodStrategy

TENSORS = 15
"""Trained parameters of the problem."""


@dataclass
class Sent:
    """What Horovod's optimizer sends: the calls, with the operation, and the dtypes."""

    calls: list[Any] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)


@contextmanager
def noted() -> Iterator[Sent]:
    """Note what the optimizer sends inside the context."""
    sent, names = Sent(), ("allreduce_async_", "grouped_allreduce_async_")
    before = {name: getattr(horovod_optimizer, name) for name in names}

    def noting(send: Any) -> Any:
        def call(
            tensors: Tensor | tuple[Tensor, ...], *arguments: Any, op: Any, **named: Any
        ) -> Any:
            sent.calls.append(op)
            sent.dtypes |= {
                tensor.dtype for tensor in (tensors if isinstance(tensors, tuple) else (tensors,))
            }
            return send(tensors, *arguments, op=op, **named)

        return call

    for name, send in before.items():
        setattr(horovod_optimizer, name, noting(send))
    try:
        yield sent
    finally:
        for name, send in before.items():
            setattr(horovod_optimizer, name, send)


def operations(job: Job) -> set[Any]:
    with noted() as sent:
        job.train(1)
    return set(sent.calls)


def dtypes(job: Job) -> set[torch.dtype]:
    with noted() as sent:
        job.train(1)
    return sent.dtypes


def calls(job: Job) -> int:
    with noted() as sent:
        job.train(1)
    return len(sent.calls)


def fuses(job: Job) -> bool:
    """Return True if Horovod's own log of a step has tensors that it copied
    into the fusion buffer.
    """
    job.train(1)
    return (
        job.run.world.rank == 0
        and "MEMCPY_IN_FUSION_BUFFER" in Path(os.environ["HOROVOD_TIMELINE"]).read_text()
    )


def waits(job: Job) -> bool:
    """Return True if each sum takes as long as a cycle of 100 ms."""
    seconds = []
    for number in range(4):
        start = time.perf_counter()
        hvd.allreduce(torch.ones(1), name=f"timed-{number}", op=hvd.Sum)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]) > 0.06


EFFECTS = {
    "op": Effect(
        measured=operations, default={hvd.Sum}, changed=(({"op": "average"}, {hvd.Average}),)
    ),
    "compression": Effect(
        measured=dtypes,
        default={torch.float32},
        changed=(({"compression": "fp16"}, {torch.float16}),),
    ),
    "groups": Effect(
        measured=calls,
        default=1,
        changed=(({"groups": 4}, 4), ({"groups": 0}, TENSORS), ({"groups": 99}, TENSORS)),
    ),
    "fusion_mb": Effect(measured=fuses, default=True, changed=(({"fusion_mb": 0}, False),)),
    "cycle_ms": Effect(measured=waits, default=False, changed=(({"cycle_ms": 100}, True),)),
    "find_unused": Effect(
        measured=trains,
        problem=Problem(unused=True),
        default=False,
        changed=(({"find_unused": True}, True),),
    ),
}
"""One for each option: a new option comes with its effect. ``adasum`` needs MPI,
which is seldom there.
"""


def test_each_option_has_an_effect_in_the_table() -> None:
    assert EFFECTS.keys() == {each.name for each in fields(HorovodStrategy)}


@pytest.mark.ranks
def test_each_option_has_its_effect(tmp_path: Path) -> None:
    assert_effects(
        "horovod",
        {name: effect for name, effect in EFFECTS.items() if name != "fusion_mb"},
        tmp_path,
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "is_fused"), [({}, True), ({"fusion_mb": 0}, False)], ids=["default", "none"]
)
def test_tensors_are_fused_up_to_the_size_of_the_buffer(
    options: dict[str, Any], is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a launch of its own each, because Horovod can begin its log once in a process."""
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "timeline.json"))
    effect = replace(EFFECTS["fusion_mb"], without=options, default=is_fused, changed=())
    assert_effects("horovod", {"fusion_mb": effect}, tmp_path)


@pytest.mark.parametrize(
    ("groups", "sizes"), [(3, [1, 1, 2]), (4, [1, 1, 1, 1]), (9, [1, 1, 1, 1]), (1, [4])]
)
def test_gradients_are_in_as_many_groups_as_asked_for(groups: int, sizes: list[int]) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    distributed: Any = torch.optim.SGD(parameters, lr=0.1)
    group_gradients(distributed, groups)
    assert [len(group) for group in distributed._group_counts] == sizes


IDLE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"op": "adasum", "groups": 4}, ConfigError, r"groups = 4: has no effect with op = 'adasum'"),
    (
        {"op": "adasum", "find_unused": True},
        ConfigError,
        r"find_unused = true: has no effect with op = 'adasum'",
    ),
    ({"cycle_ms": float("inf")}, StrategyError, r"cycle_ms = inf: expected a finite number"),
    ({"fusion_mb": float("inf")}, StrategyError, r"fusion_mb = inf: expected a finite number"),
]


@pytest.mark.parametrize(
    ("options", "kind", "message"), IDLE, ids=[message[:20] for *_, message in IDLE]
)
def test_an_option_without_effect_is_one_line(
    options: dict[str, Any], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hvd, "mpi_built", lambda: True)
    job: dict[str, Any] = {
        "strategy": "horovod",
        "nproc": 2,
        "device": "cpu",
        "lr": 0.1,
        "out": "never-made",
    }
    config = RunConfig.model_validate(job | {"strategy_options": options, "clip": {"norm": None}})
    with pytest.raises(kind, match=message):
        resolve(config, task=Problem())


def test_a_variable_that_horovod_would_read_in_part_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "64MB")
    with pytest.raises(
        ConfigError, match=r"HOROVOD_FUSION_THRESHOLD = '64MB': expected bytes as a whole number"
    ):
        HorovodStrategy().check_config(RunConfig(device="cpu"))
    HorovodStrategy(fusion_mb=64).check_config(RunConfig(device="cpu"))
