"""A loop of one's own: the example of its page against a run of ``distcore
train``, and broken uses.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import distcore
from distcore import ConfigError, DistcoreError, RankInfo, RunConfig, TaskError, launch, train
from distcore.checkpoint import read_tensors
from distcore.testing.problem import Problem
from distcore.testing.reference import largest_difference

PAGE = Path(__file__).parents[2] / "docs/session.md"
X = torch.linspace(-3, 3, 200)[:, None]
SETTINGS: dict[str, Any] = {
    "strategy": "single",
    "lr": 1e-2,
    "global_batch_size": 16,
    "micro_batch_size": 4,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example of the page."""
    example = re.search(r"```python\n(# own_loop\.py\n.*?)```", PAGE.read_text(), re.S)
    assert example is not None
    folder = tmp_path_factory.mktemp("own-loop")
    (folder / "own_loop.py").write_text(example[1])
    return folder


def run(folder: Path, *command: str) -> dict[int, float]:
    """Run a program with the example; return the loss by step that rank 0 printed. Raises
    for a failed one.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise ChildProcessError(done.stderr)
    return {
        int(step): float(loss) for step, loss in (line.split() for line in done.stdout.splitlines())
    }


def last(out: Path) -> dict[str, Tensor]:
    return dict(read_tensors(max((out / "checkpoints").iterdir())))


class SameJob(distcore.Simple):
    """The example's job as a task of ``distcore train``."""

    def __init__(self, example: ModuleType) -> None:
        self.example = example

    def data(self) -> list[Dataset[Any]]:
        return [TensorDataset(X, X.sin())] * 2

    def model(self) -> nn.Module:
        model: nn.Module = self.example.build()
        return model

    def row_loss(self, model: nn.Module, batch: Any) -> Tensor:
        losses: Tensor = (model(batch[0]) - batch[1]).square().sum(dim=1)
        return losses


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Losses and last checkpoint of the same job, by ``distcore train`` on one process."""
    example = ModuleType("own_loop")
    exec((folder / "own_loop.py").read_text(), vars(example))
    settings = {
        "strategy": "single",
        "out": str(folder / "train"),
        "max_steps": 12,
        "lr": 1e-2,
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "device": "cpu",
        "log_every": 1,
        "extensions": {"progress": False},
    }
    train(distcore.load_config(None, settings), SameJob(example))
    lines = [json.loads(line) for line in (folder / "train/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}, last(
        folder / "train"
    )


@pytest.mark.programs
def test_the_loop_of_the_page_equals_train(folder: Path, trained: Any) -> None:
    losses = run(folder, "python", "own_loop.py", "single", "one")
    assert losses == pytest.approx(trained[0], rel=1e-6)
    assert largest_difference(last(folder / "one"), trained[1])[0] == 0


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp", "distcore-fsdp", "distcore-deepspeed", "distcore-horovod")
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "horovod",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "deepspeed:3")),
    ],
)
def test_a_session_on_two_ranks_trains_as_the_trainer(
    strategy: str, folder: Path, trained: Any
) -> None:
    losses = run(folder, "torchrun", "--nproc-per-node", "2", "own_loop.py", strategy, strategy)
    assert losses == pytest.approx(trained[0], rel=1e-6)
    assert largest_difference(last(folder / strategy), trained[1])[0] < 1e-6


INTERRUPTED = """
import sys, own_loop
calls, whole = [], own_loop.loss
def loss(model, batch):
    calls.append(1)
    if len(calls) > 4 * 7 // int(sys.argv[1]):
        sys.exit(3)
    return whole(model, batch)
own_loop.loss = loss
own_loop.main(*sys.argv[2:])
"""


@pytest.mark.ranks
@pytest.mark.needs("distcore-fsdp", "distcore-deepspeed", "distcore-horovod")
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("single", 1),
        *(
            pytest.param(name, 2, marks=pytest.mark.slow)
            for name in ("fsdp", "deepspeed", "deepspeed:3", "horovod")
        ),
    ],
)
def test_an_interrupted_loop_goes_on_bit_for_bit(strategy: str, ranks: int, folder: Path) -> None:
    (folder / "interrupted.py").write_text(INTERRUPTED)
    start = ("torchrun", "--nproc-per-node", str(ranks)) if ranks > 1 else ("python",)
    whole = run(folder, *start, "own_loop.py", strategy, f"whole-{strategy}")
    with pytest.raises(ChildProcessError):
        run(folder, *start, "interrupted.py", str(ranks), strategy, f"cut-{strategy}")
    assert [path.name for path in (folder / f"cut-{strategy}/checkpoints").glob("step*")] == [
        "step-00000005"
    ]
    on = run(folder, *start, "own_loop.py", strategy, f"cut-{strategy}")
    assert on == {step: loss for step, loss in whole.items() if step > 5}
    assert (
        largest_difference(last(folder / f"cut-{strategy}"), last(folder / f"whole-{strategy}"))[0]
        == 0
    )


def config_of(out: Path, **changes: Any) -> RunConfig:
    settings = {
        "out": str(out),
        "max_steps": 4,
        "global_batch_size": 8,
        "device": "cpu",
        "strategy": "single",
    }
    return distcore.load_config(None, settings | changes)


def linear() -> nn.Module:
    return nn.Linear(1, 1)


def squared(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).square().sum()
    return loss


def loop(out: Path, use: Callable[[Any, Any], object], **changes: Any) -> None:
    with distcore.Session(config_of(out, **changes), linear, TensorDataset(X, X.sin())) as session:
        for step in session:
            use(session, step)


def test_a_dataset_of_ours_counts_its_own_items(tmp_path: Path) -> None:
    problem = Problem(rows=16)
    config = config_of(tmp_path / "session", lr=1e-2, max_steps=2)
    data = problem.prepare(config)
    with distcore.Session(config, lambda: problem.build_model(config, data), data.train) as session:
        for step in session:
            step.gradients(problem.loss)
            step.apply()
    train(
        config_of(tmp_path / "train", lr=1e-2, max_steps=2, extensions={"progress": False}), problem
    )
    assert largest_difference(last(tmp_path / "session"), last(tmp_path / "train"))[0] == 0


def test_the_loop_may_end_early_and_evaluate(tmp_path: Path) -> None:
    with distcore.Session(config_of(tmp_path), linear, TensorDataset(X, X.sin())) as session:
        for step in session:
            assert session.model.training
            step.gradients(squared)
            step.apply()
            session.model.eval()
            if session.progress.step == 2:
                break
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_an_error_in_the_loop_saves_nothing(tmp_path: Path) -> None:
    def stop(session: Any, step: Any) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        loop(tmp_path, stop)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("use", "line"),
    [
        (lambda session, step: step.gradients(squared), r"step 1 was left without step\.apply\(\)"),
        (
            lambda session, step: [step.gradients(squared), step.apply(), step.apply()],
            r"called twice in one step$",
        ),
        (lambda session, step: step.gradients(), r"step\.gradients\(\) needs your loss"),
    ],
)
def test_a_step_that_is_not_made_is_refused(use: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=line):
        loop(tmp_path, use)


@pytest.mark.programs
def test_fp16_equals_train(tmp_path: Path) -> None:
    problem = Problem(rows=16)
    config = config_of(tmp_path / "session", lr=1e-2, precision="fp16")
    data = problem.prepare(config)
    means = []
    with distcore.Session(config, lambda: problem.build_model(config, data), data.train) as session:
        for step in session:
            share = step.gradients(problem.loss)
            step.apply()
            means.append(session.mean(share))
    logged = {"log_every": 1, "extensions": {"progress": False}}
    train(config_of(tmp_path / "train", lr=1e-2, precision="fp16", **logged), problem)
    assert largest_difference(last(tmp_path / "session"), last(tmp_path / "train"))[0] == 0
    lines = [
        json.loads(line) for line in (tmp_path / "train/metrics.jsonl").read_text().splitlines()
    ]
    assert means == pytest.approx(
        [line["train/loss"] for line in lines if "train/loss" in line], rel=1e-6
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda step: step.parameters,
        lambda step: step.norm([]),
        lambda step: step.forward(0, loss=squared),
        lambda step: [step.gradients(squared), step.gradients(squared)],
        lambda step: step.apply(),
    ],
)
def test_a_step_is_one_pass_where_the_engine_keeps_the_gradients(use: Any, tmp_path: Path) -> None:
    line = (
        r"^Session: strategy 'single' with precision = 'fp16' keeps the gradients; call"
        r" step\.gradients\(loss\) once"
    )
    with pytest.raises(TaskError, match=line):
        loop(tmp_path, lambda session, step: use(step), precision="fp16")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"eval_every": 5}, r"^eval_every = 5: a Session has your loop"),
        ({"extensions": {"nan-guard": True}}, r"^extensions\.nan-guard = True: a Session"),
        (
            {"nproc": 2, "strategy": "ddp"},
            r"^nproc = 2: .* start the script by torchrun --nproc-per-node 2",
        ),
    ],
)
def test_a_key_that_a_session_would_ignore_is_refused(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=line):
        loop(tmp_path, lambda session, step: None, **changes)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_built_already_and_a_session_outside_of_with_are_refused(
    tmp_path: Path,
) -> None:
    rows: Any = TensorDataset(X, X)
    with pytest.raises(
        TaskError, match=r"model is a Linear; give a function that builds the model"
    ):
        distcore.Session(config_of(tmp_path), linear(), rows)
    with pytest.raises(TaskError, match=r"is not open; use it in `with Session"):
        next(iter(distcore.Session(config_of(tmp_path), linear, rows)))


def disagree(out: Path, what: str) -> str:
    """A rank whose rows or seed is its own; returns the error."""
    rank = int(os.environ["RANK"])
    rows = TensorDataset(X + rank * (what == "rows"), X.sin())
    try:
        config = config_of(out, strategy="ddp", seed=rank if what == "seed" else 0, timeout=20)
        with distcore.Session(config, linear, rows) as session:
            for step in session:
                step.gradients(squared)
                step.apply()
    except DistcoreError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp")
@pytest.mark.parametrize(("what", "line"), [("rows", "rows"), ("seed", "config: rank 1 differs")])
def test_ranks_that_disagree_are_refused(what: str, line: str, tmp_path: Path) -> None:
    for said in launch(disagree, tmp_path / "run", what, nproc=2):
        assert line in said
        assert "\n" not in said


def leave_alone(out: Path) -> list[str]:
    """Open a session for each way in which rank 1 makes other calls than rank
    0; return each error.
    """
    lines = []
    for way in ("before a step", "before apply", "after apply", "late", "means", "ends"):
        lines += leave_in(way, out)
        # a wrapped model that outlives its process group can wait for it, holding Python's lock
        gc.collect()
        torch.distributed.destroy_process_group()  # as the end of the program would
    return lines


def leave_in(way: str, out: Path) -> list[str]:
    """Open a session that rank 1 leaves in one way; return the error, and keep
    nothing of the session.
    """
    is_odd = os.environ["RANK"] == "1"
    config = config_of(out / way, strategy="ddp", timeout=20, max_steps=6)
    try:
        with distcore.Session(config, linear, TensorDataset(X, X.sin())) as session:
            for step in session:
                if is_odd and way == "before a step":
                    break
                share = step.gradients(squared)
                if is_odd and way == "before apply":
                    break
                step.apply()
                if is_odd and (
                    way == "after apply" or (way == "late" and session.progress.step == 4)
                ):
                    break
                if is_odd or way != "means":
                    session.mean(share)
            if is_odd and way == "ends":
                session.save()
    except TaskError as error:
        return [str(error)]
    return []


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp")
def test_a_rank_that_makes_other_calls_ends_all_with_one_line(tmp_path: Path) -> None:
    """They would wait for each other until the timeout, or add up numbers of different things."""
    lines = [
        (
            "after step 0 rank 1 leaves the loop, and rank 0 calls step.gradients(); every rank"
            " makes the same calls"
        ),
        "after step 0 rank 1 leaves the loop, and rank 0 calls step.apply(); every",
        "after step 1 rank 1 leaves the loop, and rank 0 calls session.mean(); every",
        "after step 4 rank 1 leaves the loop, and rank 0 calls session.mean(); every",
        "after step 1 rank 1 calls session.mean(), and rank 0 begins a step; every",
        "after step 6 rank 1 calls session.save(), and rank 0 leaves the loop; every",
    ]
    for told in launch(leave_alone, tmp_path, nproc=2):
        assert len(told) == len(lines), told
        for line, beginning in zip(told, lines, strict=True):
            assert line.startswith(f"Session: {beginning}")
            assert "\n" not in line


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.needs("distcore-tasks")
def test_batch_normalization_counts_all_rows_of_a_step(tmp_path: Path) -> None:
    """As in ``distcore train``: losses and statistics do not follow from the micro-batches."""
    states = []
    for cut in (4, 16):
        settings = SETTINGS | {
            "out": str(tmp_path / str(cut)),
            "micro_batch_size": cut,
            "max_steps": 4,
        }
        with distcore.Session(
            distcore.load_config(None, settings), with_batch_norm, TensorDataset(X, X.sin())
        ) as mine:
            for step in mine:
                step.gradients(lambda model, batch: (model(batch[0]) - batch[1]).square().sum())
                step.apply()
        states.append(last(tmp_path / str(cut)))
    assert int(states[0]["model/1.num_batches_tracked"]) == 4
    assert largest_difference(states[0], states[1])[0] < 1e-6


def test_a_second_session_on_the_same_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would end the process group of the first."""
    settings = SETTINGS | {"out": str(tmp_path / "run"), "max_steps": 1}
    session = distcore.Session(
        distcore.load_config(None, settings), with_batch_norm, TensorDataset(X, X.sin())
    )
    monkeypatch.setattr(session, "_rank_info", RankInfo(rank=0, size=2))
    monkeypatch.setattr(distcore.Session, "_ranks_in_use", True)
    with pytest.raises(
        TaskError, match=r"another one is open on these ranks; leave its `with` block first"
    ):
        session.__enter__()
