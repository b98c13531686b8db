"""Dropout as it is drawn on a CPU: as often as asked, unbiased, and repeated by the seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcore import RunConfig
from distcore.model.dropout import DrawnDropout, draw_cheaply

VALUES = 2**20


def drawn(probability: float, given: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    output: Tensor = DrawnDropout(probability)(given)
    return output


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_as_many_values_are_dropped_as_asked(probability: float) -> None:
    output = drawn(probability, torch.ones(VALUES))
    deviation = (probability * (1 - probability) / (VALUES / 4)) ** 0.5
    for lane in range(4):  # four values share a number of the generator
        assert float((output[lane::4] == 0).double().mean()) == pytest.approx(
            probability, abs=4.5 * deviation
        )
    kept = output[output != 0]
    assert kept.unique().numel() == 1
    assert float(kept[0]) == pytest.approx(1 / (1 - probability), rel=1e-3)


def test_values_that_share_a_number_are_independent() -> None:
    zeros = (drawn(0.5, torch.ones(VALUES)) == 0).double().view(-1, 4)
    correlation = torch.corrcoef(zeros.T) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_has_the_mask_of_the_values(dtype: torch.dtype) -> None:
    given = torch.full((3, 5, 7), 2.0, dtype=dtype, requires_grad=True)
    output = drawn(0.5, given)
    output.sum().backward()
    assert output.dtype == dtype
    assert torch.equal(given.grad, output.detach() / 2)  # type: ignore[arg-type]
    assert set(output.flatten().tolist()) == {0.0, 4.0}


def test_dropout_repeats_by_seed_and_when_computed_again_in_backward() -> None:
    given = torch.randn(64, 64, requires_grad=True)
    assert torch.equal(drawn(0.3, given), drawn(0.3, given))
    assert not torch.equal(drawn(0.3, given), drawn(0.3, given, seed=1))
    dropout, grads = DrawnDropout(0.3), []
    for once in (True, False):
        torch.manual_seed(0)
        made = dropout(given) if once else checkpoint(dropout, given, use_reentrant=False)
        grads.append(torch.autograd.grad(made.square().sum(), given)[0])
    assert torch.equal(*grads)


def test_dropout_is_torchs_own_where_nothing_is_to_be_drawn() -> None:
    given = torch.randn(8)
    assert torch.equal(DrawnDropout(0.0)(given), given)
    assert torch.equal(DrawnDropout(1.0)(given), torch.zeros(8))
    assert torch.equal(DrawnDropout(0.5).eval()(given), given)
    assert DrawnDropout(0.5)(given[:0]).shape == (0,)


@pytest.mark.parametrize(("settings", "drawn_so"), [({}, True), ({"compile": "regions"}, False)])
def test_a_model_on_a_cpu_has_it_unless_it_is_compiled(
    tmp_path: Path, settings: dict[str, str], drawn_so: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    draw_cheaply(
        RunConfig.model_validate({"device": "cpu", "out": str(tmp_path)} | settings), model
    )
    assert isinstance(model[1], DrawnDropout) == drawn_so
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
