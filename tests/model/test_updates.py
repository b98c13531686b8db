"""Each optimizer's step is that of its source, and an optimizer that declares
to be elementwise is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distcore import registry
from distcore.model.blocks import hidden_matrices
from distcore.model.optim import optimizer_class
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


def apply_steps(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[list[Tensor]]
) -> None:
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
    """Steps of two whole matrices against steps of their flattened elements,
    joined and cut elsewhere.
    """
    torch.manual_seed(0)
    whole = Matrices(*(torch.randn(4, 96) for _ in range(2)))
    gradients = [[torch.randn(4, 96) * 10.0**scale for scale in (0, 1)] for _ in range(3)]
    all_values: list[list[Tensor]] = [list(whole.parameters()), *gradients]
    flat = [torch.cat([value.reshape(-1) for value in values]) for values in all_values]
    cut = Matrices(*flat[0].detach().tensor_split([7]))
    apply_steps(optimizer_of(name, whole), list(whole.parameters()), gradients)
    expected = torch.cat([value.detach().reshape(-1) for value in whole.parameters()])
    try:
        apply_steps(
            optimizer_of(name, cut),
            list(cut.parameters()),
            [list(step.tensor_split([7])) for step in flat[1:]],
        )
        same = torch.allclose(
            torch.cat([p.detach() for p in cut.parameters()]), expected, rtol=1e-5
        )
    except Exception:  # Muon refuses what is no matrix
        same = False
    assert same == optimizer_class(name).elementwise


OF_TORCH: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_an_optimizer_of_torch_is_torchs_own(name: str) -> None:
    trained, expected = Classifier(), Classifier()
    expected.load_state_dict(trained.state_dict())
    gradients = [[torch.randn_like(p) for p in trained.parameters()] for _ in range(3)]
    own = optimizer_of(name, trained)
    theirs = OF_TORCH[name](
        [{"params": list(expected.parameters()), "lr": 0.1, "weight_decay": 0.1}]
    )
    assert type(own) is type(theirs)
    for module, optimizer in ((trained, own), (expected, theirs)):
        apply_steps(optimizer, list(module.parameters()), gradients)
    for a, b in zip(trained.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_hidden_matrices_are_those_of_blocks_without_embeddings() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8)
            self.positions = nn.Embedding(3, 4)
            self.kernel = nn.Conv1d(4, 4, 3)

    model = nn.ModuleDict(
        {"words": nn.Embedding(9, 4), "layers": nn.ModuleList([Block(), Block()])}
    )
    # numbered, but with nothing inside: no blocks
    model["head"] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    names = {name for name, p in model.named_parameters() if p in hidden_matrices(model)}
    assert names == {"layers.0.up.weight", "layers.1.up.weight"}
