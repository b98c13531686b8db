"""Operations of the model and the peak of a device are those of a count by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_task import TEXTS, UNTRACEABLE

from distcore import RunConfig, load_config
from distcore.lab import complete, model_source, resolve
from distcore_workbench.observe.flops import count_flops
from distcore_workbench.observe.peaks import peak_of, peak_of_name
from distcore_workbench.observe.row_flops import RowFlops

pytestmark = pytest.mark.programs

D, LAYERS, CLASSES = 128, 2, 2
PER_LAYER = 12 * D**2
"""Weights of the linear layers of one layer of BERT."""
BY_ATTENTION = LAYERS * 2 * D
"""Multiplications of a row of length 1 in the two products of attention; they grow with the
square of the length.
"""


def counted(changes: dict[str, Any]) -> RowFlops | None:
    """Return the operations of a row of a job."""
    config = load_config(
        None, {"task": TEXTS, "device": "cpu", "max_steps": 1, "out": "run"} | changes
    )
    resolved = resolve(config, 1)
    data = resolved.task.prepare(resolved.config)
    completed = complete(resolved, data)
    source = model_source(completed.config, resolved.task, data)
    return count_flops(completed.config, resolved.capabilities, source, resolved.task, data)


def by_hand(per_row: int, per_token: int) -> list[float]:
    """Return the coefficients; each product of the forward pass has two of its size
    in the backward pass.
    """
    return [per_row, per_token, 6 * BY_ATTENTION]


@pytest.fixture
def rows(work_folder: Path) -> Path:
    """Rows of three lengths: 4, 5 and 12 tokens."""
    (work_folder / "rows.json").write_text(
        str([["a b", 0], ["a b c", 1], ["a " * 10, 0]] * 4).replace("'", '"')
    )
    return work_folder


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    "more", [{}, {"gradient_checkpointing": True}, {"precision": "bf16"}, {"padding_free": "off"}]
)
def test_recomputed_operations_do_not_count(more: dict[str, Any]) -> None:
    flops = counted(more)
    assert flops is not None
    # The pooler and the classifier see one token of a row.
    expected = by_hand(6 * (D**2 + CLASSES * D), 6 * LAYERS * PER_LAYER)
    assert flops.coefficients == pytest.approx(expected, rel=1e-9)
    assert flops.total(np.array([4, 12])) == pytest.approx(
        sum(c * (4**n + 12**n) for n, c in enumerate(expected))
    )


@pytest.mark.usefixtures("rows")
def test_frozen_weights_of_lora_have_no_gradient() -> None:
    flops, rank = counted({"lora.rank": 4}), 4
    assert flops is not None
    adapters = LAYERS * rank * (4 * 2 * D + 2 * 5 * D)  # four of D × D, two of D × 4 D
    # No weight gradient of the base; and nobody asks for the gradient of the first layer's input,
    # which q, k and v see.
    base = 4 * LAYERS * PER_LAYER - 3 * 2 * D**2
    per_token = base + 6 * adapters - 3 * 2 * rank * D
    per_row = 4 * D**2 + 6 * (rank * 2 * D) + 6 * CLASSES * D  # the classifier is trained
    assert flops.coefficients == pytest.approx(by_hand(per_row, per_token), rel=1e-9)


@pytest.mark.usefixtures("rows")
def test_a_loss_that_reads_values_has_no_count(caplog: pytest.LogCaptureFixture) -> None:
    assert counted({"task": UNTRACEABLE}) is None
    assert "observe: no FLOPs and no MFU: the step fails without values: " in caplog.text


@pytest.mark.needs("distcore-tasks")
def test_a_loss_in_chunks_has_the_products_of_the_whole(work_folder: Path) -> None:
    pairs = [{"prompt": "a word", "completion": " b" * n} for n in (1, 4, 9) * 4]
    (work_folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    job = {"task": "causal-lm", "task_options.data": "pairs.jsonl"}
    chunked, whole = (
        counted(job | {"task_options.chunked_cross_entropy": given}) for given in ("on", "off")
    )
    assert chunked is not None
    assert whole is not None
    assert chunked.coefficients == pytest.approx(whole.coefficients, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "changes", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", {"precision": "bf16"}, 989.5),
        ("NVIDIA H100 80GB HBM3", {}, 67),
        ("NVIDIA A100-SXM4-80GB", {"tf32": True}, 156),
        ("NVIDIA L4", {"precision": "fp16"}, 121),
        ("NVIDIA L40", {}, None),
        ("NVIDIA H100 NVL", {}, None),
        ("Tesla V100-SXM2-16GB", {"tf32": True}, 15.7),
    ],
)
def test_a_device_is_known_by_its_whole_name(
    name: str, changes: dict[str, Any], tflops: float | None
) -> None:
    assert peak_of_name(name, RunConfig(**changes)) == (tflops and pytest.approx(tflops * 1e12))


def test_a_processor_has_no_known_peak() -> None:
    assert peak_of(torch.device("cpu"), RunConfig()) is None
