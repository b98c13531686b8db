"""DDP's options: the laws that each gives up, and whose gradient was not averaged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from distcore.errors import StrategyError
from distcore_ddp.replicas import check_gradients_averaged
from distcore_ddp.strategy import DDPStrategy


def test_each_option_declares_the_laws_that_it_gives_up() -> None:
    assert set(DDPStrategy().capabilities.exempt) == {"unused-parameters"}
    assert not DDPStrategy(find_unused=True).capabilities.exempt
    assert set(DDPStrategy(static_graph=True).capabilities.exempt) == {"bit-for-bit"}
    assert {"gradient", "clipping"} < set(DDPStrategy(compression="fp16").capabilities.exempt)


def test_it_declares_what_it_can() -> None:
    plain, unused = DDPStrategy().capabilities, DDPStrategy(find_unused=True).capabilities
    assert (plain.collectives_per_step, unused.collectives_per_step) == (2, 3)
    assert plain.ema
    assert plain.compiles == {"on", "regions"}
    assert unused.phases
    assert not plain.phases
    assert not DDPStrategy(static_graph=True).capabilities.own_steps


def test_the_parameter_without_a_gradient_is_named() -> None:
    def raises() -> None:
        raise RuntimeError("not finalized")

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    module[1](module[0].weight).sum().backward()
    module[1].bias.grad = None
    with pytest.raises(StrategyError, match=r"parameter '1\.bias' got no gradient in this step; do that"):
        check_gradients_averaged(SimpleNamespace(_check_reducer_finalized=raises), module, "do that")
