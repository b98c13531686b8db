"""Buffers that are state, and buffers that are the same for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from distcore_ddp import has_state_in_buffers, rebuild_gradient_buckets, spare_unsendable_buffers
from distcore_ddp.strategy import DDPStrategy


def test_only_buffers_that_are_saved_are_state() -> None:
    bert = BertForSequenceClassification(
        BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
    )
    assert dict(bert.named_buffers())  # position numbers, the same for ever
    assert not has_state_in_buffers(bert)
    assert has_state_in_buffers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_a_forward_that_a_wrapper_has_replaced_is_there_after_the_dummy_pass() -> None:
    module = nn.Linear(2, 2)
    rebuild_gradient_buckets(lambda given: module.forward(given), module)  # type: ignore[arg-type]
    assert "forward" not in vars(module)
    module.forward = replaced = lambda given: given  # type: ignore[method-assign]
    rebuild_gradient_buckets(lambda given: module.forward(given), module)  # type: ignore[arg-type]
    assert vars(module)["forward"] is replaced
    assert module.weight.grad is None


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


KINDS = (
    torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.bfloat16, torch.float64,
)  # fmt: skip


class Kinds(nn.Linear):
    """A layer with a buffer of each dtype."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        for kind in KINDS:
            self.register_buffer(str(kind).replace(".", "_"), torch.ones(3).to(kind))


@pytest.mark.usefixtures("group")
def test_a_model_with_buffers_that_gloo_does_not_send_is_wrapped_and_trains() -> None:
    run: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu")))
    model = nn.Sequential(Kinds(), Kinds())
    made = DDPStrategy().wrap_model(run, model, lambda model: torch.optim.SGD(model.parameters()))
    made.model(torch.ones(1, 2)).sum().backward()
    assert made.model.broadcast_buffers
    spared = nn.Linear(2, 2)
    spare_unsendable_buffers(spared)
    assert not vars(spared)["_ddp_params_and_buffers_to_ignore"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("options", "rebuilt"),
    [({}, True), ({"static_graph": True}, False), ({"find_unused": True}, False)],
)
def test_buckets_are_regrouped_before_the_first_step_unless_torch_never_does(
    options: dict[str, Any], rebuilt: bool
) -> None:
    run: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu")))
    made = DDPStrategy(**options).wrap_model(
        run, nn.Linear(2, 2), lambda model: torch.optim.SGD(model.parameters())
    )
    wrapped: Any = made.model
    assert wrapped.reducer._rebuild_buckets() is rebuilt  # what the first forward pass calls
