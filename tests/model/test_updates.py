"""Each optimizer's step is that of its source, and an optimizer that declares to be elementwise is."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distcore import registry
from distcore.model.blocks import hidden_matrices
from distcore.model.optim import optimizer_class
from distcore.model.optimizers.lion import Lion
from distcore.model.optimizers.muon import Muon
from distcore.plugin.options import build
from distcore.testing.problem import Classifier

SETTINGS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9, "nesterov": True}}
"""Options with which an optimizer keeps state."""
NAMES = sorted(registry.offers("optimizers"))


def optimizer_of(name: str, module: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    plugin: Any = build("optimizer", name, optimizer_class(name), SETTINGS.get(name, {}))
    group = {"params": list(module.parameters()), "lr": 0.1, "weight_decay": 0.1, **settings}
    made: torch.optim.Optimizer = plugin.build(module, [group])
    return made


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[list[Tensor]]) -> None:
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


class Matrices(nn.Module):
    """Blocks of one matrix each, whose values are given."""

    def __init__(self, *values: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Held(value)) for value in values)


class Held(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value.clone())


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_is_elementwise_if_and_only_if_it_says_so(name: str) -> None:
    """Steps of two whole matrices against steps of their flattened elements, joined and cut elsewhere."""
    torch.manual_seed(0)
    whole = Matrices(*(torch.randn(4, 6) for _ in range(2)))
    gradients = [[torch.randn(4, 6) * 10.0**scale for scale in (0, 1)] for _ in range(3)]
    all_values: list[list[Tensor]] = [list(whole.parameters()), *gradients]
    flat = [torch.cat([value.reshape(-1) for value in values]) for values in all_values]
    cut = Matrices(*flat[0].detach().tensor_split([7]))
    stepped(optimizer_of(name, whole), list(whole.parameters()), gradients)
    expected = torch.cat([value.detach().reshape(-1) for value in whole.parameters()])
    try:
        stepped(optimizer_of(name, cut), list(cut.parameters()), [list(step.tensor_split([7])) for step in flat[1:]])
        same = torch.allclose(torch.cat([p.detach() for p in cut.parameters()]), expected, rtol=1e-5)
    except Exception:  # Muon refuses what is no matrix
        same = False
    assert same == optimizer_class(name).elementwise


OF_TORCH: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_an_optimizer_of_torch_is_torchs_own(name: str) -> None:
    found, expected = Classifier(), Classifier()
    expected.load_state_dict(found.state_dict())
    gradients = [[torch.randn_like(p) for p in found.parameters()] for _ in range(3)]
    own = optimizer_of(name, found)
    theirs = OF_TORCH[name]([{"params": list(expected.parameters()), "lr": 0.1, "weight_decay": 0.1}])
    assert type(own) is type(theirs)
    for module, optimizer in ((found, own), (expected, theirs)):
        stepped(optimizer, list(module.parameters()), gradients)
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_lion_is_the_algorithm_of_the_paper() -> None:
    weight, mean = torch.tensor([1.0, -2.0, 0.5]), torch.zeros(3)
    parameter = nn.Parameter(weight.clone())
    optimizer = Lion(betas=(0.9, 0.99)).build(nn.Module(), [{"params": [parameter], "lr": 0.1, "weight_decay": 0.5}])
    for gradient in torch.tensor([[1.0, -3.0, 0.0], [-0.05, 2.0, 4.0], [-0.2, 2.0, -1.0]]):
        direction = torch.sign(0.9 * mean + 0.1 * gradient)  # line by line: algorithm 2
        mean = 0.99 * mean + 0.01 * gradient
        weight = weight - 0.1 * (direction + 0.5 * weight)
        stepped(optimizer, [parameter], [[gradient]])
    torch.testing.assert_close(parameter.detach(), weight)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], mean)


def test_muon_is_torchs_for_matrices_of_blocks_and_adamw_for_the_rest() -> None:
    found, expected = Classifier(), Classifier()
    expected.load_state_dict(found.state_dict())
    matrices = [p for name, p in expected.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    rest = [p for p in expected.parameters() if all(p is not matrix for matrix in matrices)]
    assert len(matrices) == 4
    theirs = [
        torch.optim.Muon(matrices, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.1, weight_decay=0.1, fused=True),
    ]
    gradients = [[torch.randn_like(p) for p in found.parameters()] for _ in range(3)]
    stepped(optimizer_of("muon", found), list(found.parameters()), gradients)
    for step in gradients:
        for parameter, gradient in zip(expected.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        for optimizer in theirs:
            optimizer.step()
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def test_muon_steps_on_after_its_state_was_loaded_and_its_rate_changed() -> None:
    first, second = Classifier(), Classifier()
    gradients = [[torch.randn_like(p) for p in first.parameters()] for _ in range(4)]
    whole = optimizer_of("muon", first)
    stepped(whole, list(first.parameters()), gradients[:2])
    second.load_state_dict(first.state_dict())
    loaded = optimizer_of("muon", second)
    loaded.load_state_dict(deepcopy(whole.state_dict()))
    for optimizer, module in ((whole, first), (loaded, second)):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        stepped(optimizer, list(module.parameters()), gradients[2:])
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_hidden_matrices_are_those_of_blocks_without_embeddings() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8)
            self.positions = nn.Embedding(3, 4)
            self.kernel = nn.Conv1d(4, 4, 3)

    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "layers": nn.ModuleList([Block(), Block()])})
    model["head"] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))  # numbered, but with nothing inside: no blocks
    names = {name for name, p in model.named_parameters() if p in hidden_matrices(model)}
    assert names == {"layers.0.up.weight", "layers.1.up.weight"}


def test_muon_without_a_matrix_to_train_is_one_line() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(Exception, match=r"^optimizer.name = 'muon': no matrix to train in repeated blocks, .*adamw$"):
        Muon().build(model, [{"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.0}])
