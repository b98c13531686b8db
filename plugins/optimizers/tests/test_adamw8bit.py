"""8-bit AdamW: few bytes, the losses of AdamW, the same bits however rows are
sharded, and AdamW's checkpoints.

Each law also sees an implementation that breaks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distcore import (
    ConfigError,
    RunConfig,
    SavedState,
    footprint,
    join_process_group,
    launch,
    leave_process_group,
)
from distcore.checkpoint import Tensors
from distcore.plugin.strategy import defaults
from distcore.plugin.strategy.contract import RankInfo
from distcore.rank_environment import join
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Problem
from distcore_optimizers import adamw8bit, eight_bits
from distcore_optimizers.adamw8bit import AdamW8bit, EncodedAdamW
from distcore_optimizers.deferred import Deferred
from distcore_optimizers.eight_bits import Encoded, Levels, in_blocks, root_levels, signed_levels

CPU = torch.device("cpu")
RATE = 1e-4
SIZES = torch.logspace(-3, 0, 300)[torch.randperm(300, generator=torch.Generator().manual_seed(0))]
"""Of inputs, and so of gradients inside a row."""
SHAPES = ((64, 512), (40, 300), (33, 257), (5, 80), (16, 8, 3, 5))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(300, 201), nn.GELU(), nn.Linear(201, 96), nn.GELU(), nn.Linear(96, 10)
    )


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(module.parameters()), "lr": RATE, "weight_decay": 0.1}]


def trained(
    module: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, size: int = 1
) -> list[float]:
    """The losses of this rank's rows of random data, which are the same in each run."""
    losses = []
    for step in steps:
        rows = (
            torch.randn(32, 300, generator=torch.Generator().manual_seed(step))[rank::size] * SIZES
        )
        loss = nn.functional.cross_entropy(module(rows), (rows[:, SIZES > 0.5].sum(1) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def samples(shape: tuple[int, ...]) -> Tensor:
    """Values whose size differs by many decades between rows and inside each."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn((shape[0], *[1] * (len(shape) - 1)), generator=random) * 3
    return torch.randn(shape, generator=random) * 10 ** (
        rows + torch.randn(shape, generator=random) * 1.5
    )


def changed(levels: Levels, values: Tensor) -> int:
    """How many scales and codes differ after a checkpoint: decoded, as AdamW's
    moment, and encoded again.
    """
    encoded = levels.encode(values if levels.signed else values.abs())
    decoded = levels.decode(encoded)
    again = levels.encode(decoded if levels.signed else decoded.square().double().sqrt().float())
    return sum(int((one != other).sum()) for one, other in zip(encoded, again, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", [signed_levels, root_levels])
def test_encoding_is_the_nearest_level_and_changes_nothing_that_was_decoded(
    make: Callable[[torch.device], Levels], shape: tuple[int, ...]
) -> None:
    levels, values = make(CPU), samples(shape)
    values = values if levels.signed else values.abs()
    codes, scales = levels.encode(values)
    parts = in_blocks(values) / torch.where(scales > 0, scales, torch.inf).unsqueeze(-1)
    parts = parts.view(shape[0], -1)[:, : values[0].numel()].reshape(shape)
    nearest = torch.bucketize(parts.abs(), levels.middles[:-1]) + 128 * (
        levels.signed & torch.signbit(parts)
    )
    assert torch.equal(codes, nearest.to(torch.uint8))
    assert changed(levels, values) == 0


def test_levels_without_minus_one_change_scales() -> None:
    levels = signed_levels(CPU)
    skewed = levels.values.clone()
    skewed[255] = -0.993  # the levels of other libraries
    assert changed(replace(levels, values=skewed), samples((64, 512))) > 0


def test_a_root_above_zero_is_never_rounded_to_zero() -> None:
    values = torch.tensor([[1.0, 1e-12, 0.0] + [0.5] * 77])
    assert (root_levels(CPU).encode(values).codes[0, :3] > 0).tolist() == [True, True, False]


def test_each_bucket_has_at_most_one_midpoint() -> None:
    for levels in (signed_levels(CPU), root_levels(CPU)):
        keys = levels.middles[:-1].view(torch.int32) >> 16
        assert len(keys.unique()) == len(keys)


@pytest.mark.parametrize(
    "shape", [(1000, 80), (100, 129), (64, 255), (64, 257), (16, 4096), (8, 3, 9, 9)], ids=str
)
def test_a_matrix_has_state_of_2_1_bytes_a_parameter(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    module = nn.ParameterList([parameter])
    optimizer = AdamW8bit().build(module, groups_of(module))
    assert (footprint.optimizer_bytes(optimizer) - 4) / parameter.numel() <= 2.1
    assert footprint.saved_bytes(optimizer) == 8 * parameter.numel() + 4


def distances() -> tuple[float, float]:
    """The largest distance from AdamW's: of a loss, relative; of a weight, in learning rates."""
    one, other = network(), network()
    own = trained(one, AdamW8bit().build(one, groups_of(one)), range(20))
    whole = trained(other, torch.optim.AdamW(groups_of(other)), range(20))
    weights = max(
        (a - b).abs().max().item()
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )
    return max(abs(a - b) / b for a, b in zip(own, whole, strict=True)), weights / RATE


class Squares(Levels):
    """Keep the second moment itself, rounded to the nearest level: the broken implementation."""

    def encode(self, values: Tensor) -> Encoded:
        return super().encode(values.square())

    def decode(self, encoded: Encoded) -> Tensor:
        return super().decode(encoded).sqrt()


def squares(device: torch.device) -> Levels:
    values = root_levels(device).values
    return Squares(values, *eight_bits._search_table((values[1:] + values[:-1]) / 2), signed=False)


@pytest.mark.programs
def test_losses_are_those_of_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, weight = distances()
    assert loss < 2e-5
    assert weight < 5
    monkeypatch.setattr(adamw8bit, "root_levels", squares)
    assert distances()[1] > 50


@pytest.mark.programs
def test_a_checkpoint_has_adamws_moments_one_at_a_time_and_a_resume_repeats_each_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adamw8bit, "AT_ONCE", 1000)  # several pieces
    whole, first, second = network(), network(), network()
    optimizers = [AdamW8bit().build(module, groups_of(module)) for module in (whole, first, second)]
    expected = trained(whole, optimizers[0], range(6))
    assert trained(first, optimizers[1], range(3)) == expected[:3]
    second.load_state_dict(first.state_dict())
    run: Any = Saved(first, optimizers[1])
    state = defaults.optimizer_state(run)
    assert {name.rpartition("/")[2] for name in state} == {"step", "exp_avg", "exp_avg_sq"}
    moments = [value for name, value in state.items() if name.endswith("0.weight/exp_avg_sq")]
    assert all(
        isinstance(moment, Deferred) and isinstance(moment.detach().reshape(-1), Deferred)
        for moment in moments
    )
    saved = Tensors({name: value.detach().to("cpu", copy=True) for name, value in state.items()})
    assert all(type(value) is Tensor for value in saved.values())
    asked: list[str] = []

    def reader(_: Tensor, name: str, tensors: SavedState) -> Tensor:
        asked.append(name)
        return tensors[name]

    resumed: Any = Saved(second, optimizers[2])
    defaults.load_optimizer(resumed, saved, reader)
    assert len(asked) == 18
    assert trained(second, optimizers[2], range(3, 6)) == expected[3:]


class Saved:
    """The part of a run that saving and loading read."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer


def test_a_deferred_tensor_cannot_be_written_to() -> None:
    deferred = Deferred(lambda: torch.ones(2, 3), (2, 3), CPU)
    assert torch.equal(deferred + 1, torch.full((2, 3), 2.0))
    assert torch.equal(deferred.reshape(-1)[1:3], torch.ones(2))
    with pytest.raises(NotImplementedError, match="no memory to write to"):
        deferred.zero_()


@pytest.mark.parametrize("strategy", ["deepspeed", "mesh"])
def test_a_strategy_that_cuts_rows_refuses_it_in_one_line(strategy: str) -> None:
    pytest.importorskip(f"distcore_{strategy}")
    config = RunConfig(strategy=strategy, nproc=2, device="cpu", optimizer={"name": "adamw8bit"})
    with pytest.raises(
        ConfigError,
        match=rf"^optimizer.name = 'adamw8bit': strategy '{strategy}' takes .*could take it$",
    ):
        resolve(config, task=Problem())


def across_rows(values: Tensor) -> Tensor:
    """Blocks that run over the end of a row: the broken implementation."""
    return values.reshape(1, -1, values.numel() // 3)


def both_ways(is_broken: bool) -> tuple[list[float], list[float], list[bool]]:
    """The losses under DDP and under FSDP2, and whether each parameter and moment is the
    same bit for bit.
    """
    if is_broken:
        eight_bits.in_blocks = across_rows
        vars(adamw8bit)["zeros"] = lambda shape, device: Encoded(
            torch.zeros(shape, dtype=torch.uint8), torch.zeros(1, 3)
        )
    info = join() or RankInfo()
    world = join_process_group(RunConfig(device="cpu", timeout=60), info)
    one, other = network(), network()
    for layer in (other[0], other[2]):  # type: ignore[index]
        fully_shard(layer)
    fully_shard(other)
    optimizers = [AdamW8bit().build(module, groups_of(module)) for module in (one, other)]
    replicated = trained(
        DistributedDataParallel(one), optimizers[0], range(4), world.rank, world.size
    )
    sharded = trained(other, optimizers[1], range(4), world.rank, world.size)
    pairs: list[Any] = list(zip(one.parameters(), other.parameters(), strict=True))
    same = [torch.equal(a, b.full_tensor()) for a, b in pairs]
    for a, b in pairs:
        assert all(isinstance(optimizer, EncodedAdamW) for optimizer in optimizers)
        left, right = (o.saved_state(p) for o, p in zip(optimizers, (a, b), strict=True))  # type: ignore[attr-defined]
        if a.dim() > 1 and not is_broken:
            same += [
                torch.equal(left[key] * 1, (right[key] * 1).full_tensor())
                for key in ("exp_avg", "exp_avg_sq")
            ]
    leave_process_group(world)
    return replicated, sharded, same


@pytest.mark.ranks
@pytest.mark.parametrize("is_broken", [False, True])
def test_ddp_and_fsdp2_agree_to_the_digit(is_broken: bool) -> None:
    for replicated, sharded, same in launch(both_ways, is_broken, nproc=2, timeout=100):
        assert (replicated == sharded and all(same)) is not is_broken
