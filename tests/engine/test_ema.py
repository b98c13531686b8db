"""The moving average of the weights: what it is, what is evaluated of it, and that it
resumes; in one process.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluated import evaluate_checkpoint
from work_folder import install

from distcore import Capabilities, ConfigError, Report, RunConfig, train
from distcore.checkpoint import Checkpoint, Tensors, read_tensors
from distcore.checkpoint.choice import choose
from distcore.errors import CheckpointError
from distcore.jobs.evaluate import config_for
from distcore.model.averages import decay_at
from distcore.plugin.strategy.contract import Run, World
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Problem

pytestmark = pytest.mark.programs

STEPS, DECAY = 8, 0.6


def run(out: Path, **changes: Any) -> Report:
    config: dict[str, Any] = {
        "out": str(out),
        "lr": 0.05,
        "max_steps": STEPS,
        "eval_every": 2,
        "save_every": 1,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "device": "cpu",
        "checkpoints": {"keep_last": 99},
        "ema": {"decay": DECAY},
        "extensions": {"progress": False},
        "log_level": "error",
    }
    return train(RunConfig(**config | changes), Problem(dropout=0.1))


def state(out: Path, step: int = STEPS) -> Tensors:
    return read_tensors(out / f"checkpoints/step-{step:08d}")


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("averaged") / "run"
    assert run(out)["weights"] == "ema"
    return out


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("raw") / "run"
    assert run(out, ema={})["weights"] == "raw"
    return out


def test_the_average_takes_in_the_weights_once_a_step_however_many_micro_batches_that_has(
    averaged: Path,
) -> None:
    """Two averages tell which weights a step took in, so that those before the first
    step are not needed.
    """
    for step in range(2, STEPS + 1):
        decay = min(DECAY, (1 + step) / (10 + step))
        before, after = state(averaged, step - 1), state(averaged, step)
        for name in (name for name in after if name.startswith("ema/")):
            expected = decay * before[name] + (1 - decay) * after[f"model/{name[4:]}"]
            torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6)


def test_trained_weights_have_one_in_fp32_and_nothing_else_has(averaged: Path) -> None:
    saved = state(averaged)
    trained = {name.split("/")[1] for name in saved if name.startswith("optimizer/")}
    assert {name[4:] for name in saved if name.startswith("ema/")} == trained
    assert {saved[name].dtype for name in saved if name.startswith("ema/")} == {torch.float32}


def test_training_is_not_changed_by_it(averaged: Path, raw: Path) -> None:
    tensors = state(averaged)
    assert same(
        Tensors({name: tensors[name] for name in tensors if not name.startswith("ema/")}),
        state(raw),
    )


def test_every_evaluation_is_of_it(averaged: Path, raw: Path) -> None:
    """The periodic ones, the best and the test, as ``distcore eval`` repeats
    them from the checkpoint.
    """
    report = json.loads((averaged / "report.json").read_text())
    checkpoint = averaged / f"checkpoints/step-{STEPS:08d}"
    again = evaluate_checkpoint(config_for(checkpoint, 1, {}), checkpoint, Problem(dropout=0.1))
    assert again["weights"] == "ema"
    assert again["evaluation"]["loss"] == pytest.approx(report["evaluation"]["loss"], abs=1e-6)
    lines = [json.loads(line) for line in (averaged / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    assert losses[STEPS] == report["evaluation"]["loss"]
    assert report["best"]["value"] == min(losses.values())
    assert (
        report["evaluation"]["loss"]
        != json.loads((raw / "report.json").read_text())["evaluation"]["loss"]
    )


def test_commands_say_that_they_take_it(averaged: Path, raw: Path) -> None:
    assert choose(averaged, step=2)[1].endswith(" (the EMA of its weights)")
    assert "EMA" not in choose(raw, step=2)[1]


def test_a_resumed_run_ends_as_the_uninterrupted_one(averaged: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        shutil.copytree(
            averaged / f"checkpoints/step-{step:08d}", tmp_path / f"run/checkpoints/step-{step:08d}"
        )
    run(tmp_path / "run", resume="auto")
    assert same(state(tmp_path / "run"), state(averaged))


def test_an_average_that_begins_in_the_middle_of_a_run_begins_with_the_weights_there(
    raw: Path, tmp_path: Path
) -> None:
    shutil.copytree(raw / "checkpoints/step-00000004", tmp_path / "run/checkpoints/step-00000004")
    with pytest.raises(CheckpointError, match=r"accept that with --resume-changed ema$"):
        run(tmp_path / "run", resume="auto")
    run(tmp_path / "run", resume="auto", resume_changed=["ema"], max_steps=STEPS)
    before, after = state(raw, 4), state(tmp_path / "run", 5)
    for name in (name for name in after if name.startswith("ema/")):
        weight = f"model/{name[4:]}"
        decay = (1 + 5) / (10 + 5)
        torch.testing.assert_close(
            after[name], decay * before[weight] + (1 - decay) * after[weight]
        )


def test_a_run_may_leave_it_behind(averaged: Path, tmp_path: Path) -> None:
    shutil.copytree(
        averaged / "checkpoints/step-00000004", tmp_path / "run/checkpoints/step-00000004"
    )
    run(tmp_path / "run", resume="auto", resume_changed=["ema"], ema={})
    assert not [
        name
        for name in Checkpoint(tmp_path / "run/checkpoints/step-00000008")
        if name.startswith("ema/")
    ]


def test_without_warmup_the_decay_is_the_same_from_the_first_step_on() -> None:
    def run_with(**ema: Any) -> Run:
        module = torch.nn.Linear(1, 1)
        world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
        declared = Capabilities(spec_version=3)
        return Run(
            config=RunConfig(ema=ema),
            world=world,
            capabilities=declared,
            module=module,
            model=module,
        )

    assert decay_at(run_with(decay=0.9, warmup=False), 1) == 0.9
    assert [decay_at(run_with(decay=0.9), step) for step in (1, 8, 80, 81)] == [
        2 / 11,
        0.5,
        0.9,
        0.9,
    ]


@pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1])
def test_a_decay_that_averages_nothing_is_one_line(decay: float) -> None:
    with pytest.raises(ConfigError, match=r"^RunConfig: ema\.decay = .*(greater|less) than"):
        RunConfig(ema={"decay": decay})


STRATEGY = """
from distcore import Capabilities

class Plain:
    capabilities = Capabilities(spec_version=3)
"""


@pytest.mark.needs("distcore-ddp")
def test_a_strategy_that_does_not_declare_it_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "distcore_plain.py").write_text(STRATEGY)
    install(tmp_path, "plain", "[distcore.strategies]\nplain = distcore_plain:Plain\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig(strategy="plain", device="cpu", ema={"decay": 0.9}, out=str(tmp_path / "x"))
    line = r"^ema\.decay = 0\.9: strategy 'plain' keeps no average of weights; .*, single could$"
    with pytest.raises(ConfigError, match=line):
        resolve(config, task=Problem())
