"""A model with 16-bit parameters takes and returns fp32, as it would under autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distcore import defaults


class Two(nn.Module):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.given: list[torch.dtype] = []

    def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> dict[str, Tensor]:
        self.given = [x.dtype, more["mask"].dtype, more["fine"].dtype]
        return {"y": self.line(x), "mask": more["mask"]}


def test_inputs_are_cast_and_results_are_fp32() -> None:
    model = Two().bfloat16()
    defaults.results_in_fp32(model, torch.bfloat16)
    more = {"mask": torch.ones(1, dtype=torch.long), "fine": torch.ones(1, dtype=torch.float64)}
    result = model(torch.ones(1, 2), more=more)
    assert model.given == [torch.bfloat16, torch.long, torch.float64]
    assert (result["y"].dtype, result["mask"].dtype) == (torch.float32, torch.long)
