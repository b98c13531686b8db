"""Results of many evaluated rows are gathered some at a time, so that no rank keeps a
number for each row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distcore import Datasets, Ragged, RunConfig, launch, train
from distcore.engine import evaluation
from distcore.errors import AgreementError, TaskError
from distcore.plugin.task.outputs import Collected, InOrder, gather_leaders
from distcore.testing.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Varied(Problem):
    """Rows of several sizes, and sums; gathers so many rows at a time in each rank."""

    together: int = 2**18
    evaluation_rows: int = 41

    def prepare(self, config: RunConfig) -> Datasets:
        evaluation.GATHERED = self.together
        return super().prepare(config)

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        real = batch["tokens"] != 0
        return super().outputs(model, batch) | {
            "tokens": Ragged(batch["tokens"][real], real.sum(1))
        }

    def sums(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"sizes": (batch["tokens"] != 0).sum().double()[None]}

    def report_sums(self, sums: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        return {"sizes": sums["sizes"].item()}

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterable[dict[str, object]]:
        for index, tokens in enumerate(outputs["tokens"]):
            yield {"index": index, "loss": outputs["loss"][index].item(), "tokens": tokens.tolist()}


def result(
    out: Path, together: int, ranks: int, **changes: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What an evaluation of an untrained model says of all rows, and of each."""
    given = {
        "out": str(out),
        "max_steps": 1,
        "lr": 1e-9,
        "device": "cpu",
        "global_batch_size": 8,
        "nproc": ranks,
    }
    given |= {
        "strategy": "ddp" if ranks > 1 else "single",
        "extensions": {"progress": False},
        "micro_batch_size": 2,
    }
    config = RunConfig.model_validate(given | changes)
    (
        launch(train, config, Varied(together=together), nproc=ranks)
        if ranks > 1
        else train(config, Varied(together=together))
    )
    lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    return json.loads((out / "report.json").read_text())["evaluation"], lines


@pytest.fixture(autouse=True)
def _gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "GATHERED", evaluation.GATHERED)


@pytest.mark.programs
@pytest.mark.parametrize(
    "cut", [{}, {"micro_batch_size": "auto", "micro_batch_tokens": 24}], ids=["rows", "tokens"]
)
def test_parts_give_what_all_rows_at_once_give(
    cut: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()

    def counting(run: Any, hooks: Any, mine: Collected) -> Any:
        sizes.append(len(mine.index))
        return gather(run, hooks, mine)

    gather: Any = vars(evaluation)["gather"]
    monkeypatch.setattr(evaluation, "gather", counting)
    whole = result(tmp_path / "whole", 2**18, 1, **cut)
    monkeypatch.setattr("distcore.plugin.batching.sampling.EVALUATED", 4)
    assert set(sizes) == {41}
    sizes.clear()
    parts = result(tmp_path / "parts", 5, 1, **cut)
    assert max(sizes) <= 8
    assert sum(sizes) % 41 == 0
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    assert [line["tokens"] for line in parts[1]] == [line["tokens"] for line in whole[1]]
    assert [line["loss"] for line in parts[1]] == pytest.approx(
        [line["loss"] for line in whole[1]], rel=1e-5
    )


@pytest.mark.ranks
@pytest.mark.programs
def test_two_ranks_gather_parts_as_one_process(tmp_path: Path) -> None:
    one, two = result(tmp_path / "one", 2**18, 1), result(tmp_path / "two", 5, 2)
    assert two[0] == pytest.approx(one[0], rel=1e-6)
    assert [line["tokens"] for line in two[1]] == [line["tokens"] for line in one[1]]


def test_rows_of_another_shape_in_a_later_part_are_refused() -> None:
    results = InOrder(4)
    results.add(Collected(index=torch.tensor([2, 3]), outputs={"answer": torch.ones(2, 3)}))
    with pytest.raises(TaskError, match=r"returned 'answer' with rows of shapes \(1,\) and \(3,\)"):
        results.add(Collected(index=torch.tensor([0, 1]), outputs={"answer": torch.ones(2, 1)}))


def test_a_row_that_comes_in_two_parts_is_counted_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def twice(run: Any, hooks: Any, mine: Collected) -> Collected:
        return Collected(index=mine.index // 2 * 2, outputs=mine.outputs, sums=mine.sums)

    monkeypatch.setattr(evaluation, "gather", twice)
    monkeypatch.setattr("distcore.plugin.batching.sampling.EVALUATED", 4)
    with pytest.raises(
        AgreementError,
        match="evaluation returned 41 rows, 21 of them different, for a dataset of 41",
    ):
        result(tmp_path, 5, 1)


def test_rows_of_a_shard_are_those_of_the_rank_that_leads_it() -> None:
    """A first stage of a pipeline gets what the last ones of two shards computed, in the order
    of its own rows.
    """
    of_leaders = {"index": torch.tensor([7, 3, 4]), "loss": torch.tensor([0.7, 0.3, 0.4])}
    sent: list[dict[str, Tensor]] = []

    def gather_outputs(_run: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        sent.append(tensors)
        return {name: torch.cat([tensors[name], values]) for name, values in of_leaders.items()}

    run: Any = SimpleNamespace(
        world=SimpleNamespace(is_shard_leader=False, device=torch.device("cpu"))
    )
    hooks: Any = SimpleNamespace(gather_outputs=gather_outputs)
    mine = Collected(index=torch.tensor([4, 3]), outputs={"loss": torch.zeros(2)})
    rows = gather_leaders(run, hooks, mine, np.array([4, 3]))
    assert [len(tensor) for tensor in sent[0].values()] == [0, 0]
    assert rows.index.tolist() == [4, 3]
    assert torch.equal(rows.outputs["loss"], torch.tensor([0.4, 0.3]))  # type: ignore[arg-type]
