"""Heads that predict tokens read target positions alone: outputs and gradients are
those of all positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from padding_free_models import causal_lm_of, model_of, programs_but_for_few
from torch import Tensor

from distcore import RunConfig, train
from distcore.engine import padding_free_check
from distcore.errors import ConfigError
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.plugin.strategy.contract import Run, World
from distcore.plugin.task.task import Datasets
from distcore.resolve import tasks
from distcore.resolve.resolve import resolve
from distcore_tasks.causal_lm.rows import CausalRows, Sequences, sequence_table
from distcore_tasks.causal_lm.sequence_packing import MODEL_TYPES
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.causal_lm.windows import COUNTED
from distcore_tasks.masked_lm.rows import MaskedRows
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.padding_free.layer_hooks import enable_padding_free
from distcore_tasks.padding_free.supported_models import ENCODERS
from distcore_tasks.rows.dataset import row_dataset
from distcore_tasks.rows.pipeline import TokenizerInfo
from distcore_tasks.rows.table import CachedTable
from distcore_tasks.shared import target_logits
from distcore_tasks.shared.jagged import flat_rows

LENGTHS = np.asarray([7, 2, 12, 3, 12, 5])


@pytest.fixture
def answered() -> Datasets:
    """Rows whose second half is to be predicted, packed."""
    random = np.random.default_rng(0).integers(3, 60, LENGTHS.sum() + len(LENGTHS))
    # A row has one token more than it reads.
    tokens = np.split(random.astype(np.int32), np.cumsum(LENGTHS + 1)[:-1])
    flags = [
        np.where(np.arange(length + 1) > length // 2, COUNTED, 0).astype(np.uint8)
        for length in LENGTHS.tolist()
    ]
    rows = packed(tokens, flags)
    return Datasets(train=rows, evaluation=rows, test=rows)


def packed(tokens: list[np.ndarray], flags: list[np.ndarray]) -> Sequences:
    """Rows that share sequences."""
    pipeline, table = CausalRows(CausalLM(), is_packed=True), sequence_table(tokens, flags)
    return Sequences(pipeline=pipeline, table=table, info=TokenizerInfo(0))


def hidden() -> Datasets:
    """Rows of which some tokens have to be found."""
    random = np.random.default_rng(0)
    tokens = flat_rows([random.integers(5, 60, length) for length in LENGTHS])
    table = CachedTable({"tokens": tokens, "ordinary": LENGTHS})
    info = TokenizerInfo(0, {"mask": np.array(4), "is_ordinary": np.arange(60) >= 5})
    rows = row_dataset(MaskedRows(MaskedLM(mask_probability=0.3), seed=0), table, info)
    return Datasets(train=rows, evaluation=rows, test=rows)


def logits_of(model: Any) -> list[int]:
    """Return a list that gets how many places have logits in each call from now on."""
    seen: list[int] = []

    def look(module: Any, given: Any, output: Any) -> None:
        seen.append(output.logits[..., 0].numel())

    model.register_forward_hook(look)
    return seen


def answers(
    task: CausalLM | MaskedLM, model: Any, data: Datasets
) -> tuple[dict[str, Tensor], Tensor]:
    """The outputs of all rows, and the gradient of their loss as one vector."""
    batch = data.train.batch(np.arange(len(LENGTHS)))
    with torch.no_grad():
        outputs = task.outputs(model, batch)
    model.zero_grad()
    task.loss(model, batch).backward()
    return outputs, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def check(task: CausalLM | MaskedLM, model: Any, data: Datasets) -> None:
    whole, gradient = answers(task, model, data)
    told, seen = task.select_logits(model, data), logits_of(model)
    assert told.test is told.evaluation
    answer, narrow = answers(task, model, told)
    assert seen == [int(np.asarray(data.train.items).sum())] * 2
    assert torch.equal(answer["tokens"], whole["tokens"])
    assert torch.equal(answer["right"], whole["right"])
    assert torch.allclose(answer["loss"], whole["loss"], rtol=2e-6)
    assert (narrow - gradient).norm() < 2e-6 * gradient.norm()
    again, _ = answers(task, model, data)  # batches that do not tell, in the same model
    assert torch.equal(again["loss"], whole["loss"])


@pytest.mark.parametrize("kind", programs_but_for_few(MODEL_TYPES))
def test_answers_are_what_they_are_among_prompts(kind: str, answered: Datasets) -> None:
    check(CausalLM(), causal_lm_of(kind), answered)


@pytest.mark.parametrize("kind", ENCODERS)
def test_hidden_tokens_are_what_they_are_among_the_others(kind: str) -> None:
    model = model_of("masked tokens", kind)
    enable_padding_free(model, read="tokens")
    check(MaskedLM(), model, hidden())


def test_masks_of_another_epoch_tell_their_own_targets() -> None:
    told = MaskedLM().select_logits(model_of("masked tokens", "bert"), hidden()).train
    batch = told.batch(np.asarray([2, 0]))
    tokens = batch["labels"][batch["attention_mask"] > 0]
    assert (tokens != -100).nonzero()[:, 0].tolist() == batch["targets"].tolist()


def test_a_batch_of_targets_alone_marks_no_positions(answered: Datasets) -> None:
    rows: Any = CausalLM().select_logits(causal_lm_of("llama"), answered).train
    assert "targets" in rows.batch(np.arange(3))
    assert "targets" not in rows.padded().batch(np.arange(3))
    assert "targets" not in rows.padded().with_targets().batch(np.arange(3))
    whole = packed([np.arange(8, dtype=np.int32)], [np.full(8, COUNTED, np.uint8)])
    assert whole.with_targets().tells_targets is False


@pytest.mark.parametrize(
    ("change", "declared", "told"),
    [
        ({}, {}, True),
        ({"compile": "regions"}, {}, False),
        ({}, {"ranks_per_shard": 2}, False),
    ],
)
def test_an_output_that_is_not_whole_is_not_narrowed(
    change: dict[str, Any], declared: dict[str, Any], told: bool, answered: Datasets
) -> None:
    model, config = (
        causal_lm_of("llama"),
        resolve(RunConfig(task="causal-lm", device="cpu", **change)).config,
    )
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), shard=0, shards=1)
    capabilities = Capabilities(spec_version=3, processes="one", **declared)
    run = Run(
        config=config,
        world=world,
        capabilities=capabilities,
        module=model,
        model=model,
        accumulation=1,
    )
    _, data = padding_free_check.restore(run, tasks.load_task(config), answered)
    assert ("targets" in data.test.batch(np.arange(3))) is told


def prompts(folder: Path) -> dict[str, Any]:
    lines = [
        {"prompt": "count " * (i % 4 + 2), "completion": " ".join(map(str, range(i % 5 + 1)))}
        for i in range(40)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return {"task": "causal-lm", "model": "llama-tiny"}


def texts(folder: Path) -> dict[str, Any]:
    lines = [
        {"text": " ".join(["one", "two", "three"][: i % 3 + 1] * (i % 4 + 1))} for i in range(40)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return {"task": "masked-lm", "model": "bert-tiny"}


@pytest.mark.programs
@pytest.mark.parametrize("job", [prompts, texts])
def test_targets_in_a_wrong_place_are_found_before_the_first_step(
    job: Callable[[Path], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "data": str(tmp_path / "rows.jsonl"),
        "out": str(tmp_path / "run"),
        "device": "cpu",
        "dropout": 0.0,
        "max_steps": 2,
        "global_batch_size": 8,
        "padding_free": "on",
        "tokenizer": {"vocab_size": 300},
        "extensions": {"progress": False},
    }
    config = RunConfig(**given | job(tmp_path))
    right = target_logits.at_targets

    def wrong(states: Tensor, places: Tensor) -> Tensor:
        return right(states.roll(1, 1), places)

    with monkeypatch.context() as broken:
        broken.setattr(target_logits, "at_targets", wrong)
        error = r"^padding_free = 'on': losses of 8 rows differ by .* \(bound: 1e-06\)"
        with pytest.raises(ConfigError, match=rf"{error}; use --padding-free off$"):
            train(config)
    assert train(config)["padding_free"]["difference"] < 1e-6
