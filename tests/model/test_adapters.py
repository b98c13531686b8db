"""The base of an adapter is read in parts into the form in which it stays, or built whole first."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distcore import Origin, RunConfig
from distcore.errors import MetaModelError
from distcore.model import adapters
from distcore.plugin.strategy.contract import LocalRange, ModelSource, WeightStream

WEIGHT = torch.arange(6.0).reshape(2, 3)


class Plain:
    """An adapter that leaves the model as it is."""

    def inject(self, config: RunConfig, module: nn.Module, folder: Path | None) -> Any:
        names: Mapping[str, Origin] = {name: Origin(name) for name, _ in module.named_parameters()}
        return names


def layer(device: str) -> nn.Linear:
    return nn.Linear(3, 2, bias=False, device=device)


def whole() -> nn.Module:
    module = layer("cpu")
    module.weight.data.copy_(WEIGHT)
    return module


def read(wanted: LocalRange) -> Iterator[tuple[str, Tensor]]:
    start, count = wanted("weight")
    yield "weight", WEIGHT.reshape(-1)[start : start + count]


def in_parts() -> tuple[nn.Module, WeightStream]:
    return layer("meta"), read


def not_in_parts() -> tuple[nn.Module, WeightStream]:
    raise MetaModelError("build_model() reads the weights itself")


def not_whole() -> nn.Module:
    raise AssertionError("the base was built whole")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(adapters, "adapter_of", lambda config: Plain())
    return RunConfig.model_validate({"lora": {"rank": 1, "base": "nf4"}})


def test_a_base_that_stays_narrow_is_never_built_whole(config: RunConfig, tmp_path: Path) -> None:
    base = ModelSource(
        build=not_whole, meta_model=lambda: layer("meta"), folder=tmp_path, replay=in_parts
    )
    module = adapters.adapted(config, base, is_known_by_values=False).build()
    torch.testing.assert_close(module.state_dict(), {"weight": WEIGHT}, rtol=0, atol=0)


def test_a_base_that_cannot_be_read_in_parts_is_built_whole_and_that_is_said(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = ModelSource(
        build=whole, meta_model=lambda: layer("meta"), folder=tmp_path, replay=not_in_parts
    )
    with caplog.at_level(logging.INFO, "distcore"):
        module = adapters.adapted(config, base, is_known_by_values=False).build()
    torch.testing.assert_close(module.state_dict(), {"weight": WEIGHT}, rtol=0, atol=0)
    assert "the base is in fp32 while it is loaded: build_model() reads" in caplog.text
