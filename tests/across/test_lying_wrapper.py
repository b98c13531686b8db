"""The mode of a run is the core's to say: a wrapper that always says that
it trains changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from distcore import OptimizerFactory, PreparedModel, Run, RunConfig, hookimpl, train
from distcore.engine.mode import set_mode
from distcore.strategies.single import SingleStrategy
from distcore.testing.task_comparison import AlwaysTraining

PROMPTS = [
    "a red fox",
    "two grey geese",
    "the old mill",
    "a cold river",
    "some bread",
    "one long road",
]
PAIRS = [
    {"prompt": f"{one}:", "chosen": f" {one} ran home", "rejected": f" {one} did not"}
    for one in PROMPTS * 2
]


class Lying(SingleStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        wrapper = AlwaysTraining(model)
        return PreparedModel(
            model=wrapper, optimizer=make_optimizer(model) if make_optimizer else None
        )


@pytest.fixture
def lie(monkeypatch: pytest.MonkeyPatch) -> Any:
    from distcore.plugin.options import build

    def lying(kind: str, *rest: Any) -> object:
        return Lying() if kind == "strategy" else build(kind, *rest)

    return lambda: monkeypatch.setattr("distcore.resolve.strategies.build", lying)


def evaluation(out: Path, task: str, dropout: float = 0.3, **changes: Any) -> Any:
    pairs = out.parent / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    options = {
        "data": str(pairs),
        "eval_data": str(pairs),
        "max_seq_len": 24,
        "tokenizer": {"vocab_size": 300},
        "dropout": dropout,
    }
    config: dict[str, Any] = {
        "task": task,
        "task_options": options,
        "out": str(out),
        "max_steps": 2,
        "global_batch_size": 2,
        "lr": 0.05,
        "device": "cpu",
        "extensions": {"progress": False},
        "dropout_masks": "row",
        "log_level": "warning",
    }
    return train(RunConfig.model_validate(config | changes))["evaluation"]


@pytest.mark.programs
@pytest.mark.parametrize("task", ["preference", "reward-model"])
def test_an_evaluation_is_the_same(task: str, tmp_path: Path, lie: Any) -> None:
    changes: dict[str, Any] = {}
    if task == "preference":
        # with LoRA the reference is the trained model without its adapter
        pytest.importorskip("peft")
        changes |= {"lora": {"rank": 2}, "precision": "bf16", "eval_precision": "fp32"}
    honest = evaluation(tmp_path / "honest", task, **changes)
    lie()
    assert evaluation(tmp_path / "lying", task, **changes) == honest


def test_a_wrapper_that_keeps_the_mode_to_itself_does_not_keep_the_model_in_it() -> None:
    class Deaf(AlwaysTraining):
        def train(self, mode: bool = True) -> Deaf:
            return self

    from types import SimpleNamespace

    module = nn.Sequential(nn.Dropout(0.5))
    run: Any = SimpleNamespace(module=module, model=Deaf(module))
    for training in (False, True):
        set_mode(run, training)
        assert module.training == module[0].training == training
