"""Optimizers by name: their options in a config, one's own from a file,
and what strategies take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from optimizer_cases import GROUPS, OPTIONS, PROBLEM

from distcore import (
    ConfigError,
    DistcoreError,
    RankInfo,
    RunConfig,
    World,
    checkpoint,
    load_config,
    registry,
)
from distcore.config import dump_config
from distcore.errors import CheckpointError, StrategyError
from distcore.hints import how_to_get
from distcore.model.optim import load_optimizer, optimizer_factory
from distcore.plugin.strategy.hooks import Hooks
from distcore.resolve.absolute_paths import with_absolute_paths
from distcore.resolve.resolve import Resolved, resolve
from distcore.strategies.single import SingleStrategy
from distcore.testing.lab import Job, Lab
from distcore.testing.problem import Classifier

OWN = '''
from dataclasses import dataclass

import torch


class Signs(torch.optim.Optimizer):
    """Steps by signs."""

    def __init__(self, params, lr, weight_decay=0.0, scale=1.0):
        if scale <= 0:
            raise ValueError("scale must be above 0")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "scale": scale})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", torch.tensor(0.0)) + 1
                    p.add_(p.grad.sign(), alpha=-group["lr"] * group["scale"])


class Elementwise(Signs):
    elementwise = True


class Counts(Signs):
    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            state["count"] = int(state["count"])


class CountsInGroups(Signs):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


class CountsInItself(Signs):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.steps = 0

    def step(self, closure=None):
        super().step()
        self.steps += 1


class KeepsApart(Signs):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.moments = {}

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.moments.setdefault(p, torch.zeros_like(p)).add_(p.grad)


class KeepsOnParameters(Signs):
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.moment = p.grad.clone()


class BeginsLate(Signs):
    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            if state["count"] > 9:
                state["late"] = float(state["count"])


class KeepsByName(Signs):
    def step(self, closure=None):
        super().step()
        self.state["steps"] = {"all": torch.ones(())}


class Unrated(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {})
        for group in self.param_groups:
            group["rate"] = group.pop("lr")

    def step(self, closure=None):
        pass


class Noisy(Elementwise):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.add_(torch.randn_like(p))
        super().step()


class RemembersParameters(Signs):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.every = [p for group in self.param_groups for p in group["params"]]
        self.first = {id(p): p for p in self.every}


class Fails(Signs):
    def step(self, closure=None):
        raise KeyError("moment")


@dataclass(frozen=True, kw_only=True)
class Silent:
    def build(self, module, groups):
        return torch.optim.SGD(groups)


NUMBER = 3


def slow_signs(params, lr, scale=0.5):
    return Signs(params, lr, scale=scale)


def nothing(params, lr):
    return None


def without_rate(params):
    return Signs(params, 0.1)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """torch's SGD, with the momentum under another name."""

    elementwise = True

    heavy: float = 0.9

    def build(self, module, groups):
        return torch.optim.SGD(groups, momentum=self.heavy)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def run_of(strategy: str = "single", **optimizer: Any) -> Resolved:
    return resolve(
        RunConfig(lr=0.1, device="cpu", strategy=strategy, optimizer=optimizer), task=PROBLEM
    )


def resolved(strategy: str = "single", **optimizer: Any) -> RunConfig:
    return run_of(strategy, **optimizer).config


def test_a_resolved_config_has_all_options_and_reads_back(tmp_path: Path) -> None:
    config = resolved(name="sgd", momentum=0.9)
    assert config.optimizer.options == {"weight_decay": 0.0, "momentum": 0.9, "nesterov": False}
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert yaml.safe_load(file.read_text())["optimizer"] == {
        "name": "sgd",
        "weight_decay": 0.0,
        "groups": [],
        "layer_decay": None,
        "momentum": 0.9,
        "nesterov": False,
    }
    assert load_config(str(file), {}).optimizer == config.optimizer


def test_configs_from_before_there_were_others_stay_valid() -> None:
    given: dict[str, Any] = {
        "name": "adamw",
        "weight_decay": 0.02,
        "betas": [0.8, 0.9],
        "eps": 1e-6,
    }
    config = resolved(**given)
    assert config.optimizer.options == {"weight_decay": 0.02, "betas": [0.8, 0.9], "eps": 1e-6}
    made = optimizer_factory(config)(Classifier())
    assert isinstance(made, torch.optim.AdamW)
    assert {key: made.defaults[key] for key in ("betas", "eps", "fused")} == {
        "betas": (0.8, 0.9), "eps": 1e-6, "fused": True,
    }  # fmt: skip
    assert {group["weight_decay"] for group in made.param_groups} == {0.02, 0.0}


def test_an_optimizer_that_draws_numbers_takes_one_rank(own: Path) -> None:
    config = RunConfig(lr=0.1, device="cpu", nproc=1, optimizer={"name": "own.py:Noisy"})
    resolve(config, task=PROBLEM)
    with pytest.raises(
        ConfigError,
        match=r"'own.py:Noisy': draws random numbers in its step, .* each of 2 ranks: use",
    ):
        resolve(RunConfig(**config.model_dump() | {"nproc": 2, "strategy": "ddp"}), task=PROBLEM)


def test_an_optimizer_may_remember_the_parameters(own: Path) -> None:
    assert resolved(name="own.py:RemembersParameters").optimizer.name.endswith(
        "RemembersParameters"
    )


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        (
            {"name": "sdg"},
            (
                r"optimizer.name = 'sdg': strategy 'single' takes .*adam, adamw, .*\(did you mean"
                r" 'sgd'"
            ),
        ),
        (
            {"name": "sgd", "betas": [0.9, 0.9]},
            r"'optimizer.betas': sgd has weight_decay, momentum, nesterov$",
        ),
        (
            {"momentum": 0.9},
            r"unknown key 'optimizer.momentum': adamw has betas, eps, weight_decay$",
        ),
        (
            {"name": "sgd", "momentm": 1},
            r"unknown key 'optimizer.momentm' \(did you mean 'momentum'\?\)",
        ),
        ({"grups": []}, r"unknown key 'optimizer.grups' \(did you mean 'groups'\?\)"),
        ({"name": "sgd", "momentum": 1}, r"optimizer 'sgd': momentum = 1: .*less than 1"),
        ({"name": "sgd", "nesterov": True}, r"optimizer 'sgd': .*nesterov needs momentum above 0"),
        pytest.param(
            {"name": "muon", "adjust_lr_fn": "none"},
            r"adjust_lr_fn = 'none': .*'match_rms_adamw' or 'original'",
            marks=pytest.mark.needs("distcore-optimizers"),
        ),
        ({"betas": [0.9, 1.0]}, r"optimizer 'adamw': betas.1 = 1.0: .*less than 1"),
        ({"weight_decay": -1}, r"optimizer.weight_decay = -1"),
        ({"name": "own.py:Missing"}, r"optimizer 'own.py:Missing': no class Missing in own.py"),
        ({"name": "nowhere.py:Mine"}, r"optimizer 'nowhere.py:Mine': no file nowhere.py"),
        (
            {"name": "own.py:Signs", "scal": 2},
            r"'optimizer.scal' \(did you mean 'scale'\?\): .* weight_decay, scale$",
        ),
        (
            {"name": "own.py:Signs", "scale": -1},
            r"optimizer.name = 'own.py:Signs': scale must be above 0$",
        ),
        (
            {"name": "own.py:Counts"},
            r"keeps a value in state\[parameter\]\['count'\] that is no tensor",
        ),
        ({"name": "own.py:CountsInGroups"}, r"keeps a value in its param_groups that is no tensor"),
        (
            {"name": "own.py:CountsInItself"},
            r"keeps a value in its attribute 'steps' that is no tensor of a param",
        ),
        (
            {"name": "own.py:KeepsApart"},
            r"keeps a value in its attribute 'moments' that is no tensor",
        ),
        (
            {"name": "own.py:KeepsOnParameters"},
            r"keeps a value in the attribute 'moment' of a parameter that is no",
        ),
        (
            {"name": "own.py:BeginsLate"},
            r"keeps a value in state\[parameter\]\['late'\] that is no tensor",
        ),
        (
            {"name": "own.py:KeepsByName"},
            r"keeps state under the key 'steps', which is no parameter, so a checkpoint",
        ),
        (
            {"name": "own.py:Unrated"},
            r"'own.py:Unrated': its param_groups have no 'lr', which the schedule sets",
        ),
        (
            {"name": "own.py:nothing"},
            r"optimizer.name = 'own.py:nothing': gave a NoneType, no torch.optim.Optimizer",
        ),
        ({"name": "own.py:without_rate"}, r"takes no lr; expected \(params, lr, …\)"),
        ({"name": "own.py:NUMBER"}, r"takes no lr; expected \(params, lr, …\)"),
        (
            {"name": "own.py:Fails"},
            r"'own.py:Fails': its first steps, on a small model, failed: KeyError: 'moment'$",
        ),
        (
            {"name": "own.py:Silent"},
            r"'own.py:Silent': does not say whether it is elementwise, True or False$",
        ),
        (
            {"name": "own.py:slow_signs", "weight_decay": 0.1},
            r"unknown key 'optimizer.weight_decay': .* has scale$",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_is_one_line_before_a_rank_starts(
    own: Path, optimizer: dict[str, Any], line: str
) -> None:
    with pytest.raises(DistcoreError, match=line) as raised:
        resolved(**optimizer)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "options", "kind", "settings"),
    [
        ("Signs", {"weight_decay": 0.3}, "Signs", {"scale": 1.0}),
        ("Signs", {"scale": 2}, "Signs", {"scale": 2}),
        ("slow_signs", {}, "Signs", {"scale": 0.5}),
        ("Plain", {"heavy": 0.5}, "SGD", {"momentum": 0.5}),
    ],
)
def test_an_optimizer_of_ones_own_is_built_with_its_options(
    own: Path, name: str, options: dict[str, Any], kind: str, settings: dict[str, Any]
) -> None:
    config = resolved(name=f"own.py:{name}", **options)
    made = optimizer_factory(config)(Classifier())
    assert type(made).__name__ == kind
    assert {key: made.param_groups[0][key] for key in settings} == settings
    assert made.param_groups[0]["lr"] == 0.1
    assert made.param_groups[0]["weight_decay"] == options.get("weight_decay", 0.0)
    # A resumed run finds it from any folder.
    assert (
        with_absolute_paths(run_of(name=f"own.py:{name}", **options)).optimizer.name
        == f"{own / 'own.py'}:{name}"
    )


@pytest.mark.needs("distcore-optimizers")
def test_a_strategy_that_steps_parts_of_parameters_takes_what_declares_to_be_elementwise(
    own: Path,
) -> None:
    pytest.importorskip("distcore_fsdp")
    assert resolved("fsdp", name="own.py:Elementwise").optimizer.options["scale"] == 1.0
    line = (
        r"'own.py:Signs': strategy 'fsdp' takes .*: it steps parts .*, and 'own.py:Signs' does not"
        r" say that it is elementwise; .* give it the attribute elementwise = True; "
    )
    with pytest.raises(ConfigError, match=line):
        resolved("fsdp", name="own.py:Signs")
    with pytest.raises(
        ConfigError,
        match=(
            r"= 'adafactor': strategy 'fsdp' takes adam, adamw, adamw8bit, lion, muon, sgd: it .*,"
            r" and 'adafactor' declares elementwise = False; "
        ),
    ):
        resolved("fsdp", name="adafactor")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    hooks = Hooks("single", SingleStrategy())
    return Lab(
        hooks=hooks,
        base=RunConfig(device="cpu"),
        world=world,
        rank_info=RankInfo(),
        folder=tmp_path,
        hooks_with=lambda extensions: hooks,
    )


def job(lab: Lab, name: str, **options: Any) -> Job:
    return lab.job(PROBLEM, optimizer={"name": name} | OPTIONS.get(name, {}) | GROUPS | options)


@pytest.mark.parametrize("name", [*sorted(registry.offers("optimizers")), "own.py:Signs"])
def test_resumed_equals_uninterrupted_bit_for_bit(own: Path, lab: Lab, name: str) -> None:
    whole, first, second = (job(lab, name) for _ in range(3))
    expected = whole.train(6).state
    path = first.save(first.train(3).progress)
    progress, _ = checkpoint.load(second.run, second.hooks, path)
    resumed = second.train(3, progress).state
    assert resumed.keys() == expected.keys()
    assert not [tensor for tensor in expected if not torch.equal(resumed[tensor], expected[tensor])]
    assert any(tensor.startswith("optimizer/") for tensor in resumed)


@pytest.mark.needs("distcore-optimizers")
def test_adafactor_saves_a_row_and_a_column_of_each_matrix(lab: Lab) -> None:
    state = job(lab, "adafactor").train(1).state
    shapes = {
        key: tuple(state[f"optimizer/blocks.0.up.weight/{key}"].shape)
        for key in ("row_var", "col_var")
    }
    assert shapes == {"row_var": (32, 1), "col_var": (1, 16)}


@pytest.mark.needs("distcore")
@pytest.mark.parametrize("name", ["adafactor", "adamw8bit", "lion", "muon"])
def test_an_optimizer_that_is_not_installed_is_one_line_with_the_command(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(registry, "all_offers", lambda group: [])
    how = how_to_get("optimizers", name)
    with pytest.raises(
        StrategyError,
        match=rf"^no optimizer named '{name}' \(installed: none\). Install .*: {how}$",
    ):
        load_optimizer(RunConfig(optimizer={"name": name}))


def test_a_checkpoint_of_another_optimizer_is_refused(lab: Lab) -> None:
    first = job(lab, "sgd")
    path = first.save(first.train(1).progress)
    other = job(lab, "adamw")
    with pytest.raises(
        CheckpointError, match=r"optimizer.name was 'sgd' and is 'adamw': .*; resume with the same$"
    ):
        checkpoint.load(other.run, other.hooks, path)


def test_changed_options_are_refused_unless_they_are_accepted(lab: Lab) -> None:
    first = job(lab, "sgd")
    path = first.save(first.train(1).progress)
    other = job(lab, "sgd", momentum=0.5)
    with pytest.raises(
        CheckpointError, match=r"optimizer was .*; accept that with --resume-changed optimizer$"
    ):
        checkpoint.load(other.run, other.hooks, path)
    accepted = lab.job(
        PROBLEM,
        optimizer={"name": "sgd", "momentum": 0.5, "groups": [{"match": "head", "lr": 0.25}]},
        resume_changed=["optimizer"],
    )
    checkpoint.load(accepted.run, accepted.hooks, path)
    assert accepted.run.optimizer is not None
    assert [group["lr"] for group in accepted.run.optimizer.param_groups] == [0.01, 0.01, 0.25]
