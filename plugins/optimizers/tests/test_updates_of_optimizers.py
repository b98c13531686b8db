"""The steps of Muon, Lion and Adafactor are those of their sources."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distcore import ConfigError, RunConfig, join_process_group, launch, leave_process_group
from distcore.plugin.strategy.contract import RankInfo
from distcore.rank_environment import join
from distcore.testing.problem import Classifier
from distcore_optimizers.adafactor import Adafactor
from distcore_optimizers.lion import Lion
from distcore_optimizers.muon import Muon, WholeMuon


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(module.parameters()), "lr": 0.1, "weight_decay": 0.1}]


def apply_steps(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[list[Tensor]]
) -> None:
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def test_muon_says_which_part_it_steps(caplog: pytest.LogCaptureFixture) -> None:
    module = Classifier()
    with caplog.at_level("INFO", "distcore"):
        for _ in range(2):
            Muon().build(module, groups_of(module))
    [line] = [message for message in caplog.messages if message.startswith("muon")]
    matrices = sum(p.numel() for block in module.blocks for p in block.parameters() if p.ndim == 2)
    share = matrices / sum(p.numel() for p in module.parameters())
    assert line.startswith(
        f"muon steps {share:.1%} of the trained parameters (Linear {share:.1%}); adamw steps "
    )


def test_adafactor_is_torchs_own() -> None:
    trained, expected = Classifier(), Classifier()
    expected.load_state_dict(trained.state_dict())
    gradients = [[torch.randn_like(p) for p in trained.parameters()] for _ in range(3)]
    own, theirs = (
        Adafactor().build(trained, groups_of(trained)),
        torch.optim.Adafactor(groups_of(expected)),
    )
    assert type(own) is type(theirs)
    for module, optimizer in ((trained, own), (expected, theirs)):
        apply_steps(optimizer, list(module.parameters()), gradients)
    for a, b in zip(trained.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_lion_is_the_algorithm_of_the_paper() -> None:
    weight, mean = torch.tensor([1.0, -2.0, 0.5]), torch.zeros(3)
    parameter = nn.Parameter(weight.clone())
    optimizer = Lion(betas=(0.9, 0.99)).build(
        nn.Module(), [{"params": [parameter], "lr": 0.1, "weight_decay": 0.5}]
    )
    for gradient in torch.tensor([[1.0, -3.0, 0.0], [-0.05, 2.0, 4.0], [-0.2, 2.0, -1.0]]):
        direction = torch.sign(0.9 * mean + 0.1 * gradient)  # line by line: algorithm 2
        mean = 0.99 * mean + 0.01 * gradient
        weight = weight - 0.1 * (direction + 0.5 * weight)
        apply_steps(optimizer, [parameter], [[gradient]])
    torch.testing.assert_close(parameter.detach(), weight)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], mean)


def test_muon_is_torchs_for_matrices_of_blocks_and_adamw_for_the_rest() -> None:
    trained, expected = Classifier(), Classifier()
    expected.load_state_dict(trained.state_dict())
    matrices = [
        p for name, p in expected.named_parameters() if name.startswith("blocks.") and p.ndim == 2
    ]
    rest = [p for p in expected.parameters() if all(p is not matrix for matrix in matrices)]
    assert len(matrices) == 4
    theirs = [
        torch.optim.Muon(matrices, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.1, weight_decay=0.1, fused=True),
    ]
    gradients = [[torch.randn_like(p) for p in trained.parameters()] for _ in range(3)]
    apply_steps(Muon().build(trained, groups_of(trained)), list(trained.parameters()), gradients)
    for step in gradients:
        for parameter, gradient in zip(expected.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        for optimizer in theirs:
            optimizer.step()
    for a, b in zip(trained.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def test_muon_steps_on_after_its_state_was_loaded_and_its_rate_changed() -> None:
    first, second = Classifier(), Classifier()
    gradients = [[torch.randn_like(p) for p in first.parameters()] for _ in range(4)]
    whole = Muon().build(first, groups_of(first))
    apply_steps(whole, list(first.parameters()), gradients[:2])
    second.load_state_dict(first.state_dict())
    loaded = Muon().build(second, groups_of(second))
    loaded.load_state_dict(deepcopy(whole.state_dict()))
    for optimizer, module in ((whole, first), (loaded, second)):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        apply_steps(optimizer, list(module.parameters()), gradients[2:])
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_muon_without_a_matrix_to_train_is_one_line() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(
        ConfigError,
        match=r"^optimizer.name = 'muon': no matrix to train in repeated blocks, .*adamw$",
    ):
        Muon().build(model, [{"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.0}])


def sharded_and_whole() -> tuple[float, float]:
    """Muon on shards against Muon on whole matrices, for the same gradients: how far apart
    weights and moments are.
    """
    world = join_process_group(RunConfig(device="cpu", timeout=60), join() or RankInfo())
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape)) for shape in ((5, 8), (16, 6))]
    shards = [nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in whole]
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = torch.optim.Muon(whole, **settings), WholeMuon(shards, **settings)
    for _ in range(5):
        for p, shard in zip(whole, shards, strict=True):
            p.grad = torch.randn_like(p)
            shard.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    moments = [
        [optimizer.state[p]["momentum_buffer"] for p in ps]
        for optimizer, ps in zip(optimizers, (whole, shards), strict=True)
    ]
    distances = largest(whole, shards), largest(*moments)
    leave_process_group(world)
    return distances


def largest(whole: list[Any], shards: list[Any]) -> float:
    def gathered(shard: Tensor) -> Tensor:
        assert isinstance(shard, DTensor)
        return shard.full_tensor()

    return max(
        float((gathered(b) - a).detach().abs().max()) for a, b in zip(whole, shards, strict=True)
    )


@pytest.mark.ranks
def test_muon_on_shards_is_muon_on_whole_matrices() -> None:
    """Closer than the bound of bf16, which would not tell sums of rounded shards from it."""
    for weights, moments in launch(sharded_and_whole, nproc=2, timeout=60):
        assert weights < 1e-6
        assert moments == 0
