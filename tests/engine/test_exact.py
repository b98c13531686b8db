"""``exact``: blocks that no number of ranks cuts otherwise, sums on a grid, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcore import (
    Capabilities,
    ConfigError,
    ModelError,
    Progress,
    Run,
    RunConfig,
    Session,
    Step,
    StrategyError,
    TaskError,
    World,
    hookimpl,
    train,
)
from distcore.checkpoint import read_tensors
from distcore.cli.main import main
from distcore.engine.exact import GradientSums, largest_element, refuse_changers
from distcore.engine.grid import FINEST, bits_of_grid, round_to_grid
from distcore.engine.meter import Meter
from distcore.engine.module_checks import check_module
from distcore.errors import CheckpointError
from distcore.plugin.batching.sampling import BatchPlan
from distcore.plugin.batching.token_budget import TokenCut
from distcore.plugin.strategy.hooks import Hooks
from distcore.resolve.exact import check_exact, exact_values
from distcore.strategies.single import SingleStrategy
from distcore.testing.problem import Problem
from distcore.testing.variants import Climbing

LENGTHS = np.random.default_rng(0).integers(1, 60, size=70)
CUTS: dict[str, dict[str, Any]] = {
    "by rows": {"micro_batch": 32},
    "by tokens": {"micro_batch": 32, "by_tokens": TokenCut(tokens=4096, forward=96)},
    "without padding": {
        "micro_batch": 32,
        "by_tokens": TokenCut(tokens=999, forward=9, pads=False),
    },
    "more than asked": {"micro_batch": 3},
    "few tokens": {"micro_batch": 32, "by_tokens": TokenCut(tokens=120, forward=96)},
}
"""Plans of steps of 32 rows, and a last one of 6."""


def plan(cut: str, blocks: int = 4, **changes: Any) -> BatchPlan:
    return BatchPlan(
        lengths=LENGTHS, global_batch=32, seed=0, blocks=blocks, **(CUTS[cut] | changes)
    )


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("order", ["shuffled", "longest-first"])
def test_blocks_are_the_same_for_any_shards_and_each_is_dealt_once(cut: str, order: str) -> None:
    batches = plan(cut, order=order)
    for step in range(batches.steps):
        alone = {micro.block: micro.indices.tolist() for micro in batches.split(0, step, 0, 1)}
        assert sorted(chain.from_iterable(alone.values())) == sorted(batches.rows(0, step).tolist())
        assert sorted(alone) == list(range(len(alone)))
        for shards in (2, 3, 4):
            parts = [batches.split(0, step, shard, shards) for shard in range(shards)]
            assert len({len(part) for part in parts}) == 1
            assert all(
                [micro.last for micro in part].index(True) == len(part) - 1 for part in parts
            )
            dealt = [micro for part in parts for micro in part if not micro.is_padding]
            assert len(dealt) == len(alone)
            assert {micro.block: micro.indices.tolist() for micro in dealt} == alone


def test_blocks_are_as_many_as_asked_for_and_cost_about_the_same() -> None:
    blocks = plan("by tokens").split(0, 0, 0, 1)
    costs = [len(micro.indices) * LENGTHS[micro.indices].max() for micro in blocks]
    assert len(blocks) == 4
    assert max(costs) < 1.3 * sum(costs) / 4


def test_bounds_of_a_micro_batch_make_more_blocks() -> None:
    assert max(len(micro.indices) for micro in plan("more than asked").split(0, 0, 0, 1)) == 3
    blocks = plan("few tokens").split(0, 0, 0, 1)
    assert len(blocks) > 4
    assert all(len(each.indices) * LENGTHS[each.indices].max() <= 120 for each in blocks)


@pytest.mark.parametrize("bits", [46, 38, 30])
def test_rounded_to_a_grid_any_order_has_one_sum(bits: int) -> None:
    random = torch.Generator().manual_seed(0)
    scale = 2.0 ** torch.randint(-70, 4, (6, 500), generator=random)
    rows = torch.randn(6, 500, generator=random) * scale
    sums = []
    for order in permutations(range(6)):
        total = torch.zeros(500, dtype=torch.float64)
        for row in order:
            total += round_to_grid(rows[row].double(), bits)
        sums.append(total)
    assert all(torch.equal(total, sums[0]) for total in sums)
    exact = torch.tensor([math.fsum(column) for column in rows.T.tolist()], dtype=torch.float64)
    assert float((sums[0] - exact).abs().max()) <= 6 * 2.0 ** -(bits + 1)


def test_the_grid_is_the_finest_on_which_a_sum_is_exact() -> None:
    assert [bits_of_grid(2.0**power) for power in (-9, 6, 7, 14, 15)] == [46, 46, 38, 38, 30]
    assert bits_of_grid(math.nan) == bits_of_grid(math.inf) == FINEST


def test_the_largest_element_is_found_in_any_gradient_and_nan_is_no_number() -> None:
    gradients = [torch.tensor([0.5, -3.0]), None, torch.tensor(2.0), torch.empty(0)]
    assert float(largest_element(gradients)) == 3.0
    assert math.isnan(largest_element([*gradients, torch.tensor([1.0, math.nan])]))
    assert math.isinf(largest_element([*gradients, torch.tensor([[-math.inf]])]))
    assert largest_element([None]) == 0.0


def test_sums_of_many_elements_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distcore.engine.exact.CACHED", 4)
    weight = nn.Parameter(torch.zeros(3, 5))
    sums = GradientSums([weight])
    gradients = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).double()
    for gradient in gradients:
        sums.add([gradient.float()], FINEST)
    sums.give([True])
    assert weight.grad is not None
    assert torch.equal(weight.grad, gradients.float().double().sum(0).float())


def test_sums_are_given_once_rounded_and_never_share_memory() -> None:
    used, unused = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    sums = GradientSums([used, unused])
    for value in (1.0, 2.0**-30):
        sums.add([torch.full((3,), value), None], FINEST)
    sums.give([True, False])
    sums.clear()
    assert used.grad is not None
    assert used.grad.tolist() == [1.0] * 3
    assert unused.grad is None


def exact(**changes: Any) -> RunConfig:
    """A config as far as it is known where ``check_exact`` looks at it."""
    known = {"exact": 4, "nproc": 2, "device": "cpu", "precision": "fp32", "task": "laws"}
    return RunConfig.model_validate(known | changes)


ABLE = replace(SingleStrategy.capabilities, processes="many")
REFUSED: dict[str, tuple[dict[str, Any], Capabilities]] = {
    "does not keep the same bits in fp32; .*single": ({}, replace(ABLE, exact=frozenset())),
    "does not keep the same bits in fp16": ({"precision": "fp16"}, ABLE),
    "4 blocks has work for as many ranks, and --nproc is 5": ({"nproc": 5}, ABLE),
    "measured on CPUs only, and the device is 'xpu'": ({"device": "xpu"}, ABLE),
    "compiled code": ({"compile": "regions"}, ABLE),
    "the optimizer 'lamb-of-its-own' is strategy '.*'s own": (
        {"optimizer": "lamb-of-its-own"},
        ABLE,
    ),
    "does not step each element by itself": (
        {"optimizer": "muon"},
        replace(ABLE, shards_parameters=True),
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_does_not_keep_the_bits_is_refused_in_one_line(says: str) -> None:
    changes, declared = REFUSED[says]
    with pytest.raises(ConfigError, match=f"^exact = 4: .*{says}") as refused:
        check_exact(exact(**changes), declared)
    assert "\n" not in str(refused.value)
    check_exact(RunConfig(), declared)  # without exact nothing is looked at


def test_a_command_ends_before_any_rank_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--exact", "2", "--nproc", "1", "--compile", "on"]) == 2
    assert "error: exact = 2: compiled code" in capsys.readouterr().err


def test_threads_are_one_under_exact_and_nothing_without() -> None:
    assert exact_values(exact()) == {"threads": 1}
    assert exact_values(exact(threads=3)) == {"threads": 3}
    assert exact_values(RunConfig()) == {}
    with pytest.raises(ConfigError, match="threads = 2: is part of the arithmetic of --exact"):
        exact_values(RunConfig(threads=2))


class Embeds(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def with_hook() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.register_post_accumulate_grad_hook(lambda _: None)
    return layer


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.BatchNorm1d(2), "'layer' keeps state of the rows"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), "'layer' keeps state"),
        (nn.Embedding(2, 2, sparse=True), "takes no sparse gradients"),
        (nn.Linear(2, 2, dtype=torch.bfloat16), "is of torch.bfloat16; build it in torch.float32"),
        (with_hook(), "the hook after the gradient of 'layer.weight'"),
    ],
)
def test_modules_whose_bits_follow_from_a_rank_are_refused(layer: nn.Module, says: str) -> None:
    module = Embeds(layer)
    check_module(RunConfig(nproc=1), SingleStrategy.capabilities, module)
    with pytest.raises(ModelError, match=f"^exact = 4: .*{says}"):
        check_module(exact(nproc=1), SingleStrategy.capabilities, module)


class Wraps:
    @hookimpl(wrapper=True)
    def backward(self, run: Run, loss: Tensor) -> Any:
        return (yield)


class WrapsAccumulate:
    @hookimpl(wrapper=True)
    def accumulate(self, run: Run, last: bool) -> Any:
        return (yield)


class Looks(Wraps):
    only_looks = True


def test_extensions_that_wrap_passes_are_refused() -> None:
    refuse_changers(Hooks("single", SingleStrategy(), {"looks": Looks()}))
    for extension, hook in ((Wraps(), "backward"), (WrapsAccumulate(), "accumulate")):
        hooks = Hooks("single", SingleStrategy(), {"mine": extension})
        with pytest.raises(StrategyError, match=rf"^exact: extension 'mine' wraps {hook}\(\)"):
            refuse_changers(hooks)


VALUES: dict[str, Any] = {
    "device": "cpu",
    "exact": 2,
    "nproc": 1,
    "max_steps": 2,
    "global_batch_size": 8,
    "lr": 0.01,
    "extensions": {"progress": False},
}
"""A run of the laws' problem."""


def trained(out: Path, task: Problem | None = None, **changes: Any) -> Path:
    """Train the laws' problem in this process."""
    train(RunConfig.model_validate(VALUES | {"out": str(out)} | changes), task or Problem())
    return out


def newest(out: Path) -> Path:
    """Return the last checkpoint of a run."""
    return max((out / "checkpoints").glob("step-*"))


class ByHand(Climbing):
    def train_step(self, step: Step) -> Tensor:
        share = step.backward(step.forward(0))
        step.apply()
        return share


def test_a_step_of_ones_own_adds_up_all_blocks_at_once(tmp_path: Path) -> None:
    says = r"^exact = 2: step.forward\(\) is of one micro-batch, .*; call step.gradients\(loss\)$"
    with pytest.raises(TaskError, match=says):
        trained(tmp_path / "run", ByHand(), prove="off")
    with pytest.raises(TaskError, match=says):
        in_session(tmp_path / "session", ByHand().train_step)


def in_session(out: Path, use: Callable[[Step], object], **changes: Any) -> Path:
    """Train the laws' problem in a loop of one's own."""
    problem = Problem()
    config = RunConfig.model_validate(VALUES | {"out": str(out)} | changes)
    data = problem.prepare(config)
    with Session(config, lambda: problem.build_model(config, data), data.train) as session:
        for step in session:
            use(step)
    return out


def test_a_session_has_the_bits_of_a_run(tmp_path: Path) -> None:
    def use(step: Step) -> None:
        step.gradients(Problem().loss)
        step.apply()

    folders = [trained(tmp_path / "run"), in_session(tmp_path / "session", use)]
    run, session = (read_tensors(newest(out)) for out in folders)
    assert run.keys() == session.keys()
    assert all(torch.equal(value, session[name]) for name, value in run.items())


class Counts(Problem):
    def build_model(self, config: RunConfig, data: Any) -> nn.Module:
        model = super().build_model(config, data)

        def count(module: nn.Module, *_: object) -> None:
            if module.training:
                module.register_buffer("scale", torch.ones(()))

        model.register_forward_hook(count)
        return model


def test_a_forward_pass_that_writes_a_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="forward pass of the model writes its buffer 'scale'"):
        trained(tmp_path / "run", Counts(), prove="off")


class Reentrant(Problem):
    def build_model(self, config: RunConfig, data: Any) -> nn.Module:
        model = super().build_model(config, data)
        block = model.get_submodule("blocks.0")
        forward = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=True)
        return model


def test_a_reentrant_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="must be with use_reentrant=False"):
        trained(tmp_path / "run", Reentrant(), prove="off")


def test_a_resume_keeps_blocks_threads_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    out = trained(tmp_path / "run")
    assert torch.get_num_threads() == before
    again: dict[str, Any] = {"resume": str(newest(out))}
    for changes, says in (
        ({"exact": 4}, "exact was 2 and is 4"),
        ({"exact": None}, "exact was 2 and is None"),
        ({"threads": 2}, "threads was 1 and is 2"),
        ({"micro_batch_size": 2}, "micro_batch_size was 'auto' and is 2"),
    ):
        with pytest.raises(CheckpointError, match=says):
            trained(tmp_path / "other", **again, **changes)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "another")
    with pytest.raises(CheckpointError, match=r"vector instructions was .* and is 'another' here"):
        trained(tmp_path / "other", **again)


def test_a_logged_loss_is_added_in_one_order_over_an_interruption() -> None:
    losses = list(torch.tensor([0.1, 0.1, 0.2, 0.7], dtype=torch.float64))
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    run: Any = SimpleNamespace(config=RunConfig(exact=2), world=world, loss_multiplier=1)
    hooks: Any = SimpleNamespace(reduce_loss=lambda _, values: values)

    def added(meter: Meter, some: list[Tensor]) -> tuple[float, int]:
        meter.continue_exactly(run)
        for loss in some:
            meter.add(loss, 1)
        return meter.unlogged(run, hooks)

    before = added(Meter(Progress()), losses[:2])
    assert added(Meter(Progress(), before), losses[2:]) == added(Meter(Progress()), losses)
