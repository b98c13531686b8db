"""torch.compile: what of a model is compiled, how often, and what is refused; without a C++
compiler, which is slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distcore import Capabilities, ConfigError, Report, RunConfig, load_config, train
from distcore.checkpoint import read_tensors
from distcore.model.compiling import compile_mode, compile_model, missing_compiler
from distcore.testing.problem import Problem

pytestmark = pytest.mark.programs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.inner(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 4)
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Trace the code, and write none in C++."""
    torch.compiler.reset()
    with torch.compiler.set_stance("default", force_backend="eager"):
        yield


def test_lengths_that_change_compile_nothing_again() -> None:
    torch.manual_seed(0)
    model, names = Blocks(), list(Blocks().state_dict())
    inputs = [
        torch.randn(rows, length, 6) for rows, length in ((5, 7), (5, 9), (3, 12), (2, 7), (8, 33))
    ]
    expected = [model(x) for x in inputs]
    counter = compile_model(RunConfig(compile="on"), model)
    counts = []
    for x, before in zip(inputs, expected, strict=True):
        torch.testing.assert_close(model(x), before)
        counts.append(counter.compilations)
    assert counts == [counts[0]] * len(inputs)
    assert counter.recompilations == 0
    assert list(model.state_dict()) == names
    model.eval()
    with torch.no_grad():
        model(inputs[0])
    # an evaluation has code of its own
    assert counter.compilations == counts[0] + counter.recompilations > counts[0]
    assert counter.seconds > 0


def test_regions_are_the_repeated_blocks_and_not_the_model() -> None:
    model = Blocks()
    compile_model(RunConfig(compile="regions"), model)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == [
        "layers.0", "layers.1", "layers.2",
    ]  # fmt: skip


def test_a_model_without_repeated_blocks_is_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^compile = 'regions': Linear has no repeated blocks; use --compile on$"
    ):
        compile_model(RunConfig(compile="regions"), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("asked", "declared", "mode"),
    [
        ("on", {"on", "regions"}, "on"),
        ("regions", {"regions"}, "regions"),
        ("on", {"regions"}, "regions"),
        ("off", set(), "off"),
    ],
)
def test_a_compile_mode_is_the_one_that_the_strategy_declares(
    asked: str, declared: set[str], mode: str
) -> None:
    capabilities = Capabilities(spec_version=3, compiles=frozenset(declared))
    assert compile_mode(RunConfig(compile=asked, device="cpu"), capabilities) == mode


def test_a_strategy_that_cannot_be_compiled_says_why() -> None:
    capabilities = Capabilities(
        spec_version=3, why_not_compiled="gathers weights inside of every layer"
    )
    line = (
        r"^compile = 'on': strategy 'single' gathers weights inside of every layer; use --compile"
        r" off$"
    )
    with pytest.raises(ConfigError, match=line):
        compile_mode(RunConfig(compile="on"), capabilities)


def test_a_missing_compiler_is_one_line_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    capabilities = Capabilities(spec_version=3, compiles=frozenset({"on"}))
    line = (
        r"^compile = 'on': needs a C\+\+ compiler, and there is no no-such-compiler here: .*"
        r" --compile off$"
    )
    with pytest.raises(ConfigError, match=line):
        compile_mode(RunConfig(compile="on", device="cpu"), capabilities)
    monkeypatch.setenv("CC", "no-such-c-compiler")
    assert "needs a C compiler, and there is no no-such-c-compiler here" in missing_compiler("cuda")


def test_yaml_reads_on_and_off_as_truth_values(tmp_path: Path) -> None:
    for text in ("on", "off", "regions"):
        (tmp_path / "config.yaml").write_text(f"compile: {text}\n")
        assert load_config(str(tmp_path / "config.yaml"), {}).compile == text


def run(out: Path, **changes: Any) -> Report:
    config: dict[str, Any] = {
        "out": str(out),
        "lr": 1e-3,
        "max_steps": 4,
        "save_every": 2,
        "global_batch_size": 8,
        "device": "cpu",
        "extensions": {"progress": False},
        "log_level": "error",
    }
    return train(RunConfig(**config | changes), Problem())


def test_a_run_reports_it_and_its_checkpoints_are_those_of_any_run(tmp_path: Path) -> None:
    for mode in ("off", "on"):
        report = run(tmp_path / mode, compile=mode)
        assert report["compile"]["mode"] == mode
    assert 0 < report["compile"]["compilations"] <= 4
    ours, theirs = (
        read_tensors(tmp_path / mode / "checkpoints/step-00000004") for mode in ("on", "off")
    )
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() <= 1e-6 for name in ours)
    # not asked for
    run(tmp_path / "on", compile="off", resume=str(tmp_path / "on/checkpoints/step-00000002"))
