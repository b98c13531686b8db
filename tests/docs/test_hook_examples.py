"""The example in the docstring of each hook, and of each method of a task, runs and does
what the contract says.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import distcore
from distcore import (
    RankInfo,
    RunConfig,
    hookimpl,
    join_process_group,
    leave_process_group,
    load_config,
)
from distcore.checkpoint import read_tensors
from distcore.engine.trainer import train_in
from distcore.jobs import predict
from distcore.jobs.evaluate import config_for
from distcore.plugin.strategy.hooks import EVENTS, OPERATIONS, Hooks
from distcore.plugin.strategy.hookspecs import Events, Operations
from distcore.plugin.task.methods import METHODS
from distcore.plugin.task.spec import TaskSpec
from distcore.resolve.resolve import resolve
from distcore.strategies.single import SingleStrategy
from distcore.testing import STRATEGIES
from distcore.testing.problem import Classifier, Problem, RandomRows
from distcore.testing.reference import largest_difference
from distcore.testing.subject import Subject

TASK_METHODS = [name for name in vars(TaskSpec) if name in METHODS]
"""The methods of a task, in call order."""
PADDING_FREE = ["why_not_padding_free", "enable_padding_free"]
FROZEN, WHOLE_BATCH = ["frozen", "consult"], ["embed", "batch_loss"]
PAIRS = (
    ["sums", "report_sums"],
    ["row_columns", "unlabeled"],
    ["open_rows", "unlabeled"],
    PADDING_FREE,
    FROZEN,
    WHOLE_BATCH,
)
"""Methods that a task has both or neither of."""
KNOWN: dict[str, Any] = {name: getattr(distcore, name) for name in distcore.__all__} | {
    "AbstractContextManager": AbstractContextManager,
    "Classifier": Classifier,
    "F": F,
    "Iterable": Iterable,
    "Path": Path,
    "RandomRows": RandomRows,
    "Tensor": Tensor,
    "dist": dist,
    "json": json,
    "logging": logging,
    "nn": nn,
    "nullcontext": nullcontext,
    "torch": torch,
}
"""Names that an example may use without an import: public ones, and
those that everybody imports.
"""
STEPS, SAVED = 6, 3
TOLERANCE = 1e-6
"""Relative, of every tensor in a checkpoint: an example may add in another order
than the core does.
"""


class InAGroup(SingleStrategy):
    """One process that talks to itself over torch.distributed, so that an
    example may use collectives.
    """

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> distcore.World:
        return join_process_group(config, rank_info)

    @hookimpl
    def teardown(self, world: distcore.World) -> bool:
        return leave_process_group(world)


pytestmark = pytest.mark.programs


def example(owner: type, name: str) -> str:
    """The code under ``Example::`` in the docstring of a method; fails if there is none."""
    text = f"{inspect.getdoc(getattr(owner, name))}\n"
    match = re.search(r"^Example::\n\n((?: {4}.*\n|\n)+)", text, re.M)
    assert match, f"{owner.__name__}.{name} has no example"
    return textwrap.dedent(match[1])


ASKED: dict[str, dict[str, Any]] = {
    "suggest": {"lr": "auto"}, "skipped_fraction": {"padding_free": "auto"},
    **{name: {"padding_free": "on"} for name in (*PADDING_FREE, "select_logits")},
}  # fmt: skip
"""The settings under which the core calls a method that it would not call in any run."""


def methods(owner: type, names: Iterable[str], called: set[str]) -> dict[str, Callable[..., Any]]:
    """The methods that the examples define; each notes in ``called`` that it was called."""
    namespace: dict[str, Any] = {}
    for name in names:
        code = "from __future__ import annotations\n" + example(owner, name)
        exec(compile(code, f"<example of {name}>", "exec"), dict(KNOWN), namespace)
    del namespace["annotations"]
    return {name: noted(function, called) for name, function in namespace.items()}


def task_methods(names: Iterable[str], called: set[str]) -> dict[str, Callable[..., Any]]:
    """The methods that the examples of a task's methods define."""
    return {
        name: method for each in names for name, method in methods(TaskSpec, [each], called).items()
    }


class Calls(set[str]):
    """The methods that were called, and the order of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def add(self, name: str) -> None:
        super().add(name)
        self.order.append(name)


def noted(function: Callable[..., Any], called: set[str]) -> Callable[..., Any]:
    @wraps(function)
    def noting(*arguments: object, **named: object) -> object:
        called.add(function.__name__)
        return function(*arguments, **named)

    return noting


@contextmanager
def trained(out: Path, hooks: Hooks, task: Any, **changes: object) -> Iterator[distcore.Report]:
    """A whole run in this process: its report, and what it leaves in ``out``."""
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "save_every": SAVED,
        "log_every": 2,
        "lr": 0.01,
        "optimizer.eps": 1e-2,
        "device": "cpu",
        "global_batch_size": 12,
        "micro_batch_size": 3,
        "out": str(out),
        "extensions": {"progress": False},
        "checkpoints.best": None,
    }
    resolved = resolve(load_config(None, settings | changes), task=task)
    world = hooks.setup(resolved.config, RankInfo())
    yield train_in(world, resolved, hooks, RankInfo())
    hooks.teardown(world)


def at(out: Path, step: int) -> Path:
    return out / f"checkpoints/step-{step:08d}"


def distance(out: Path, other: Path) -> float:
    """Of the final checkpoints of two runs."""
    return largest_difference(read_tensors(at(out, STEPS)), read_tensors(at(other, STEPS)))[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, distcore.Report]:
    """The same run without any example: its folder and its report."""
    out = tmp_path_factory.mktemp("reference") / "run"
    with trained(out, Hooks("single", SingleStrategy()), Problem()) as report:
        return out, report


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_strategy_with_the_example_trains_and_resumes_as_the_core_does(
    name: str, tmp_path: Path, reference: tuple[Path, distcore.Report]
) -> None:
    called: set[str] = set()
    strategy = type("Example", (InAGroup,), methods(Operations, [name], called))
    out = tmp_path / "run"
    with trained(out, Hooks("example", strategy()), Problem()) as report:
        assert report["evaluation"] == pytest.approx(reference[1]["evaluation"])
    assert distance(out, reference[0]) <= TOLERANCE
    with trained(out, Hooks("example", strategy()), Problem(), resume=str(at(out, SAVED))):
        pass
    assert distance(out, reference[0]) <= TOLERANCE
    assert called == {name}


SAID = {
    "on_run_start": r"from step 0 to 6 on 1 rank\(s\)\n",
    "on_epoch_start": r"epoch 0 begins at step 0\nepoch 1 begins at step 5\n",
    "on_epoch_end": r"",
    "on_step_end": r"epoch 1 ends at step 5: 50 rows so far\n",
    "on_log": r"(step [246]: loss \d\.\d{3}, learning rate [\d.e-]+\n){3}",
    "on_evaluation_end": r"step 5: 11 of 11 rows evaluated\nstep 6: 11 of 11 rows evaluated\n",
    "on_run_end": r"6 steps, accuracy 0\.\d\d\n",
}
"""Output of the examples of events in such a run."""


@pytest.mark.parametrize("name", EVENTS)
def test_an_extension_with_the_example_hears_the_event_and_changes_nothing(
    name: str,
    tmp_path: Path,
    reference: tuple[Path, distcore.Report],
    capsys: pytest.CaptureFixture[str],
) -> None:
    called: set[str] = set()
    extension = type("Example", (), methods(Events, [name], called))()
    out = tmp_path / "run"
    with trained(out, Hooks("single", SingleStrategy(), {"example": extension}), Problem()):
        pass
    assert called == {name}
    assert distance(out, reference[0]) == 0
    if name == "on_checkpoint":
        assert (out / "newest.txt").read_text() == "step-00000006 62"
    else:
        assert re.fullmatch(SAID[name], capsys.readouterr().out)


@pytest.mark.parametrize("name", TASK_METHODS)
def test_a_task_with_the_example_is_the_task_of_the_laws(
    name: str, tmp_path: Path, reference: tuple[Path, distcore.Report]
) -> None:
    called: set[str] = set()
    names = next((pair for pair in PAIRS if name in pair), [name])
    if name in ("skipped_fraction", "select_logits"):
        names = [*PADDING_FREE, name]
    without_loss = {"loss": None} if name == "row_loss" else {}
    task = type("Example", (Problem,), task_methods(names, called) | without_loss)()
    out = tmp_path / "run"
    with trained(out, Hooks("single", SingleStrategy()), task, **ASKED.get(name, {})) as report:
        same = {key: report["evaluation"][key] for key in reference[1]["evaluation"]}
        assert same == pytest.approx(reference[1]["evaluation"])
        assert report["evaluation"].get("share_right", same["accuracy"]) == pytest.approx(
            same["accuracy"]
        )
    assert distance(out, reference[0]) <= TOLERANCE
    if "unlabeled" in names:
        assert [line["row"] for line in predicted(out, task)] == [1, 2]
    assert called == set(names)


def predicted(out: Path, task: Any) -> list[dict[str, Any]]:
    """The lines of ``distcore predict`` for a file of two rows, with the last weights of a run."""
    rows, lines, last = out.parent / "rows.jsonl", out.parent / "lines.jsonl", at(out, STEPS)
    rows.write_text('{"text": "one"}\n{"text": "two"}\n')
    predict.predict_rank(predict.check(config_for(last, 1, {}), last, rows, lines, task), task)
    return [json.loads(line) for line in lines.read_text().splitlines()]


def test_the_examples_of_a_task_together_are_a_task(
    tmp_path: Path, reference: tuple[Path, distcore.Report]
) -> None:
    # In place of the loss; with the first the mean loss would do for a report.
    others = ("row_loss", "phases", "train_step", *WHOLE_BATCH)
    names = [name for name in TASK_METHODS if name not in others]
    task = type("Example", (), task_methods(names, set()))()
    out = tmp_path / "run"
    with trained(out, Hooks("single", SingleStrategy()), task) as report:
        assert report["evaluation"].pop("share_right") == pytest.approx(
            report["evaluation"]["accuracy"]
        )
        assert report["evaluation"] == pytest.approx(reference[1]["evaluation"])
        assert report["data"] == {"classes": 4}
    assert distance(out, reference[0]) <= TOLERANCE
    assert len((out / "predictions.jsonl").read_text().splitlines()) == 11
    assert len(json.loads((out / "classes.json").read_text())) == 4
    assert len(predicted(out, task)) == 2


PADDED = {*PADDING_FREE, "skipped_fraction", "select_logits"}


@pytest.mark.parametrize(
    "others",
    [
        {"phases", "train_step", *FROZEN, *WHOLE_BATCH},
        {"loss", "phases", "train_step", *PADDED},
        {"loss", "train_step", *WHOLE_BATCH, *PADDED},
    ],
    ids=["a sum over rows", "more models", "phases"],
)
def test_the_page_has_the_order_of_the_calls(others: set[str], tmp_path: Path) -> None:
    calls, out = Calls(), tmp_path / "run"
    names = [name for name in TASK_METHODS if name not in {"row_loss", "row_columns", *others}]
    task = type("Example", (), task_methods(names, calls))()
    with trained(
        out, Hooks("single", SingleStrategy()), task, lr="auto", padding_free="auto", prove="off"
    ):
        trained_by = next((name for name in ("loss", "embed") if name in names), "outputs")
        first = calls.order.index(trained_by) - (trained_by != "loss")  # it is consulted
        trains, stop = first, len(calls.order)
    predicted(out, task)
    # What training calls is tried before the first step, too; that is no call of its own.
    training = list(dict.fromkeys(calls.order[trains:stop]))
    before = [name for name in dict.fromkeys(calls.order[:trains]) if name not in training]
    predicting = [
        name for name in dict.fromkeys(calls.order[stop:]) if name not in before + training
    ]
    assert before + training + predicting == names


CASES = (
    "rows-of-a-step",
    "partitions",
    "ranks-hold-one-model",
    "ranks-without-rows",
    "clip-by-norm",
    "every-size",
    "gather-unequal",
    "sum-over-ranks",
    "round-trip",
    "into-single",
    "from-single",
    "bit-for-bit",
    "true-world",
)


def together(_config: RunConfig) -> object:
    """The strategy that the examples of the operations are together."""
    declared = {"capabilities": distcore.Capabilities(spec_version=3)}
    # it would do without accumulate and backward
    answered = [name for name in OPERATIONS if name != "train_step"]
    return type("Example", (), methods(Operations, answered, set()) | declared)()


def on_a_wrapper(_config: RunConfig, strategy: type) -> object:
    """A strategy whose wrapper averages gradients in backward, with
    the example of ``accumulate``.
    """
    return type("Example", (strategy,), methods(Operations, ["accumulate"], set()))()


@pytest.mark.ranks
def test_the_examples_together_keep_the_laws_on_two_ranks() -> None:
    config = load_config(None, {"nproc": 2, "device": "cpu"})
    cases = tuple(case for name, case in STRATEGIES.required.items() if name in CASES)
    assert len(cases) == len(CASES)
    subjects = [Subject(config=config, cases=cases, make=together)]
    ddp: Any = pytest.importorskip("distcore_ddp.strategy").DDPStrategy
    subjects.append(Subject(config=config, cases=cases, make=partial(on_a_wrapper, strategy=ddp)))
    for findings in STRATEGIES.measure_all(subjects):
        assert not [str(finding) for finding in findings if not finding.held]
