"""Sources mixed by weights, in every task: by rows and by tokens, at any number of
ranks, and on resume.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from row_cases import row_of

from distcore import RunConfig, launch, train
from distcore.errors import CheckpointError, ConfigError, DataError
from distcore.plugin.batching.sampling import training_plan
from distcore_data import MixedRows
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.embedding.task import Embedding
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.reward_model.task import RewardModel
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared.mixtures import mixed_sources, weights_by_step
from distcore_tasks.shared.options import Order
from distcore_tasks.shared.splits import split_rows
from distcore_tasks.text_classification.task import TextClassification
from distcore_tasks.token_classification.task import TokenClassification

TASKS: dict[type[Any], Callable[[str, int], dict[str, Any]]] = {
    CausalLM: lambda word, n: {"prompt": f"after {n}?", "completion": f" {word} {n + 1}"},
    Embedding: lambda word, n: {"anchor": f"after {n}?", "positive": f"{word} {n + 1}"},
    MaskedLM: lambda word, n: {"text": f"{word} {n}"},
    Seq2Seq: lambda word, n: {"source": f"read {n}", "target": f"{word} {n % 7}"},
    RewardModel: lambda word, n: {
        "prompt": f"after {n}?",
        "chosen": f" {word} {n + 1}",
        "rejected": " none",
    },
    TextClassification: lambda word, n: {"text": f"{word} {n}", "label": "ab"[n % 2]},
    TokenClassification: lambda word, n: {"tokens": [word, str(n)], "tags": ["O", "B-N"]},
}
MIX: dict[str, Any] = {"order": Order(mix={"web": 0.75, "code": 0.25})}


def sources(
    folder: Path, row: Callable[[str, int], dict[str, Any]], web: int = 20, code: int = 30
) -> str:
    for name, rows in (("web", web), ("code", code), ("held", 6)):
        lines = (json.dumps(row(name, number)) + "\n" for number in range(rows))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return f"{folder}/web.jsonl,{folder}/code.jsonl"


def order_of(rows: Any) -> MixedRows:
    assert isinstance(rows.row_order, MixedRows)
    return rows.row_order


def bounds_of(order: MixedRows) -> list[tuple[int, int]]:
    return [(source.start, source.stop) for source in order.sources]


def drawn(rows: Any, epochs: int = 1) -> np.ndarray:
    return np.concatenate(
        [order_of(rows)(0, epoch)[np.arange(len(rows))] for epoch in range(epochs)]
    )


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_every_task_mixes_sources(task: type[Any], tmp_path: Path) -> None:
    options = {"data": sources(tmp_path, TASKS[task]), "eval_data": str(tmp_path / "held.jsonl")}
    plain, rows = (task(**options, **more).prepare(RunConfig()).train for more in ({}, MIX))
    assert bounds_of(order_of(rows)) == [(0, 20), (20, 50)]
    assert plain.content != rows.content
    assert np.bincount(drawn(rows, epochs=4) < 20).tolist() == [50, 150]


def test_rows_that_are_held_out_are_no_rows_of_their_source(tmp_path: Path) -> None:
    task = Seq2Seq(data=sources(tmp_path, TASKS[Seq2Seq]), eval_fraction=0.2, **MIX)
    rows: Any = task.prepare(RunConfig()).train
    words = [row_of(rows, "target", number) for number in range(len(rows))]
    (_, end), (start, stop) = bounds_of(order_of(rows))
    assert end == start
    assert stop == len(rows) == 40
    assert not {row.tobytes() for row in words[:end]} & {row.tobytes() for row in words[end:]}


@pytest.mark.parametrize("task", [CausalLM, MaskedLM])
def test_no_row_has_tokens_of_two_sources(task: type[Any], tmp_path: Path) -> None:
    """Blocks of documents, and texts that make several rows each."""
    data = sources(tmp_path, lambda word, n: {"text": f"{word} " * (n + 3)})
    made = task(data=data, eval_data=str(tmp_path / "web.jsonl"), max_seq_len=12, **MIX).prepare(
        RunConfig()
    )
    tokenizer, rows = made.loaded_tokenizer, made.train
    texts = [
        tokenizer.decode(rows.batch(np.asarray([row]))["input_ids"][0]) for row in range(len(rows))
    ]
    if task is MaskedLM:
        texts = [tokenizer.decode(row_of(rows, "tokens", row)) for row in range(len(rows))]
    for (start, stop), word, other in zip(
        bounds_of(order_of(rows)), ("web", "code"), ("code", "web"), strict=True
    ):
        assert stop > start
        assert word in "".join(texts[start:stop])
        assert not any(other in text for text in texts[start:stop])
    assert bounds_of(order_of(rows))[-1][1] == len(rows)


def test_shares_of_tokens_are_those_of_rows_by_their_mean_lengths(tmp_path: Path) -> None:
    """Texts of code are four times as long, so that half of the tokens is a fifth of the rows."""
    data = sources(
        tmp_path, lambda word, n: {"text": "a" + " a" * (3 if word == "web" else 15)}, 200, 100
    )
    order = Order(mix={"web": 1, "code": 1}, mix_by="tokens", kind="windows", window_shards=1)
    rows = (
        MaskedLM(data=data, eval_data=str(tmp_path / "held.jsonl"), order=order)
        .prepare(RunConfig())
        .train
    )
    taken = drawn(rows, epochs=5)
    tokens = [int(rows.lengths[taken[mine]].sum()) for mine in (taken < 200, taken >= 200)]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.02)
    assert len(order_of(rows).sources[0].bounds) == 5


def test_two_groupings_of_the_same_files_are_two_entries_of_the_cache(tmp_path: Path) -> None:
    sources(tmp_path, TASKS[MaskedLM])
    (tmp_path / "both").mkdir()
    for name in ("code", "held"):
        (tmp_path / "both" / f"{name}.jsonl").write_text((tmp_path / f"{name}.jsonl").read_text())
    three = f"{tmp_path}/web.jsonl,{tmp_path}/code.jsonl,{tmp_path}/held.jsonl"
    groupings: list[tuple[str, dict[str, float]]] = [
        (three, {"web": 1, "code": 1, "held": 1}),
        (f"{tmp_path}/web.jsonl,{tmp_path}/both", {"web": 1, "both": 1}),
    ]
    sets = (
        MaskedLM(data=data, eval_data=str(tmp_path / "held.jsonl"), order=Order(mix=mix))
        .prepare(RunConfig())
        .train
        for data, mix in groupings
    )
    assert [bounds_of(order_of(rows)) for rows in sets] == [
        [(0, 20), (20, 50), (50, 56)],
        [(0, 20), (20, 56)],
    ]


@pytest.mark.parametrize(
    ("data", "mix", "line"),
    [
        (
            "web.jsonl",
            {"web": 1},
            "--data web.jsonl is one source; name several with commas between them",
        ),
        (
            "a/web.jsonl,code",
            {"web": 1},
            "code has no weight; give each source of --data one: a/web.jsonl, code",
        ),
        (
            "web.jsonl,code",
            {"web": 1, "code": 2, "cod": 1},
            "cod is no source of --data (did you mean 'code'?); the sources are web.jsonl, code",
        ),
        (
            "a/web.jsonl,b/web.csv",
            {"web": 1},
            "web names several sources; the sources are a/web.jsonl, b/web.csv",
        ),
        (
            "web.jsonl,code",
            {"web": 1, "web.jsonl": 1, "code": 1},
            "web.jsonl has several weights; give each source of --data one: web.jsonl, code",
        ),
    ],
)
def test_weights_that_do_not_fit_the_sources_are_one_line(
    data: str, mix: dict[str, float], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        mixed_sources(MaskedLM(data=data, order=Order(mix=mix)))
    assert str(error.value) == f"order.mix: {line}"


def test_a_source_may_be_a_pattern_a_folder_or_its_whole_path() -> None:
    data = "web/*.jsonl, texts/code ,b/web.csv"
    order = Order(
        mix={"web/*.jsonl": 3, "code": 2, "b/web.csv": 1},
        mix_at={9: {"code": 1, "web": 0, "b/web.csv": 1}},
    )
    assert weights_by_step(MaskedLM(data=data, order=replace(order, mix_at=None))) == {
        0: {"web/*.jsonl": 3, "texts/code": 2, "b/web.csv": 1}
    }
    with pytest.raises(ConfigError, match=r"^order\.mix_at\.9: web names several sources"):
        weights_by_step(MaskedLM(data=data, order=order))


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            {"mix_at": {5: {"web": 1, "code": 1}}},
            "order.mix_at: order.mix has no weights for the steps",
        ),
        (
            {"mix": {"web": 1, "code": 1}, "mix_at": {5: {"web": 0, "code": 0}}},
            "order.mix_at.5: all weights are 0; give a source more",
        ),
        (
            {"mix": {"web": 1, "code": 0}},
            "order.mix.code = 0: no row of it would come up; leave it out of --data",
        ),
    ],
)
def test_weights_by_step_that_make_no_mixture_are_one_line(
    asked: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Order(**asked)
    assert str(error.value).startswith(line)


def test_weights_change_after_a_number_of_steps(tmp_path: Path) -> None:
    """Of 50 rows an epoch has 7 steps of 8 rows, and the last one has 2."""
    data = sources(tmp_path, TASKS[MaskedLM])
    order = Order(
        mix={"web": 1, "code": 0}, mix_at={10: {"web": 0, "code": 1}, 12: {"web": 1, "code": 1}}
    )
    config = RunConfig(global_batch_size=8, micro_batch_size=8)
    rows = (
        MaskedLM(data=data, eval_data=str(tmp_path / "held.jsonl"), order=order)
        .prepare(config)
        .train
    )
    plan = training_plan(config, rows)
    shares = [float((plan.rows(*divmod(step, plan.steps)) < 20).mean()) for step in range(16)]
    assert shares == [1.0] * 10 + [0.0] * 2 + [0.5] * 4


def test_shares_without_weights_and_a_source_without_rows_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^order\.mix_by = 'tokens': order\.mix has no weights; leave it out, or set",
    ):
        Order(mix_by="tokens")
    data = sources(tmp_path, TASKS[MaskedLM], 40, 1)
    seed = next(seed for seed in range(1000) if 40 in split_rows("", 41, 0.1, seed)[1])
    line = (
        r"^data .*code\.jsonl: no row of it is left for training; give it more rows, or --eval-data"
        r" a file$"
    )
    with pytest.raises(DataError, match=line):
        MaskedLM(data=data, **MIX).prepare(RunConfig(seed=seed))


@pytest.mark.parametrize("weight", [0, -1, "many"])
def test_a_weight_without_others_is_a_positive_number(weight: object) -> None:
    from distcore.errors import StrategyError
    from distcore.plugin.options import build

    with pytest.raises(
        (ConfigError, StrategyError, ValidationError), match=r"order\.mix\.web|all weights are 0"
    ):
        build("task", "masked-lm", MaskedLM, {"order": {"mix": {"web": weight}}})


def config(
    folder: Path, out: str, mix: dict[str, float], mix_at: Any = None, **changes: Any
) -> RunConfig:
    tree = {
        "task": "masked-lm",
        "out": str(folder / out),
        "max_steps": 12,
        "global_batch_size": 8,
        "lr": 0.001,
        "micro_batch_size": 2,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
    }
    options = {
        "data": f"{folder}/web.jsonl,{folder}/code.jsonl",
        "eval_data": f"{folder}/held.jsonl",
        "max_seq_len": 24,
        "dropout": 0.0,
        "order": {"mix": mix, "mix_at": mix_at},
    }
    return RunConfig.model_validate(tree | changes | {"task_options": options})


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    sources(
        folder,
        lambda word, n: {"text": f"after {word} {n} comes {n + 1}" + " and on" * (n % 5)},
        web=3,
        code=30,
    )
    return folder


GOING_ON: dict[str, Any] = {"resume": "auto", "resume_changed": ["total_steps"]}
HALVES = {"web": 1.0, "code": 1.0}


@pytest.mark.ranks
@pytest.mark.programs
@pytest.mark.timeout(300)
def test_two_ranks_go_on_inside_an_epoch_as_one_process(folder: Path) -> None:
    """A source of three rows is half of each step of eight rows, so that a step
    has some rows twice.
    """
    train(config(folder, "whole", HALVES))
    train(config(folder, "parts", HALVES, max_steps=7))
    more = GOING_ON | {"nproc": 2, "strategy": "ddp", "loader": {"workers": 1}}
    launch(train, config(folder, "parts", HALVES, **more), nproc=2)
    assert losses(folder / "parts") == pytest.approx(losses(folder / "whole"), rel=1e-4)
    assert len(losses(folder / "whole")) == 12


@pytest.mark.ranks
@pytest.mark.programs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stop", [4, 6])
def test_weights_by_step_go_on_at_any_step_and_number_of_ranks(folder: Path, stop: int) -> None:
    """The weights change after steps 5 and 8, which are no ends of an epoch of 5 steps."""
    weights = (
        {"web": 1.0, "code": 0.0},
        {5: {"web": 0.2, "code": 0.8}, 8: {"web": 0.5, "code": 0.5}},
    )
    if not (folder / "changing").exists():
        train(config(folder, "changing", *weights))
    out = f"changing-{stop}"
    train(config(folder, out, *weights, max_steps=stop))
    more = GOING_ON | {"nproc": 2, "strategy": "ddp", "loader": {"workers": 1}}
    launch(train, config(folder, out, *weights, **more), nproc=2)
    assert losses(folder / out) == pytest.approx(losses(folder / "changing"), rel=1e-4)
    assert len(losses(folder / out)) == 12
    with pytest.raises(
        CheckpointError, match=r"task_options\.order was .* and is .*--resume-changed"
    ):
        train(config(folder, out, weights[0], {6: weights[1][5]}, max_steps=13, **GOING_ON))


@pytest.mark.programs
def test_changed_mixture_weights_are_refused_on_resume_unless_confirmed(folder: Path) -> None:
    train(config(folder, "asked", HALVES, max_steps=2))
    other = {"web": 1.0, "code": 3.0}
    with pytest.raises(
        CheckpointError,
        match=r"task_options\.order was .* and is .*: .*; accept that with --resume-changed",
    ):
        train(config(folder, "asked", other, max_steps=3, **GOING_ON))
    train(
        config(
            folder,
            "asked",
            other,
            max_steps=3,
            **GOING_ON | {"resume_changed": ["total_steps", "order"]},
        )
    )
    assert len(losses(folder / "asked")) == 3
