"""The loop itself: the order of hooks, what a step costs in Python, and that gradients are
what they should be.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pluggy
import pytest
import torch

import distcore
from distcore import Progress, Run, RunConfig, hookimpl, train
from distcore.engine import trainer
from distcore.engine.build import build_run
from distcore.engine.loop import steps
from distcore.engine.seeding import seed_step
from distcore.engine.shares import terms_of
from distcore.errors import AgreementError, StrategyError
from distcore.model.row_dropout import RowMasks
from distcore.plugin.batching.sampling import BatchPlan, rank_sampler
from distcore.plugin.strategy.contract import RankInfo, World
from distcore.plugin.strategy.hooks import EVENTS, OPERATIONS, Hooks
from distcore.resolve import strategies
from distcore.resolve.resolve import resolve
from distcore.strategies.single import SingleStrategy
from distcore.testing.problem import Problem

CORE = str(Path(distcore.__file__).parent)
MODEL = f"{CORE}/testing"  # of the problem, which is not ours
PLUGGY = str(Path(pluggy.__file__).parent)


def config_of(tmp_path: Path, **changes: object) -> RunConfig:
    base = {
        "out": str(tmp_path / "run"),
        "lr": 0.01,
        "global_batch_size": 8,
        "device": "cpu",
        "max_steps": 2,
    }
    resolved = resolve(
        RunConfig.model_validate(base | {"extensions": {"progress": False}} | changes),
        1,
        task=Problem(),
    )
    return resolved.config.model_copy(
        update={"task": "auto", "task_options": {}}
    )  # those of the task that each test gives


class Recorder:
    """Writes down every hook that is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wrap(self, hooks: Hooks) -> Hooks:
        for name in (*OPERATIONS, *EVENTS):
            setattr(hooks, name, self._heard(name, getattr(hooks, name)))
        return hooks

    def _heard(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def heard(*arguments: object) -> object:
            self.calls.append(name)
            return call(*arguments)

        return heard


def test_the_order_of_all_hooks_of_a_run_of_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(
        "distcore.engine.trainer.Hooks", lambda *arguments: recorder.wrap(Hooks(*arguments))
    )
    train(
        config_of(tmp_path, micro_batch_size=4, data_guard_steps=1, log_every=2), Problem(rows=16)
    )
    micro_batch = ["accumulate", "backward"]
    assert recorder.calls == [
        *("setup", "build_model", "wrap_model"),
        # the world, the run folder, what ranks agree on
        *("gather_outputs", "gather_outputs", "gather_outputs"),
        # what to resume from; the run folder is written
        *("gather_outputs", "gather_outputs", "gather_outputs"),
        # one micro-batch is evaluated; the training's
        *("on_run_start", "build_sampler", "build_sampler"),
        "on_epoch_start",
        # the rows of the first step
        *("gather_outputs", *micro_batch, *micro_batch, "step", "on_step_end"),
        *(*micro_batch, *micro_batch, "step", "on_step_end", "on_epoch_end"),
        *("reduce_loss", "on_log"),
        *("build_sampler", "gather_outputs", "on_evaluation_end"),
        *("save_checkpoint", "gather_outputs"),  # is there room
        # the weights are those of the model; the save begins
        *("gather_outputs", "gather_outputs", "on_checkpoint"),
        *("gather_outputs", "gather_outputs", "on_run_end"),  # peak memory; the report is written
        "teardown",
    ]


def run_of(tmp_path: Path, **changes: object) -> tuple[Run, Hooks, Problem]:
    config = config_of(tmp_path, data_guard_steps=0, schedule={"name": "constant"}, **changes)
    hooks, problem = Hooks("single", strategies.load_strategy(config).plugin), Problem()
    return (
        build_run(config, hooks, hooks.setup(config, RankInfo()), problem, problem.prepare(config)),
        hooks,
        problem,
    )


def test_a_step_takes_at_most_57_python_calls_of_ours_and_pluggy(tmp_path: Path) -> None:
    run, hooks, problem = run_of(tmp_path, max_steps=6)
    calls: list[str] = []

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith((CORE, PLUGGY)) and not file.startswith(MODEL):
            calls.append(frame.f_code.co_name)

    training = steps(run, hooks, problem, problem.prepare(run.config).train, Progress())
    next(training)
    sys.setprofile(profile)
    next(training)
    sys.setprofile(None)
    assert len(calls) <= 57, calls


def test_four_frames_and_two_files_at_most_lie_between_the_loop_and_forward(tmp_path: Path) -> None:
    run, hooks, problem = run_of(tmp_path)
    seen: list[tuple[str, str]] = []
    here = sys._getframe()

    def forward_hook(*_: object) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not here:
            if frame.f_code.co_filename.startswith(CORE):
                seen.append((frame.f_code.co_name, frame.f_code.co_filename))
            frame = frame.f_back

    run.model.register_forward_pre_hook(forward_hook)
    next(steps(run, hooks, problem, problem.prepare(run.config).train, Progress()))
    names = [name for name, _ in seen]
    assert names == ["loss", "scaled", "train_step", "steps"]
    assert len({file for _, file in seen}) == 2


class Strategy(SingleStrategy):
    """One process, broken by a test."""


def train_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: object
) -> Iterator[object]:
    monkeypatch.setattr(
        "distcore.resolve.strategies.build",
        lambda kind, *_: strategy if kind == "strategy" else None,
    )
    return train(config_of(tmp_path), Problem())  # type: ignore[return-value]


def test_the_data_guard_sees_a_sampler_that_drops_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drops(Strategy):
        @hookimpl
        def build_sampler(self, run, plan):
            return rank_sampler(plan, 0, 2)

    with pytest.raises(
        AgreementError, match=r"share out the global batch: 0 rows on several ranks, [1-7] on none"
    ):
        train_broken(tmp_path, monkeypatch, Drops())


def test_an_evaluation_that_returns_rows_twice_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubles(Strategy):
        @hookimpl
        def gather_outputs(self, outputs):
            twice = "prediction" in outputs
            return {
                name: torch.cat([rows, rows]) if twice else rows for name, rows in outputs.items()
            }

    with pytest.raises(
        AgreementError,
        match="evaluation returned 22 rows, 11 of them different, for a dataset of 11",
    ):
        train_broken(tmp_path, monkeypatch, Doubles())


def test_a_backend_that_falls_back_to_fewer_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # keep this process's environment
    monkeypatch.setattr("distcore.engine.trainer.export", lambda _rank_info: None)
    with pytest.raises(AgreementError, match="2 ranks were started but it reports a world of 1"):
        trainer.train(
            resolve(config_of(tmp_path), 1, task=Problem()),
            RankInfo(rank=0, size=2, launcher="local"),
        )


def test_processes_of_a_loader_can_unpickle_the_sampler() -> None:
    plan = BatchPlan(lengths=np.arange(1, 9), global_batch=4, micro_batch=2, seed=0)
    sampler = pickle.loads(pickle.dumps(rank_sampler(plan, 0, 2)))
    assert [micro.indices.tolist() for micro in sampler(0, 1)] == [
        m.indices.tolist() for m in plan.split(0, 1, 0, 2)
    ]


@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_that_there_is_not_is_named(shard: int) -> None:
    plan = BatchPlan(lengths=np.arange(1, 9), global_batch=4, micro_batch=2, seed=0)
    with pytest.raises(
        StrategyError, match=rf"hook build_sampler\(\): shard {shard} of 2; expected 0 to 1"
    ):
        rank_sampler(plan, shard, 2)


def test_the_masks_of_rows_have_another_key_in_each_step_and_for_each_seed() -> None:
    keys = []
    for seed, step in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        masks, world = RowMasks(), World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
        run: Any = SimpleNamespace(config=RunConfig(seed=seed), world=world)
        seed_step(run, step, masks)
        keys.append(masks.key)
    assert len(set(keys)) == 4


def test_the_seed_of_a_step_never_changes() -> None:
    """A resume would draw other dropout masks than the run that it continues."""
    world = World(rank=3, size=4, local_rank=3, device=torch.device("cpu"))
    run: Any = SimpleNamespace(config=RunConfig(seed=7), world=world)
    masks = RowMasks()
    seed_step(run, 5, masks)
    mixed = 7 * 0x9E3779B97F4A7C15 + 5 * 0xBF58476D1CE4E5B9
    assert masks.key == (mixed + 1) % 2**63
    assert torch.initial_seed() == (mixed + 3 * 0x94D049BB133111EB) % 2**63


def test_a_further_term_of_the_loss_is_a_mean_over_its_own_items() -> None:
    run: Any = SimpleNamespace(loss_multiplier=6.0)
    counts = {"words": np.array([1, 2, 5]), "none": np.zeros(3, dtype=int)}
    made = terms_of(run, counts, np.array([0, 1]))
    assert {name: factor for name, (factor, _) in made.items()} == {"words": 2.0, "none": 0.0}
    assert made["words"][1] is counts["words"]
