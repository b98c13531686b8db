"""Causal language modeling as a user runs it: what it learns, reports, generates,
exports; under every strategy.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategy_chain
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distcore import Report, RunConfig, launch, train
from distcore.cli.main import main
from distcore_tasks.causal_lm.models import build_model
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.causal_lm.task import CausalLM

pytestmark = pytest.mark.programs  # its runs are whole ones

ROWS = [
    {"prompt": f"after {row}", "completion": f" comes {row + 1}" + " and on" * (row % 5)}
    for row in range(60)
]
STEPS = 10


def config(folder: Path, out: str | Path, **changes: Any) -> RunConfig:
    tree = {
        "task": "causal-lm",
        "out": str(folder / out),
        "max_steps": STEPS,
        "global_batch_size": 12,
        "lr": 0.01,
        "micro_batch_size": 3,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "data": str(folder / "rows.jsonl"),
        "model": "llama-tiny",
        "max_seq_len": 24,
        "dropout": 0.0,
        "schedule": {"name": "constant"},
        "tokenizer": {"vocab_size": 330},
    }
    options = {"data", "model", "max_seq_len", "dropout", "tokenizer"}
    tree["task_options"] = {name: tree.pop(name) for name in options} | changes.pop(
        "task_options", {}
    )
    return RunConfig.model_validate(tree | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("causal")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Report:
    """The report of one process, which also generates."""
    return train(config(folder, "single", task_options={"max_new_tokens": 4}))


def test_a_run_reports_loss_perplexity_and_token_accuracy(plain: Report) -> None:
    evaluation = plain["evaluation"]
    assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))
    assert 0 < evaluation["token_accuracy"] <= 1
    assert evaluation["perplexity"] < plain["data"]["evaluation"]["unigram_perplexity"]
    assert evaluation["evaluated"] == evaluation["dataset_size"] == 6


def test_predictions_have_the_prompt_and_the_generated_text(plain: Report, folder: Path) -> None:
    lines = list(map(json.loads, (folder / "single/predictions.jsonl").read_text().splitlines()))
    assert [line["index"] for line in lines] == list(range(6))
    assert all(line["prompt"].startswith("after ") and line["generated"] for line in lines)
    answers = {row["prompt"]: row["completion"] for row in ROWS}
    assert all(line["completion"] == answers[line["prompt"]] for line in lines)
    total = sum(line["loss"] * line["tokens"] for line in lines) / sum(
        line["tokens"] for line in lines
    )
    assert total == pytest.approx(plain["evaluation"]["loss"])


def test_an_exported_model_generates_what_evaluation_did(plain: Report, folder: Path) -> None:
    command = ["checkpoint", "export", str(folder / "single"), "--to", str(folder / "exported")]
    assert main(command) == 0
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "exported")
    assert tokenizer.pad_token
    assert tokenizer.chat_template
    for line in map(json.loads, (folder / "single/predictions.jsonl").read_text().splitlines()):
        prompt = tokenizer(line["prompt"], return_tensors="pt")
        made = model.generate(**prompt, max_new_tokens=4, do_sample=False)[
            0, prompt["input_ids"].shape[1] :
        ]
        assert tokenizer.decode(made, skip_special_tokens=True) == line["generated"]


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_chain_of_checkpoints_over_all_strategies_is_one_run(plain: Report, folder: Path) -> None:
    """Each strategy goes on for two steps where another one stopped: laws 2, 5 and 7 for
    tokens that are packed.
    """
    strategy_chain.run_chain(folder / "chain", lambda **changes: config(folder, **changes))
    strategy_chain.assert_one_run(folder / "chain", folder / "single")


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["fsdp", "deepspeed:3"])
def test_sharded_ranks_generate_the_same_and_do_not_wait_for_each_other(
    way: str, plain: Report, folder: Path
) -> None:
    """Six rows on two ranks in micro-batches of three, whose answers end at unlike steps."""
    if not strategy_chain.is_offered(way):
        pytest.skip(f"{way} is not installed")
    out = f"generates-{way[0]}"
    changes = strategy_chain.options_of(way) | {"nproc": 2, "task_options": {"max_new_tokens": 4}}
    launch(train, config(folder, out, **changes), nproc=2)
    assert strategy_chain.generated(folder / out) == strategy_chain.generated(folder / "single")


@pytest.mark.ranks
def test_samples_are_the_first_rows_and_the_others_generate_nothing(
    plain: Report, folder: Path
) -> None:
    """One of six rows on two ranks, so that most micro-batches, and those of one rank,
    have nothing to generate.
    """
    changes = strategy_chain.options_of("fsdp") | {"nproc": 2, "micro_batch_size": 1}
    launch(
        train,
        config(folder, "sampled", task_options={"max_new_tokens": 4, "samples": 1}, **changes),
        nproc=2,
    )
    first, *others = map(
        json.loads, (folder / "sampled/predictions.jsonl").read_text().splitlines()
    )
    assert [list(line) for line in others] == [["index", "tokens", "loss"]] * 5
    every = map(json.loads, (folder / "single/predictions.jsonl").read_text().splitlines())
    assert first["generated"] == next(every)["generated"]


def predict(folder: Path, out: str, *flags: str) -> list[dict[str, Any]]:
    """The lines for the prompts of all rows, with the single process's weights."""
    file = folder / f"{out}.jsonl"
    given = ["--data", str(folder / "rows.jsonl"), "--out", str(file)]
    assert main(["predict", str(folder / "single"), *given, *flags]) == 0
    return list(map(json.loads, file.read_text().splitlines()))


@pytest.fixture(scope="module")
def predicted(plain: Report, folder: Path) -> list[dict[str, Any]]:
    return predict(folder, "predicted")


def test_prompts_alone_get_what_evaluation_generated_for_them(
    predicted: list[dict[str, Any]], folder: Path
) -> None:
    assert [list(line) for line in predicted] == [["file", "row", "prompt", "generated"]] * 60
    assert [(line["row"], line["prompt"]) for line in predicted] == [
        (number, row["prompt"]) for number, row in enumerate(ROWS, 1)
    ]
    answers = {line["prompt"]: line["generated"] for line in predicted}
    lines = map(json.loads, (folder / "single/predictions.jsonl").read_text().splitlines())
    assert {line["prompt"]: line["generated"] for line in lines}.items() <= answers.items()


@pytest.mark.ranks
def test_sharded_ranks_predict_the_same_prompts_alike(
    predicted: list[dict[str, Any]], folder: Path
) -> None:
    flags = ["--strategy", "fsdp", "--nproc", "2", "--set", "micro_batch_size=1"]
    assert predict(folder, "sharded", *flags) == predicted


@pytest.mark.parametrize("name", [name for name in SHAPES if "tiny" in name or "mini" in name])
def test_a_built_in_model_has_its_layers_and_width(name: str) -> None:
    built: Any = build_model(CausalLM(model=name), vocab_size=300, pad=0, end=0)
    assert (built.config.num_hidden_layers, built.config.hidden_size) == (
        SHAPES[name].layers, SHAPES[name].hidden
    )  # fmt: skip


def test_the_largest_shapes_are_those_that_were_published() -> None:
    with torch.device("meta"):
        model = build_model(CausalLM(model="gpt2-xl"), vocab_size=50257, pad=0, end=0)
    # as in the published weights
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_557_611_200


def test_items_are_targets_and_the_loss_is_their_sum(folder: Path) -> None:
    task = CausalLM(data=str(folder / "rows.jsonl"), model="gpt2-tiny", dropout=0.0)
    data: Any = task.prepare(RunConfig())
    model = task.build_model(RunConfig(), data).eval()
    rows = np.arange(5)
    batch = data.train.batch(rows)
    outputs = task.outputs(model, batch)
    assert outputs["tokens"].tolist() == data.train.items[rows].tolist()
    assert outputs["loss"].sum().item() == pytest.approx(task.loss(model, batch).item(), rel=1e-5)
