"""Binding strategies and extensions, and what the typed face refuses."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from dataclasses import dataclass, make_dataclass, replace
from typing import ClassVar, Literal, cast

import pytest
import torch
from torch import nn

from distcore import (
    Capabilities,
    ModelSource,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    World,
    hookimpl,
)
from distcore.errors import StrategyError
from distcore.plugin.options import build, options_of
from distcore.plugin.strategy.hooks import EVENTS, OPERATIONS, Hooks
from distcore.plugin.strategy.hookspecs import Events, Operations
from distcore.strategies.single import SingleStrategy


class Minimal:
    capabilities: ClassVar = Capabilities(spec_version=3)

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        return World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


@pytest.mark.parametrize("name", [*OPERATIONS, *EVENTS])
def test_the_typed_face_has_the_signature_of_the_spec(name: str) -> None:
    spec = getattr(Operations, name, None) or getattr(Events, name)
    face = inspect.signature(getattr(Hooks, name))
    assert list(face.parameters) == list(inspect.signature(spec).parameters)


@pytest.mark.parametrize("name", [*OPERATIONS, *EVENTS])
def test_every_hook_is_documented(name: str) -> None:
    assert (getattr(Operations, name, None) or getattr(Events, name)).__doc__


def test_a_strategy_may_leave_out_every_hook_but_setup() -> None:
    assert Hooks("minimal", Minimal()).setup(RunConfig(), RankInfo()).size == 1


def test_a_hook_without_the_mark_is_refused() -> None:
    class Unmarked(Minimal):
        def step(self, run: object, clip: object) -> None: ...

    with pytest.raises(StrategyError, match=r"strategy 'mine': step\(\) has no @hookimpl mark"):
        Hooks("mine", Unmarked())


def test_a_mark_on_what_is_no_hook_is_refused_with_the_nearest() -> None:
    class Misspelled(Minimal):
        @hookimpl
        def backwards(self, run: object, loss: object) -> None: ...

    with pytest.raises(
        StrategyError, match=r"backwards\(\) is marked @hookimpl but is no hook.*'backward'"
    ):
        Hooks("mine", Misspelled())


def test_an_unknown_argument_of_a_hook_is_refused() -> None:
    class Asks(Minimal):
        @hookimpl
        def step(self, run: object, momentum: float) -> None: ...

    with pytest.raises(
        StrategyError, match=r"^strategy 'mine': step\(\) takes 'momentum'; the hook has run, clip$"
    ):
        Hooks("mine", Asks())


def test_none_is_an_error_that_names_strategy_and_hook_and_no_default_runs() -> None:
    class Forgets(Minimal):
        @hookimpl
        def teardown(self, world: World) -> None: ...

    hooks = Hooks("mine", Forgets())
    with pytest.raises(
        StrategyError, match=r"strategy 'mine', hook teardown\(\): returned NoneType, not bool"
    ):
        hooks.teardown(hooks.setup(RunConfig(), RankInfo()))


def test_a_strategy_must_declare_capabilities() -> None:
    with pytest.raises(StrategyError, match=r"strategy 'mine': declares no capabilities"):
        Hooks("mine", object())


def test_a_newer_hook_spec_asks_for_a_newer_distcore() -> None:
    class Newer(Minimal):
        capabilities: ClassVar = Capabilities(spec_version=99)

    with pytest.raises(StrategyError, match=r"written for hook-spec version 99.*upgrade distcore"):
        Hooks("mine", Newer())


def test_a_strategy_of_version_2_is_taken_as_it_is() -> None:
    class Older(Minimal):
        capabilities: ClassVar = Capabilities(spec_version=2)

        @hookimpl
        def build_model(self, source: ModelSource) -> nn.Module:
            return source.build()  # a module alone, as in version 2

    module = nn.Linear(2, 2)
    hooks = Hooks("mine", Older())
    world = hooks.setup(RunConfig(), RankInfo())
    built = hooks.build_model(
        RunConfig(), world, ModelSource(build=lambda: module, meta_model=lambda: module)
    )
    assert (built.model, built.state) == (module, None)
    hooks.teardown(world)  # the world has no group: as in one process


def test_a_strategy_of_an_older_version_is_refused_with_the_page_that_helps() -> None:
    class Oldest(Minimal):
        capabilities: ClassVar = Capabilities(spec_version=1)

    with pytest.raises(
        StrategyError,
        match=r"written for hook-spec version 1, .* has 3 and .*docs/compatibility\.md",
    ):
        Hooks("mine", Oldest())


def test_an_extension_may_wrap_an_operation() -> None:
    class Doubles:
        @hookimpl(wrapper=True)
        def setup(self):
            world = yield
            return World(rank=world.rank, size=2, local_rank=0, device=world.device)

    hooks = Hooks("single", SingleStrategy(), {"doubles": Doubles()})
    assert hooks.setup(RunConfig(device="cpu"), RankInfo()).size == 2


@dataclass(frozen=True, kw_only=True)
class Options:
    bucket_mb: int = 25
    overlap: bool | Literal["auto"] = "auto"


def test_options_are_built_by_type() -> None:
    assert build("strategy", "mine", Options, {"bucket_mb": 4}).bucket_mb == 4


def test_an_unknown_option_names_the_nearest_and_all() -> None:
    with pytest.raises(
        StrategyError,
        match=r"unknown option 'bucket_md' \(did you mean 'bucket_mb'\?\) \(options: bu.*lap\)",
    ):
        build("strategy", "mine", Options, {"bucket_md": 4})


def test_a_missing_option_says_that_it_is_required() -> None:
    with pytest.raises(StrategyError, match=r"^task 'mine': size: field required$"):
        build("task", "mine", make_dataclass("Sized", [("size", int)]), {})


def test_an_option_of_the_wrong_type_names_option_value_and_rule() -> None:
    with pytest.raises(
        StrategyError, match=r"strategy 'mine': bucket_mb = 'big': expected a valid integer"
    ):
        build("strategy", "mine", Options, {"bucket_mb": "big"})


def test_an_option_of_several_types_has_the_rules_of_all() -> None:
    with pytest.raises(
        StrategyError, match=r"'mine': overlap = 'maybe': .* valid boolean.* or 'auto'$"
    ):
        build("strategy", "mine", Options, {"overlap": "maybe"})
    assert [option.type for option in options_of(Options)] == ["int", "bool | 'auto'"]


def test_an_extension_may_not_take_an_operation_over() -> None:
    class Replaces:
        @hookimpl
        def step(self, run: object) -> None: ...

    with pytest.raises(
        StrategyError, match=r"extension 'mine': step\(\) would replace the strategy's; mark it"
    ):
        Hooks("minimal", Minimal(), {"mine": Replaces()})


def test_an_extension_may_be_called_like_the_strategy() -> None:
    class Listens:
        @hookimpl
        def on_run_start(self, run: object) -> None: ...

    assert (
        Hooks("minimal", Minimal(), {"minimal": Listens()}).setup(RunConfig(), RankInfo()).size == 1
    )


class OtherOptimizer:
    """An extension that puts an optimizer of its own in the place of the strategy's."""

    @hookimpl(wrapper=True, trylast=True)
    def wrap_model(self) -> Generator[None, PreparedModel, PreparedModel]:
        prepared = yield
        return replace(prepared, optimizer=torch.optim.SGD(prepared.model.parameters(), lr=0.5))


class Steps(Minimal):
    """A strategy that may own its optimizer."""

    @hookimpl
    def wrap_model(self, model: torch.nn.Module) -> PreparedModel:
        return PreparedModel(model=model, optimizer=torch.optim.AdamW(model.parameters()))


class StepsItsOwn(Steps):
    capabilities: ClassVar = Capabilities(spec_version=3, owns=frozenset({"optimizer"}))


def prepared(strategy: object, extensions: dict[str, object]) -> PreparedModel:
    hooks, run, model = Hooks("mine", strategy, extensions), cast(Run, None), torch.nn.Linear(2, 2)
    return hooks.wrap_model(run=run, model=model, make_optimizer=None)


def test_an_extensions_optimizer_takes_the_place_of_the_strategys() -> None:
    assert isinstance(prepared(Steps(), {"other": OtherOptimizer()}).optimizer, torch.optim.SGD)


def test_an_extensions_optimizer_is_refused_where_the_strategy_would_not_step_it() -> None:
    assert isinstance(prepared(StepsItsOwn(), {}).optimizer, torch.optim.AdamW)
    message = (
        r"^extension 'other': replaced the optimizer in wrap_model\(\), but strategy 'mine' steps"
        r" its own;"
    )
    with pytest.raises(StrategyError, match=message):
        prepared(StepsItsOwn(), {"other": OtherOptimizer()})
