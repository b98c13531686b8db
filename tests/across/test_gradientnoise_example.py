"""examples/extension-gradientnoise: noise that is the same under every strategy,
and after a resume.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strategy_chain
import torch

from distcore import ConfigError, Report, RunConfig, launch, train
from distcore.checkpoint import Tensors, read_tensors
from distcore.testing.problem import Problem

FILE = Path(__file__).parents[2] / "examples/extension-gradientnoise/gradientnoise.py"
STEPS = 4


def config(out: Path, **changes: Any) -> RunConfig:
    keys: dict[str, Any] = {
        "out": str(out),
        "lr": 1e-3,
        "max_steps": STEPS,
        "save_every": 2,
        "global_batch_size": 8,
        "device": "cpu",
        "extensions": {f"{FILE}:GradientNoise": {"scale": 1e-3}, "progress": False},
        "log_level": "error",
    }
    return RunConfig(**keys | changes)


def solve(config: RunConfig) -> Report:
    return train(config, Problem())


def weights(out: Path, step: int = STEPS) -> Tensors:
    return read_tensors(out / f"checkpoints/step-{step:08d}", ("model",))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("noisy") / "run"
    solve(config(out))
    return out


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gradientnoise", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_shard_has_the_noise_of_its_place_in_the_whole(example: ModuleType) -> None:
    whole = example.gaussian("seed", 0, 3 * example.BLOCK)
    for start, count in (
        (0, 7),
        (example.BLOCK - 2, 5),
        (2 * example.BLOCK, 1),
        (9, 2 * example.BLOCK),
    ):
        assert torch.equal(example.gaussian("seed", start, count), whole[start : start + count])
    assert abs(whole.mean()) < 0.01
    assert abs(whole.std() - 1) < 0.01


@pytest.mark.programs
def test_the_example_changes_training_and_a_resumed_run_ends_as_the_whole_one(
    noisy: Path, tmp_path: Path
) -> None:
    solve(config(tmp_path / "quiet", extensions={"progress": False}))
    assert not torch.allclose(
        weights(noisy)["model/head.weight"], weights(tmp_path / "quiet")["model/head.weight"]
    )
    shutil.copytree(noisy / "checkpoints/step-00000002", tmp_path / "run/checkpoints/step-00000002")
    solve(config(tmp_path / "run", resume="auto"))
    assert all(
        torch.equal(value, weights(tmp_path / "run")[name])
        for name, value in weights(noisy).items()
    )


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "horovod", "accelerate"])
def test_the_noise_is_the_same_on_two_ranks(strategy: str, noisy: Path, tmp_path: Path) -> None:
    if not strategy_chain.is_offered(strategy):
        pytest.skip(f"{strategy} is not installed")
    launch(partial(solve, config(tmp_path / "run", strategy=strategy, nproc=2)), nproc=2)
    for name, value in weights(noisy).items():
        assert (weights(tmp_path / "run")[name] - value).abs().max() <= 1e-6, name


@pytest.mark.slow
@pytest.mark.ranks
def test_flat_buffers_are_refused_in_one_line(tmp_path: Path) -> None:
    if not strategy_chain.is_offered("deepspeed"):
        pytest.skip("deepspeed is not installed")
    with pytest.raises(
        ConfigError,
        match=r"^extension gradientnoise: strategy 'deepspeed' steps flat buffers, .*stage 0$",
    ):
        solve(config(tmp_path / "run", strategy="deepspeed", nproc=1))
