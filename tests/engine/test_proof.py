"""A run compares its first steps with one plain process: right jobs are proved, wrong ones end,
the rest is named.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import defaultdict
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from torch.utils.data import TensorDataset

from distcore import FrozenModel, Phase, RunConfig, Simple, TaskError, hookimpl, train
from distcore.distributed import devices
from distcore.engine import proof, trainer
from distcore.engine.replay import Replayed, replay
from distcore.extensions.metrics import Metrics
from distcore.plugin.strategy.contract import MicroBatch, Run, StepResult
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.strategies.single import SingleStrategy
from distcore.testing.problem import Problem
from distcore.testing.variants import WholeBatch

CONFIG: dict[str, Any] = {
    "lr": 1e-2,
    "max_steps": 3,
    "global_batch_size": 16,
    "micro_batch_size": 4,
    "device": "cpu",
    "nproc": 1,
    "extensions": {"progress": False, "metrics": False},
    "checkpoints": {"best": None},
}
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(32, 8, generator=GENERATOR)
Y = (X @ torch.randn(8, 1, generator=GENERATOR)).tanh()


class Own(Simple):
    """A user's task: 32 rows and a small net with dropout."""

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return TensorDataset(X, Y), TensorDataset(X[:12], Y[:12])

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) - batch[1]).square()[:, 0]


def proved(out: Path, task: Any, **changes: Any) -> dict[str, Any]:
    """Train; return the report's entry ``proof``."""
    train(RunConfig(**CONFIG | {"out": str(out / "run")} | changes), task)
    report = json.loads((out / "run/report.json").read_text())
    assert not (out / "run/proof").exists()
    return dict(report["proof"])


class OwnWith(Own):
    """The same rows for another net."""

    def __init__(self, net: type[nn.Module]) -> None:
        super().__init__()
        self._net = net

    def model(self) -> nn.Module:
        return self._net()


# Right jobs


class Hooked(nn.Module):
    """A net whose first weight has a hook that halves its gradient: ``deepcopy`` would lose it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).tanh())


class DrawnByNumpy(nn.Module):
    """A net whose weights follow from numpy's generator, which no seed of torch reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(np.random.randn(1, 8).astype(np.float32)))

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight)


class Normalized(nn.Sequential):
    """A net with batch normalization."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


class MakesItsMask(nn.Module):
    """A net that makes a buffer in its first pass."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.arange(8) % 2, persistent=False)
        return self.last(x * self.mask)


class HalfInside(Hooked):
    """A net with a layer in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.middle(self.first(x).bfloat16()).float())


class WeightNormed(nn.Sequential):
    """A net with torch's older weight normalization, which ``deepcopy`` refuses."""

    def __init__(self) -> None:
        super().__init__(weight_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 1))


class KeepsItsModel(Own):
    """A task that keeps the model in itself, and uses it in the loss."""

    def model(self) -> nn.Module:
        self.net: Any = super().model()
        return self.net

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        return super().row_loss(model, batch) + 0.01 * self.net[0].weight.square().sum()


class CountsItsCalls(Own):
    """A task whose loss falls with each call; the replay must not move the run's count."""

    calls = 0

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        return super().row_loss(model, batch) / self.calls


class TwoPhases(Own):
    """Two losses, each of which trains a layer."""

    def phases(self) -> dict[str, Phase]:
        return {"first": Phase("^0", self._sum), "last": Phase("^3", self._sum, {"lr_scale": 0.5})}

    def _sum(self, model: nn.Module, batch: Any) -> Any:
        return super().row_loss(model, batch).sum()


class Taught(Own):
    """A loss that also follows a frozen teacher."""

    def frozen(self, config: RunConfig, data: Any) -> dict[str, FrozenModel]:
        return {"teacher": FrozenModel(lambda config, data: nn.Linear(8, 1))}

    def consult(self, models: Any, batch: Any) -> Any:
        return (*batch, models["teacher"](batch[0]))

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) - batch[2]).square()[:, 0]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "task",
    [
        Own(),
        OwnWith(Hooked),
        OwnWith(DrawnByNumpy),
        OwnWith(Normalized),
        OwnWith(MakesItsMask),
        OwnWith(WeightNormed),
        KeepsItsModel(),
        TwoPhases(),
        Taught(),
        WholeBatch(),
        Problem(),
    ],
    ids=lambda task: task._net.__name__ if isinstance(task, OwnWith) else type(task).__name__,
)
def test_the_first_steps_of_a_right_job_are_proved(
    tmp_path: Path, task: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "distcore"):
        facts = proved(tmp_path, task)
    assert facts["steps"] == 2, facts
    assert facts["loss"] < 2e-6
    assert facts["norm"] < 1e-5
    assert facts["update"] < 1e-3
    assert "proof: first 2 steps proved equal to one plain process within" in caplog.text


@pytest.mark.parametrize(
    "changes", [{"precision": "bf16"}, {"gradient_checkpointing": False, "ema": {"decay": 0.9}}]
)
def test_half_precision_and_averages_are_proved(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert proved(tmp_path, Own(), **changes)["steps"] == 2


def test_a_layer_in_half_precision_has_its_bounds(tmp_path: Path) -> None:
    assert proved(tmp_path, OwnWith(HalfInside))["steps"] == 2
    assert proof.bounds_of("fp32", HalfInside()) is proof.BOUNDS["bf16"]
    assert proof.bounds_of("fp32", Hooked()) is proof.BOUNDS["fp32"]


class WholeBatchInHalf(WholeBatch):
    """A loss over the whole batch, which the core computes outside of autocast."""

    def batch_loss(self, embeddings: dict[str, Tensor], rows: Tensor) -> Tensor:
        logits = embeddings["logits"]
        assert (logits.T @ logits).dtype == torch.float32
        return super().batch_loss(embeddings, rows)


def test_a_loss_over_the_whole_batch_is_not_rounded(tmp_path: Path) -> None:
    assert proved(tmp_path, WholeBatchInHalf(), precision="bf16", micro_batch_size=16)["steps"] == 2


class RoundsByCut(Own):
    """A loss that rounds otherwise in another cut where it is in half
    precision, as wider padding does.
    """

    share = 2e-2

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().row_loss(model, batch)
        return (
            loss * (1 + self.share * (len(loss) > 4)) if torch.is_autocast_enabled("cpu") else loss
        )


def test_a_cut_that_only_rounds_is_proved(tmp_path: Path) -> None:
    assert proved(tmp_path / "half", RoundsByCut(), precision="bf16")["steps"] == 2


def test_a_wrong_run_in_half_precision_still_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SingleStrategy, "backward", scales_the_gradient, raising=False)
    with pytest.raises(
        TaskError, match="the gradient's norm differs from that of one plain process by 1"
    ):
        proved(tmp_path, Own(), precision="bf16")


class MeetsInHalf(Own):
    """Normalizes over the rows of a batch, in bf16, which rounds the loss by ``rounding``."""

    rounding = 3e-2

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().row_loss(model, batch)
        met = loss * loss.detach().mean()
        return met * (1 + self.rounding) if torch.is_autocast_enabled("cpu") else met


@pytest.mark.parametrize(("factor", "ends"), [(1.05, False), (2.0, True)])
def test_where_rows_meet_half_precision_is_named_as_far_as_it_rounds(
    factor: float, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plain process has such a run's micro-batches: a run over ranks rounds in another order."""

    @hookimpl
    def moves_the_gradient(self: object, run: Run, loss: Tensor) -> Tensor:
        (loss * factor).backward()
        return loss.detach()

    monkeypatch.setattr(SingleStrategy, "backward", moves_the_gradient, raising=False)
    changes: dict[str, Any] = {"precision": "bf16"}
    changes |= {"global_batch_size": 8, "micro_batch_size": 8}
    if ends:
        with pytest.raises(TaskError, match="the gradient's norm differs"):
            proved(tmp_path, MeetsInHalf(), **changes)
        return
    why = proved(tmp_path, MeetsInHalf(), **changes)["why"]
    assert re.fullmatch(r"bf16 alone moves its loss by 3e-02 .* the run moved it by .e-03", why)


def test_a_proof_changes_nothing_of_the_run(tmp_path: Path) -> None:
    """The losses with and without it are the same to the bit: no generator moves, and no mask."""
    losses = {}
    for prove in ("on", "off"):
        given = {
            **CONFIG,
            "prove": prove,
            "out": str(tmp_path / prove),
            "log_every": 1,
            "max_steps": 6,
        }
        train(RunConfig(**given | {"extensions": {"progress": False}}), Own())
        lines = (tmp_path / prove / "metrics.jsonl").read_text().splitlines()
        losses[prove] = [json.loads(line).get("train/loss") for line in lines]
    assert losses["on"] == losses["off"]
    assert len(losses["on"]) > 5


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not forget a peak"
)
def test_time_and_memory_of_a_proof_are_not_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, large = 0.4, 2**28

    def greedy(*given: Any) -> Replayed:
        torch.ones(large // 4)
        time.sleep(seconds)
        return replay(*given)

    spent: dict[str, float] = defaultdict(float)

    class Phases:
        """An extension that notes how long each phase lasts."""

        only_looks = True

        @hookimpl
        def on_run_start(self, run: Run) -> None:
            self.phase, self.since = "starting", time.perf_counter()
            run.tally.enter = self.enter

        def enter(self, phase: str) -> None:
            now = time.perf_counter()
            spent[self.phase] += now - self.since
            self.phase, self.since = phase, now

    monkeypatch.setattr(proof, "replay", greedy)
    monkeypatch.setattr(
        trainer, "load_extensions", lambda config: {"mine": Phases(), "metrics": Metrics()}
    )
    cpu = torch.device("cpu")
    monkeypatch.setattr(devices, "_EARLIER_PEAKS", {})
    devices.reset_peak(cpu, 0)  # that of the tests before
    before = devices.peak_memory(cpu)
    facts = proved(tmp_path, Own(), log_every=1)
    assert facts["seconds"] > seconds
    assert facts["bytes"] > large / 2
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    last = next(line for line in lines if line.get("step") == 3 and "train/loss" in line)
    assert last["train/peak_memory_bytes"] < before + large / 2
    assert last["train/samples_per_second"] > 16 / seconds
    assert spent["starting"] > seconds
    assert sum(spent[phase] for phase in spent if phase != "starting") < seconds


# Wrong ones, by a broken hook each


@hookimpl
def scales_the_gradient(self: object, run: Run, loss: Tensor) -> Tensor:
    (loss * 1.01).backward()
    return loss.detach()


@hookimpl
def leaves_a_row_out(self: object, run: Run, plan: Any) -> Any:
    def sampler(epoch: int, step: int) -> list[MicroBatch]:
        micros = plan.split(epoch, step, 0, 1)
        return [replace(micros[0], indices=np.repeat(micros[0].indices[:1], 4)), *micros[1:]]

    return sampler


@hookimpl
def does_not_clip(self: object, run: Run, clip: Any) -> StepResult:
    assert run.optimizer is not None
    norm = nn.utils.get_total_norm([p.grad for p in run.module.parameters() if p.grad is not None])
    run.optimizer.step()
    run.optimizer.zero_grad()
    return StepResult(grad_norm=norm)


@hookimpl
def saves_other_weights(self: object, run: Run) -> dict[str, Tensor]:
    names = dict(run.module.named_parameters())
    return {f"model/{name}": value.detach() * 1.001 for name, value in names.items()}


@hookimpl
def saves_other_buffers(self: object, run: Run) -> dict[str, Tensor]:
    parameters = {f"model/{name}": value.detach() for name, value in run.module.named_parameters()}
    return parameters | {
        f"model/{name}": value.detach() + 1 for name, value in run.module.named_buffers()
    }


@pytest.mark.parametrize(
    ("hook", "broken", "line"),
    [
        (
            "backward",
            scales_the_gradient,
            "the gradient's norm differs from that of one plain process by 1.0e-02",
        ),
        ("build_sampler", leaves_a_row_out, "the loss differs"),
        ("step", does_not_clip, "the loss differs"),
        (
            "save_checkpoint",
            saves_other_weights,
            "the change of the weights, most in '[03].(weight|bias)', differs",
        ),
    ],
)
def test_a_broken_hook_ends_the_run_before_the_third_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str, broken: Any, line: str
) -> None:
    monkeypatch.setattr(SingleStrategy, hook, broken, raising=False)
    changes = {
        "clip": {"norm": 1e-3},
        "data_guard_steps": 0,
        "optimizer": {"name": "sgd", "weight_decay": 0.0},
    }
    under = (
        r"\(bound \de-0\d\), under 'single' on 1 rank, 4 micro-batches a step; known to do that:"
        r" .*--prove off"
    )
    with pytest.raises(TaskError, match=rf"proof: after step 2 {line}.*{under}") as error:
        proved(tmp_path, Own(), **changes)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run/proof").exists()


def test_a_buffer_of_whole_numbers_that_differs_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SingleStrategy, "save_checkpoint", saves_other_buffers, raising=False)
    line = (
        r"proof: after step 2 the buffer '1.num_batches_tracked' differs from that of one plain"
        r" process by inf"
    )
    with pytest.raises(TaskError, match=line):
        proved(tmp_path, OwnWith(Normalized), micro_batch_size=16)


def test_prove_off_trains_on_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SingleStrategy, "backward", scales_the_gradient, raising=False)
    assert proved(tmp_path, Own(), prove="off") == {"steps": 0, "why": "not asked for"}
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["prove"] == "off"


def test_the_page_has_the_bounds() -> None:
    page = (Path(__file__).parents[2] / "docs/laws.md").read_text()
    table = (
        page[page.index("| compared | bound in fp32 | in bf16 |") :]
        .split("\n\n")[0]
        .splitlines()[2:]
    )
    told = [[cell.strip() for cell in line.strip("|").split("|")[1:]] for line in table]
    kinds = ("loss", "norm", "update", "buffer", "outputs")
    assert len(told) == len(kinds)
    for kind, cells in zip(kinds, told, strict=True):
        for precision, cell in zip(("fp32", "bf16"), cells, strict=True):
            assert getattr(proof.BOUNDS[precision], kind) == (
                inf if cell == "not compared" else float(cell)
            )


def test_the_first_evaluated_rows_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return self.inner(x) * (1.0 if self.training else 1.01)

    original = Hooks.wrap_model

    def wrap(self: Hooks, run: Run, module: nn.Module, make: Any) -> Any:
        prepared = original(self, run, module, make)
        return replace(prepared, model=Wrapped(prepared.model))

    monkeypatch.setattr(Hooks, "wrap_model", wrap)
    with pytest.raises(
        TaskError,
        match=r"proof: before step 1 the output 'loss' of the first evaluated rows differs",
    ):
        proved(tmp_path, Own())


# Jobs that have no result of one plain process


class Noise(Own):
    """Noise drawn in the loss."""

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) + torch.randn(len(batch[0]), 1) - batch[1]).square()[:, 0]


class Mixes(Own):
    """A loss that compares the rows of a micro-batch."""

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) - model(batch[0]).mean() - batch[1]).square()[:, 0]


class Codebook(nn.Module):
    """A net that moves a buffer toward the rows that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)
        self.code: Any
        self.register_buffer("code", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.code.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.last(x - self.code)


class Follows(nn.Module):
    """A net beside a frozen copy that follows it in each pass of training."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(8, 1), nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.slow.weight.lerp_(self.fast.weight, 0.01)
        return self.fast(x) + 1e-3 * self.slow(x)


class Observes(nn.Module):
    """A net that keeps the largest number it has seen, in evaluations, too."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)
        self.seen: Any
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        self.seen.add_(1)
        return self.last(x)


class Queues(nn.Module):
    """A net that keeps the last rows: their order shows in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)
        self.queue: Any
        self.register_buffer("queue", torch.zeros(32, 8))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.queue.copy_(torch.cat([x.detach(), self.queue])[:32])
        return self.last(x)


class HookedByNorm(Hooked):
    """A net whose hook is not linear: it scales a gradient to a norm of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_hook(lambda gradient: gradient / gradient.norm())


def test_a_hook_that_is_not_linear_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError,
        match=r"the hook on the gradient of 'first.weight' is not linear.*extension's step",
    ):
        proved(tmp_path / "cut", OwnWith(HookedByNorm))
    assert proved(tmp_path / "whole", OwnWith(HookedByNorm), micro_batch_size=16)["steps"] == 2


class Halves:
    """An extension that halves gradients before the step."""

    @hookimpl(wrapper=True)
    def step(self, run: Run) -> Any:
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return (yield)


def test_an_extension_that_changes_the_step_is_named_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "load_extensions", lambda config: {"mine": Halves()})
    changes = {"optimizer": {"name": "sgd", "weight_decay": 0.0}, "clip": {"norm": None}}
    why = "extension 'mine' wraps step(), and one plain process has no extensions"
    facts = proved(tmp_path, Own(), **changes)
    assert (facts["steps"], facts["why"]) == (0, why)


class Clamps(nn.Linear):
    """A net whose forward writes its weight."""

    def __init__(self) -> None:
        super().__init__(8, 1)

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(input)


class Slopes(Own):
    """A loss with a gradient penalty."""

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return super().row_loss(model, batch) + slope.square().sum(1)


@pytest.mark.parametrize(
    ("task", "cause"),
    [
        (OwnWith(Clamps), "here forward writes the weight 'weight'; another strategy"),
        (
            Slopes(),
            r"here the loss takes gradients itself \(torch.autograd.grad\); another strategy",
        ),
        (OwnWith(Hooked), "here the gradient of 'first.weight' has a hook; another strategy"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Own) else "",
)
def test_a_difference_names_what_the_job_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Any, cause: str
) -> None:
    monkeypatch.setattr(SingleStrategy, "backward", scales_the_gradient, raising=False)
    with pytest.raises(
        TaskError, match=rf"proof: after step 2 the gradient's norm differs.*{cause}"
    ):
        proved(tmp_path, task)


class Undefined(Own):
    """A loss that is not a number."""

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        return (
            super().row_loss(model, batch) * float("nan")
            if model.training
            else super().row_loss(model, batch)
        )


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Noise(), r"test_proof\.py:\d+ draws random numbers outside of dropout by row.*row_random"),
        (Mixes(), "a row's loss depends on other rows of its micro-batch"),
        (OwnWith(Codebook), "forward updates the buffer 'code', once in each micro-batch"),
        (
            OwnWith(Follows),
            "forward updates the frozen weight 'slow.weight', once in each micro-batch",
        ),
        (
            OwnWith(Observes),
            (
                r"an evaluation changes the buffer 'seen', .* change it in training alone"
                r" \(self.training\)"
            ),
        ),
        (OwnWith(Queues), "forward updates the buffer 'queue', once in each micro-batch"),
        (CountsItsCalls(), "one plain process does not repeat itself"),
    ],
    ids=lambda value: (
        (getattr(value, "_net", None) or type(value)).__name__ if isinstance(value, Own) else ""
    ),
)
def test_a_task_without_a_result_to_compare_is_named_and_trains(
    tmp_path: Path, task: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "distcore"):
        facts = proved(tmp_path, task)
    assert facts["steps"] == 0
    assert re.search(why, facts["why"]), facts
    assert "proof: the first steps are not proved" in caplog.text


class Cancels(Own):
    """Rows whose gradients are huge and cancel each other: rounding is all that remains."""

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        signs = batch[0][:, 0] - X[:, 0].mean()
        return super().row_loss(model, batch) + 1e6 * signs * model[0].weight.sum()  # type: ignore[index]


def test_a_difference_of_rounding_alone_is_named_and_trains(tmp_path: Path) -> None:
    facts = proved(
        tmp_path, Cancels(), optimizer={"name": "sgd", "weight_decay": 0.0}, global_batch_size=32
    )
    assert re.search("rounding alone moves its (loss|norm) by .* in another order", facts["why"]), (
        facts
    )


class OneStepOfItsOwn(Own):
    """A task that makes its own steps."""

    def train_step(self, step: Any) -> Tensor:
        loss: Tensor = step.gradients()
        step.apply()
        return loss


class BuiltOnce(Own):
    """A model that cannot be built twice."""

    def model(self) -> nn.Module:
        if "built" in vars(type(self)):
            raise RuntimeError("the license allows one copy")
        type(self).built = True  # type: ignore[attr-defined]
        return super().model()


@pytest.mark.parametrize(
    ("task", "changes", "why"),
    [
        (OneStepOfItsOwn(), {}, "the task makes its own steps"),
        (
            BuiltOnce(),
            {},
            "the model cannot be built a second time: RuntimeError: the license allows one copy",
        ),
        (Own(), {"precision": "fp16"}, "--precision fp16 skips steps and rounds too much"),
    ],
    ids=["own step", "built once", "fp16"],
)
def test_a_run_that_cannot_be_proved_says_why(
    tmp_path: Path, task: Any, changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "distcore"):
        assert proved(tmp_path, task, **changes) == {"steps": 0, "why": why}
    assert f"the first steps are not compared with one plain process: {why}" in caplog.text


def test_a_resumed_run_is_not_proved(tmp_path: Path) -> None:
    assert proved(tmp_path, Own())["steps"] == 2
    changes = {"resume": "auto", "resume_changed": ["max_steps"], "max_steps": 5}
    assert proved(tmp_path, Own(), **changes)["why"] == "the run goes on from a checkpoint"


def test_auto_leaves_out_what_is_dear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "MOST_SECONDS", -1.0)
    assert "s, and -1 are the bound; --prove on insists" in proved(tmp_path / "time", Own())["why"]
    monkeypatch.setattr(proof, "PART_OF_MEMORY", 0.0)
    assert "it would take 0 MiB, and 0 are the bound" in proved(tmp_path / "memory", Own())["why"]
    assert proved(tmp_path / "on", Own(), prove="on")["steps"] == 2


class UnderLaws(Own):
    """A task for which the laws are measured."""

    laws_hold: ClassVar = True


class Changed(UnderLaws):
    """A subclass of it, which may do anything."""


def test_a_run_without_a_third_step_is_proved_on_demand(tmp_path: Path) -> None:
    assert proved(tmp_path / "auto", Own(), max_steps=2)["why"].startswith("no step follows")
    assert proved(tmp_path / "on", Own(), max_steps=1, prove="on")["steps"] == 1


def test_auto_leaves_out_tasks_under_laws_but_not_their_subclasses(tmp_path: Path) -> None:
    assert proved(tmp_path / "auto", UnderLaws())["steps"] == 0
    assert proved(tmp_path / "on", UnderLaws(), prove="on")["steps"] == 2
    assert proved(tmp_path / "subclass", Changed())["steps"] == 2
    assert BoundTask.wrap(UnderLaws()).laws_hold
    assert not BoundTask.wrap(Changed()).laws_hold
    assert not BoundTask.wrap(Own()).laws_hold


# Differences


def test_large_integers_are_compared_exactly() -> None:
    """In fp64 two neighbors beyond 2**53 are equal."""
    large = torch.tensor([2**60 + 1])
    assert proof._error_of_buffer(large, large.clone(), large) == 0.0
    assert proof._error_of_buffer(large + 1, large, large) == float("inf")
    complex_pair = torch.tensor([1 + 2j])
    assert (
        proof._error_of_buffer(
            complex_pair, complex_pair.conj().resolve_conj(), torch.zeros(1) + 0j
        )
        > 1
    )


def test_a_number_that_is_none_is_beyond_every_bound() -> None:
    assert proof.Difference(loss=float("nan")).beyond(proof.BOUNDS["fp32"]) == "loss"
    assert proof.Difference(buffer=float("nan")).beyond(proof.BOUNDS["bf16"]) == "buffer"
    assert proof._largest([1.0, 1.0], [1.0, float("nan")]) != proof._largest([1.0], [1.0])


def test_a_norm_that_a_strategy_does_not_report_is_left_out() -> None:
    assert proof._largest([float("nan"), 2.0], [1.0, 1.0]) == 1.0
    assert isinstance(Replayed(losses=[], norms=[], state={}, draws=""), Replayed)


# Ranks

FILE = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset
from distcore import Simple

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


class Writes(nn.Linear):
    """Forward clamps its weight: FSDP writes into a gathered copy, which is thrown away."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Mine(Simple):
    def data(self):
        return TensorDataset(X, X[:, :1]), TensorDataset(X[:8], X[:8, :1])

    def model(self):
        return nn.Sequential(Writes(8, 16), nn.Tanh(), Writes(16, 1))

    def row_loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square()[:, 0]
'''


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp", "distcore-fsdp")
@pytest.mark.parametrize(("strategy", "status"), [("ddp", 0), ("fsdp", 2)])
def test_weights_that_forward_writes_end_a_sharded_run(
    work_folder: Path, strategy: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    from distcore.cli.main import main

    (work_folder / "mine.py").write_text(FILE)
    words = f"train --task mine.py:Mine --strategy {strategy} --nproc 2 --max-steps 3 --out r"
    assert main([*words.split(), "--global-batch-size", "16", "--micro-batch-size", "4"]) == status
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == (status > 0)
    assert not status or "differs from that of one plain process" in errors[0]
