"""Checkpoints of DTensors: each element saved once, read back where it belongs, whatever
the mesh looks like.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distcore import (
    Capabilities,
    Run,
    RunConfig,
    World,
    dtensors,
    join_process_group,
    launch,
    leave_process_group,
)
from distcore.checkpoint import Tensors
from distcore.checkpoint.writer import blocks_to_write
from distcore.plugin.strategy.contract import RankInfo
from distcore.plugin.strategy.state import Piece, State
from distcore.rank_environment import join

SHAPES = {
    "even": (4, 3),
    "uneven": (3, 2),
    "fewer rows than ranks": (1, 5),
    "vector": (5,),
    "no dimensions": (),
}

pytestmark = pytest.mark.ranks


class Spread(nn.Module):
    """Parameters that are 0, 1, 2 … in all, two replicas of two shards each."""

    def __init__(self, filled: bool = True) -> None:
        super().__init__()
        mesh, start = init_device_mesh("cpu", (2, 2)), 0
        for name, shape in SHAPES.items():
            count = torch.Size(shape).numel()
            whole = torch.arange(start, start + count, dtype=torch.float32).reshape(shape) * filled
            placements = [Replicate(), Shard(0) if shape else Replicate()]
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, placements)))
            start += count
        self.register_buffer("plain", torch.full((2,), 7.0) * filled)


def run_of(module: nn.Module, world: World, optimizer: torch.optim.Optimizer | None = None) -> Run:
    capabilities = Capabilities(spec_version=3)
    return Run(
        config=RunConfig(),
        world=world,
        capabilities=capabilities,
        module=module,
        model=module,
        optimizer=optimizer,
    )


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has taken a step on ``module``."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) * 3
    optimizer.step()
    return optimizer


def saved_on_this_rank() -> State:
    world = join_process_group(RunConfig(device="cpu"), join(os.environ) or RankInfo())
    module = Spread()
    state = dtensors.save(run_of(module, world, stepped(module)))
    leave_process_group(world)
    return state


def loaded_on_this_rank(checkpoint: Tensors) -> dict[str, torch.Tensor]:
    """Load into a model of zeros; return its tensors and those of its optimizer, gathered."""
    world = join_process_group(RunConfig(device="cpu"), join(os.environ) or RankInfo())
    module = Spread(filled=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    assert dtensors.load(run_of(module, world, optimizer), checkpoint)
    held: dict[str, Any] = {f"model/{name}": value for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        held |= {
            f"optimizer/{name}/{key}": value for key, value in optimizer.state[parameter].items()
        }
    tensors = {
        name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
        for name, v in held.items()
    }
    leave_process_group(world)
    return tensors


@pytest.fixture(scope="module")
def ranks() -> list[State]:
    """The tensors that each of four ranks saves."""
    return launch(saved_on_this_rank, nproc=4)


def together(ranks: list[State], name: str) -> torch.Tensor:
    """The whole tensor, from the pieces of all ranks."""
    pieces = [
        state[name]
        for state in ranks
        if name in state and not getattr(state[name], "replica", False)
    ]
    first = pieces[0]
    if isinstance(first, torch.Tensor):
        return first
    assert isinstance(first, Piece)
    ordered = sorted(
        (piece for piece in pieces if isinstance(piece, Piece)), key=lambda piece: piece.start
    )
    assert [piece.start for piece in ordered] == [
        sum(piece.values.numel() for piece in ordered[:index]) for index in range(len(ordered))
    ], "pieces overlap, or leave a gap"
    return torch.cat([piece.values for piece in ordered]).reshape(first.shape)


@pytest.mark.parametrize("name", SHAPES)
def test_each_element_is_saved_by_one_rank(name: str, ranks: list[State]) -> None:
    whole = together(ranks, f"model/{name}")
    assert whole.shape == SHAPES[name]
    start = sum(
        torch.Size(shape).numel() for shape in list(SHAPES.values())[: list(SHAPES).index(name)]
    )
    assert whole.reshape(-1).tolist() == list(range(start, start + whole.numel()))
    assert (together(ranks, f"optimizer/{name}/exp_avg") == 0.3).all()


def test_a_replica_that_is_not_the_first_leaves_its_shards_to_that_one(ranks: list[State]) -> None:
    for rank, state in enumerate(ranks):
        even = state["model/even"]
        assert isinstance(even, Piece)
        assert even.replica == (rank >= 2)
        written = {block.name for block in blocks_to_write(state, rank, 4)}
        assert ("model/even" in written) == (rank < 2)
        assert "model/plain" in state


def test_a_saved_dtensor_is_read_back_on_every_rank(ranks: list[State]) -> None:
    checkpoint = Tensors({name: together(ranks, name) for name in ranks[0] | ranks[1]})
    for loaded in launch(loaded_on_this_rank, checkpoint, nproc=4):
        assert loaded.keys() == checkpoint.keys()
        assert all(torch.equal(loaded[name], checkpoint[name]) for name in checkpoint)


def filled_by_columns() -> str:
    world = join_process_group(RunConfig(device="cpu"), join(os.environ) or RankInfo())
    columns = distribute_tensor(torch.zeros(2, 4), init_device_mesh("cpu", (2,)), [Shard(1)])
    try:
        dtensors.fill(columns, lambda start, count: torch.ones(count))
    except ValueError as error:
        return str(error)
    finally:
        leave_process_group(world)
    return "filled"


def test_a_tensor_that_is_sharded_by_columns_is_refused() -> None:
    for said in launch(filled_by_columns, nproc=2):
        assert said.endswith("only the first dimension may be sharded")
