"""Horovod's options, without ranks: the settings that each rules out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distcore import Capabilities, ConfigError, RankInfo, RunConfig, StrategyError

strategy = pytest.importorskip(
    "distcore_horovod.strategy",
    reason="needs Horovod: distcore-horovod build",
    exc_type=ImportError,
)
gradients = pytest.importorskip(
    "distcore_horovod.gradients", reason="needs Horovod", exc_type=ImportError
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "fp16"}, "fp16"),
        ({"clip": {"norm": 1.0}}, "clipping"),
        ({"clip": {"norm": None, "value": 0.1}}, "clip"),
    ],
)
def test_adasum_combines_steps_so_nothing_may_change_gradients(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy.hvd, "mpi_built", lambda: True)
    config = RunConfig.model_validate({"device": "cpu", "clip": {"norm": None}} | changes)
    with pytest.raises(ConfigError, match=f"combines steps, not gradients, so .*{said}"):
        strategy.HorovodStrategy(op="adasum").check_config(config)
    strategy.HorovodStrategy().check_config(config)


def test_adasum_without_those_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy.hvd, "mpi_built", lambda: True)
    strategy.HorovodStrategy(op="adasum").check_config(
        RunConfig.model_validate({"device": "cpu", "clip": {"norm": None}})
    )


def test_horovod_declares_its_capabilities() -> None:
    unused = {"unused-parameters": strategy.NEEDS_FIND_UNUSED}
    declared = Capabilities(
        spec_version=3,
        gradients="sum",
        devices=frozenset({"cpu", "cuda"}),
        other_optimizers="all",
        why_not_phases=strategy.NEEDS_FIND_UNUSED,
        owns=frozenset({"optimizer"}),
        ema=True,
        saves_alone=True,
        lacks=frozenset({"sparse gradients", "complex parameters"}),
        compiles=frozenset({"on", "regions"}),
        exact=frozenset({"fp32", "bf16"}),
        launchers=frozenset({"local", "torchrun", "slurm", "mpi", "horovodrun"}),
        limits=(
            "compression=fp16 rounds gradients to half precision",
            (
                "op=adasum is not a mean, so laws 2 and 3 do not hold; it needs a Horovod built"
                " with MPI"
            ),
            (
                "the rendezvous of several machines is open to their network until all ranks are"
                " connected"
            ),
        ),
        exempt=unused,
    )
    from_files = ("weights-of-files", "frozen-of-files")
    inexact = (
        "gradient",
        "clipping",
        "neutral-names",
        *from_files,
        "scalar-parameters",
        "into-single",
        "from-single",
    )
    by_timing = dict.fromkeys(
        ("bit-for-bit", "dropout-repeats"), "groups=0: rounding of sums depends on timing"
    )
    in_half = unused | dict.fromkeys(inexact, "gradients are sent in fp16")
    steps: dict[str, Any] = {
        "other_optimizers": "none",
        "why_not_phases": "adasum is not a mean",
        "saves_alone": False,
    }
    steps |= {"hides_gradients": True, "exact": frozenset()}
    made: dict[Any, dict[str, Any]] = {
        strategy.HorovodStrategy(): {},
        strategy.HorovodStrategy(op="average", find_unused=True): {
            "gradients": "mean",
            "phases": True,
            "exempt": {},
        },
        strategy.HorovodStrategy(groups=0): {"deterministic": False, "exempt": unused | by_timing},
        strategy.HorovodStrategy(compression="fp16"): {
            "exempt": in_half,
            "exact": frozenset(),
        },
        strategy.HorovodStrategy(op="adasum", find_unused=True): {
            **steps,
            "gradients": "mean",
            "exempt": dict.fromkeys(inexact, "adasum is not a mean"),
        },
    }
    for each, changes in made.items():
        assert each.capabilities == replace(declared, **changes)


def test_the_parameter_without_a_gradient_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    run: Any = SimpleNamespace(module=module, optimizer=optimizer)
    module(torch.ones(1, 2)).sum().backward()
    assert gradients.find_unused_parameters(run, find=False) == []
    module[1].bias.grad = None
    with pytest.raises(
        StrategyError, match=r"parameter '1\.bias' got no gradient in this step; freeze it"
    ):
        gradients.find_unused_parameters(run, find=False)


def test_adasum_needs_mpirun() -> None:
    rank_info = RankInfo(rank=0, size=1, launcher="torchrun")
    with pytest.raises(
        ConfigError, match=r"op = 'adasum': communicates by MPI; start with mpirun, not torchrun"
    ):
        strategy.HorovodStrategy(op="adasum").setup(RunConfig(device="cpu"), rank_info)


def test_gradients_in_bf16_are_sent_in_a_dtype_that_horovod_sums() -> None:
    from distcore_horovod.gradients import Widened

    values = torch.tensor([1.5, -2.25])
    for dtype, sent in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        compressed, kept = Widened.compress(values.to(dtype))
        assert compressed.dtype == sent
        assert torch.equal(Widened.decompress(compressed * 2, kept), (values * 2).to(dtype))
