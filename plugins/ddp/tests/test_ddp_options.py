"""DDP's options: the laws that each gives up, and whose gradient was not averaged."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import nn

from distcore import Capabilities, StrategyError
from distcore_ddp.data_parallel import DataParallelStrategy
from distcore_ddp.replicas import check_gradients_averaged
from distcore_ddp.strategy import INEXACT, NEEDS_FIND_UNUSED, DDPStrategy


def test_each_option_declares_the_laws_that_it_gives_up() -> None:
    assert set(DDPStrategy().capabilities.exempt) == {"unused-parameters"}
    assert not DDPStrategy(find_unused=True).capabilities.exempt
    assert set(DDPStrategy(static_graph=True).capabilities.exempt) == {
        "bit-for-bit",
        "branches-by-row",
    }
    assert {"gradient", "clipping"} < set(DDPStrategy(compression="fp16").capabilities.exempt)


def test_ddp_declares_its_capabilities() -> None:
    declared = Capabilities(
        spec_version=3,
        gradients="sum",
        other_optimizers="all",
        why_not_phases=NEEDS_FIND_UNUSED,
        own_steps=True,
        ema=True,
        saves_alone=True,
        compiles=frozenset({"on", "regions"}),
        collectives_per_step=2,
        exact=frozenset({"fp32", "bf16"}),
        limits=("compression other than none sends gradients in half precision",),
        exempt={"unused-parameters": NEEDS_FIND_UNUSED},
    )
    assert DDPStrategy().capabilities == declared
    assert DDPStrategy(find_unused=True).capabilities == replace(
        declared, phases=True, collectives_per_step=3, exempt={}
    )
    assert not DDPStrategy(static_graph=True).capabilities.own_steps
    assert DDPStrategy(static_graph=True).capabilities.inner_gradients == "none"
    assert not DDPStrategy(compression="fp16").capabilities.exact
    in_half = dict.fromkeys(INEXACT, "gradients are sent in fp16")
    assert DDPStrategy(compression="fp16", find_unused=True).capabilities.exempt == in_half


def test_dp_declares_its_capabilities() -> None:
    assert DataParallelStrategy.capabilities == Capabilities(
        spec_version=3,
        processes="one",
        devices=frozenset({"cpu", "cuda"}),
        other_optimizers="all",
        phases=True,
        own_steps=True,
        ema=True,
        why_not_compiled=(
            "copies modules to other GPUs, but compiled code works on the first GPU only"
        ),
        collectives_per_step=0,
        limits=("on a CPU it trains as one plain process",),
    )


def test_the_parameter_without_a_gradient_is_named() -> None:
    def raises() -> None:
        raise RuntimeError("not finalized")

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    module[1](module[0].weight).sum().backward()
    module[1].bias.grad = None
    with pytest.raises(
        StrategyError, match=r"parameter '1\.bias' got no gradient in this step; do that"
    ):
        check_gradients_averaged(
            SimpleNamespace(_check_reducer_finalized=raises), module, "do that"
        )
