"""Runs in chunks: losses of whole logits, the same under every strategy; what the report says,
and what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distcore import ConfigError, RunConfig, train
from distcore.resolve import tasks
from distcore.resolve.resolve import resolve
from distcore_tasks.shared.chunked_cross_entropy import options

pytestmark = pytest.mark.programs

TEXTS = [" ".join(["one", "two", "three", "four"][: i % 4 + 1] * (i % 5 + 1)) for i in range(40)]
ROWS: dict[str, list[dict[str, str]]] = {
    "causal-lm": [{"prompt": f"count {text}", "completion": text[::-1]} for text in TEXTS],
    "masked-lm": [{"text": text} for text in TEXTS],
    "seq2seq": [{"source": text, "target": text[::-1]} for text in TEXTS],
}
MODELS = {"causal-lm": "llama-tiny", "masked-lm": "bert-tiny", "seq2seq": "t5-tiny"}


def config_of(
    folder: Path, task: str = "causal-lm", chunked: str = "on", **changes: Any
) -> RunConfig:
    file = folder / f"{task}.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS[task])), encoding="utf-8")
    own = changes.pop("task_options", {})
    given: dict[str, Any] = {
        "task": task,
        "model": MODELS[task],
        "data": str(file),
        "device": "cpu",
        "max_steps": 3,
        "log_every": 1,
        "global_batch_size": 8,
        "dropout": 0.0,
        "extensions": {"progress": False},
        "log_level": "error",
        "precision": "fp32",
        "task_options": {"tokenizer": {"vocab_size": 300}, "chunked_cross_entropy": chunked} | own,
    }
    return RunConfig(**given | changes)


def losses(folder: Path, **changes: Any) -> list[float]:
    """The loss of each step, and that of the evaluation."""
    out = folder / "-".join(map(str, ["run", *changes.values()])).translate(
        str.maketrans("{}':/ ", "______")
    )
    report = train(config_of(folder, out=str(out), **changes))
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [
        *(line["train/loss"] for line in lines if "train/loss" in line),
        report["evaluation"]["loss"],
    ]


@pytest.mark.parametrize("padding_free", ["on", "off"])
@pytest.mark.parametrize("task", ROWS)
def test_each_task_has_the_losses_of_whole_logits(
    task: str, padding_free: str, tmp_path: Path
) -> None:
    smoothed = {"task_options": {"label_smoothing": 0.1}} if task == "seq2seq" else {}
    given: dict[str, Any] = {"task": task, "padding_free": padding_free, **smoothed}
    whole, own = (losses(tmp_path, chunked=chunked, **given) for chunked in ("off", "on"))
    assert own == pytest.approx(whole, rel=3e-6)


def test_losses_under_bf16_are_close(tmp_path: Path) -> None:
    whole, own = (losses(tmp_path, chunked=chunked, precision="bf16") for chunked in ("off", "on"))
    assert own == pytest.approx(whole, rel=1e-2)


@pytest.mark.ranks
def test_replicas_and_shards_have_one_loss_and_the_first_to_the_digit(tmp_path: Path) -> None:
    replicas, shards = (
        losses(tmp_path, strategy=strategy, nproc=2) for strategy in ("ddp", "fsdp")
    )
    assert replicas[0] == shards[0]
    # An optimizer's vectors end elsewhere in a shard, where some CPUs round otherwise, and a norm
    # is summed by shards.
    assert replicas == pytest.approx(shards, rel=5e-7)
    assert replicas == pytest.approx(losses(tmp_path), rel=3e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["deepspeed:3", "mesh:shard=2", "mesh:cp=2"])
def test_sharded_weights_have_the_losses_of_whole_logits(strategy: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"strategy": strategy, "nproc": 2}
    whole, own = (losses(tmp_path, chunked=chunked, **given) for chunked in ("off", "on"))
    assert own == pytest.approx(whole, rel=3e-6)


def fact(config: RunConfig) -> object:
    config = resolve(config).config
    return tasks.load_task(config).prepare(config).facts["cross_entropy"]


def test_the_report_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fact(config_of(tmp_path)) == "in chunks"
    assert fact(config_of(tmp_path, chunked="off")) == "whole logits: chunked_cross_entropy is off"
    auto = config_of(tmp_path, chunked="auto")
    assert fact(auto) == "whole logits: the vocabulary has 294 of 30,000 words"
    monkeypatch.setattr(options, "VOCABULARY", 294)
    assert fact(auto) == "in chunks"
    split = config_of(tmp_path, chunked="auto", strategy="mesh:tp=2", nproc=2)
    assert fact(split) == "whole logits: strategy_options.tp = 2 splits the model over ranks"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"strategy": "mesh:tp=2", "nproc": 2},
            "strategy_options.tp = 2 splits the model over ranks",
        ),
        (
            {"strategy": "mesh:tp=2,loss_parallel=true", "nproc": 2},
            "strategy_options.tp = 2 splits the model",
        ),
        (
            {"strategy": "mesh:pp=2", "nproc": 2},
            "strategy_options.pp = 2 splits the model over ranks",
        ),
        ({"precision": "fp16"}, "the loss scale of fp16 comes too late"),
        ({"compile": "on"}, "--compile on compiles the head with the model"),
        ({"model": "mixtral-tiny"}, "the loss of a router is over the global batch"),
    ],
)
def test_a_run_that_cannot_have_chunks_is_one_line(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, **changes)
    with pytest.raises(
        ConfigError, match=rf"^task_options.chunked_cross_entropy = 'on': {why}.*; leave it out$"
    ):
        tasks.load_task(config).prepare(resolve(config).config)
