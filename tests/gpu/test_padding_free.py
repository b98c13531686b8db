"""Rows without padding on an accelerator: each model type against its padded rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from padding_free_models import CASES, answers, model_of

from distcore_tasks.padding_free.layer_hooks import enable_padding_free
from distcore_tasks.padding_free.supported_models import HEADS, HeadName

Row = Callable[[str, str, str], None]
KIND = (
    getattr(torch.accelerator.current_accelerator(), "type", "cpu")
    if torch.accelerator.is_available()
    else "cpu"
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KIND == "cpu", reason="torch sees no accelerator here"),
]


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 5e-2)])
@pytest.mark.parametrize(("head", "kind"), CASES)
def test_outputs_and_gradients(
    head: HeadName, kind: str, precision: str, bound: float, row: Row
) -> None:
    model = model_of(head, kind).to(KIND)
    with torch.autocast(KIND, dtype=torch.bfloat16, enabled=precision == "bf16"):
        padded = answers(head, model)
        enable_padding_free(model, read=HEADS[head].reads)
        free = answers(head, model)
    apart = max(
        float((one - other).norm() / other.norm()) for one, other in zip(free, padded, strict=True)
    )
    row(
        f"{kind}, {head}, {precision}: without padding against padded",
        f"{apart:.1e}",
        f"{bound:.0e}",
    )
    assert apart < bound
