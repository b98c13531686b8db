"""The first save of a run compares what it writes with the module, and reads the files again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import saver
from torch import Tensor, nn

from distcore import Piece, RunConfig, World
from distcore.checkpoint import Checkpoint
from distcore.checkpoint.read_back import check_is_model
from distcore.checkpoint.saver import Saver
from distcore.errors import CheckpointError
from distcore.plugin.strategy.contract import Progress, Run
from distcore.plugin.strategy.state import Box, State
from distcore.strategies.single import SingleStrategy
from distcore.testing.lab import Unsynced

NAME = "model/blocks.0.up.weight"


class Swaps(Unsynced):
    """A disk that changes one bit of the last number of a file that it writes."""

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        whole = bytearray(b"".join(bytes(chunk) for chunk in chunks))
        if path.suffix == ".safetensors":
            whole[-1] ^= 1
        super().write(path, [bytes(whole)])


def saving(out: Path, disk: Unsynced, asynchronous: bool, wrong: dict[str, Tensor]) -> Saver:
    """A saver whose strategy returns ``wrong`` in place of weights of the module."""
    made, _ = saver(out, disk, asynchronous)
    hooks: Any = made._hooks
    saved = hooks.save_checkpoint
    hooks.save_checkpoint = lambda run: saved(run) | wrong
    return made


def save(made: Saver, step: int = 1) -> None:
    made.save(Progress(step=step), None)
    made.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_with_another_weight_than_the_modules_is_not_committed(
    tmp_path: Path, asynchronous: bool
) -> None:
    _, run = saver(tmp_path, Unsynced(), asynchronous)
    weight = run.module.get_parameter(NAME.removeprefix("model/")).detach().clone()
    weight[1, 2] += 1
    said = (
        r"'blocks.0.up.weight': the weight that strategy 'single' saves .* \(1 of \d+ numbers, such"
        r" as .* in place of"
    )
    with pytest.raises(CheckpointError, match=said) as caught:
        save(saving(tmp_path, Unsynced(), asynchronous, {NAME: weight}))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_files_that_return_other_numbers_are_no_commit(tmp_path: Path, asynchronous: bool) -> None:
    with pytest.raises(
        CheckpointError, match=r"model-00000-000.safetensors: .* is read back with other values"
    ):
        save(saving(tmp_path, Swaps(), asynchronous, {}))
    assert [*(tmp_path / "checkpoints").iterdir()] == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_first_save_of_a_process_is_read_back_and_no_later_one(
    tmp_path: Path, asynchronous: bool
) -> None:
    made = saving(tmp_path, Unsynced(), asynchronous, {})
    save(made)
    made._files = Swaps()
    save(made, 2)
    assert Checkpoint(tmp_path / "checkpoints/step-00000002")


WEIGHT = torch.arange(12.0).view(3, 4) / 7
PARTS: dict[str, tuple[torch.dtype, Any]] = {
    "whole": (torch.float32, WEIGHT.clone()),
    "a master in fp32 of a weight in 16 bits": (torch.bfloat16, WEIGHT.clone()),
    "a piece": (torch.float32, Piece(WEIGHT.flatten()[5:9].clone(), 5, (3, 4))),
    "boxes": (
        torch.bfloat16,
        [Box(WEIGHT[1:, :2].clone(), (1, 0), (3, 4)), Box(WEIGHT[1:, 2:].clone(), (1, 2), (3, 4))],
    ),
    "no number": (torch.float32, torch.full((3, 4), torch.nan)),
}


@pytest.mark.parametrize("case", PARTS)
def test_each_form_of_a_saved_weight_is_compared_with_the_modules(case: str) -> None:
    dtype, part = PARTS[case]
    module = nn.Linear(4, 3, bias=False)
    module.weight = nn.Parameter((part if case == "no number" else WEIGHT).to(dtype, copy=True))
    run = running(module)
    check_is_model(run, {"model/weight": part}, in_module)
    with torch.no_grad():
        module.weight[2, 0] = 9.0
    with pytest.raises(CheckpointError, match="'weight': the weight that strategy"):
        check_is_model(run, {"model/weight": part}, in_module)


def in_module(run: Run) -> State:
    """Nothing but the module's tensors computes."""
    return {}


def running(module: nn.Module) -> Run:
    return Run(
        config=RunConfig(),
        world=World(rank=0, size=1, local_rank=0, device=torch.device("cpu")),
        capabilities=SingleStrategy.capabilities,
        module=module,
        model=module,
    )


def test_a_rank_compares_its_partition_with_that_of_an_engine_that_keeps_the_weights() -> None:
    """As DeepSpeed's stage 3 does: the module's own tensors are empty, and
    partitions may begin elsewhere.
    """
    module = nn.Linear(4, 3, bias=False)
    module.weight = nn.Parameter(torch.empty(0))
    computed: State = {"model/weight": Piece(WEIGHT.flatten()[4:8].to(torch.bfloat16), 4, (3, 4))}
    for start, stop in ((4, 8), (5, 7), (0, 6), (6, 12), (0, 4)):
        saved = WEIGHT.flatten()[start:stop].clone()
        check_is_model(
            running(module), {"model/weight": Piece(saved, start, (3, 4))}, lambda run: computed
        )
    wrong = Piece(WEIGHT.flatten()[5:9].clone(), 4, (3, 4))  # right weights in the wrong place
    with pytest.raises(CheckpointError, match=r"'weight': the weight .* \(4 of 4 numbers, such as"):
        check_is_model(running(module), {"model/weight": wrong}, lambda run: computed)


@pytest.mark.parametrize("dimension", [0, 1])
def test_a_rank_compares_its_share_of_a_tensor_that_is_split(dimension: int) -> None:
    """As tensor parallelism does: the module has two blocks of a larger tensor, side by side."""
    module = nn.Linear(4, 3, bias=False)
    module.weight = nn.Parameter(WEIGHT.clone())
    shape = (6, 4) if dimension == 0 else (3, 8)
    cut = 1 if dimension == 0 else 3
    values = [
        WEIGHT.narrow(dimension, 0, cut),
        WEIGHT.narrow(dimension, cut, WEIGHT.shape[dimension] - cut),
    ]
    boxes = [Box(part.clone(), (0, 0), shape) for part in values]
    check_is_model(running(module), {"model/weight": boxes}, in_module)
    with torch.no_grad():
        module.weight[2, 3] = 9.0
    with pytest.raises(CheckpointError, match="'weight': the weight that strategy"):
        check_is_model(running(module), {"model/weight": boxes}, in_module)
