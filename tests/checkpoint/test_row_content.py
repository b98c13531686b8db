"""Rows that a task reads one by one: a change of any of them is seen, also beside the samples."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distcore import RunConfig, Simple, launch, train
from distcore.checkpoint import Checkpoint
from distcore.checkpoint.row_content import RowContent
from distcore.errors import AgreementError, CheckpointError
from distcore.plugin.task.simple import SAMPLED, CollatedRows

ROWS, CHANGED = 600, 301


class Lines(Simple):
    ranks: ClassVar[tuple[str, ...]] = ()
    """Ranks that see another label of one row."""

    def data(self) -> Any:
        labels = torch.ones(ROWS, 1)
        labels[CHANGED] += os.environ.get("RANK", "0") in self.ranks
        rows = torch.utils.data.TensorDataset(torch.linspace(-1, 1, ROWS)[:, None], labels)
        return rows, rows

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def row_loss(self, model: nn.Module, batch: Any) -> Tensor:
        losses: Tensor = (model(batch[0]) - batch[1]).square()[:, 0]
        return losses


def run(out: Path, **changes: Any) -> None:
    given = {"out": str(out), "max_steps": 2, "global_batch_size": 8, "device": "cpu"}
    train(RunConfig.model_validate(given | {"extensions": {"progress": False}} | changes), Lines())


def content(rows: Any, seconds: float = 5.0) -> RowContent:
    return RowContent(CollatedRows(rows, Lines()), seconds)


def test_a_resume_is_refused_where_one_label_changed_that_no_sample_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CHANGED not in np.linspace(0, ROWS - 1, SAMPLED).astype(int)
    run(tmp_path)
    run(tmp_path, resume="auto")
    monkeypatch.setattr(Lines, "ranks", ("0",))
    with pytest.raises(
        CheckpointError, match="saved with other training data; resume with the same"
    ):
        run(tmp_path, resume="auto")


def test_a_checkpoint_without_the_digest_is_compared_by_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(RowContent, "known", None)
        run(tmp_path)
    assert "rows" not in Checkpoint(tmp_path / "checkpoints" / "step-00000002").job_state()
    run(tmp_path, resume="auto")


def test_the_content_of_many_rows_is_read_beside_the_run() -> None:
    rows = [(index, index % 3) for index in range(ROWS)]
    aside = content(rows, seconds=0)
    assert aside.known is None
    aside.continue_in_background()
    deadline = time.monotonic() + 30
    while aside.known is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert aside.known == content(rows).known
    assert aside.known != content([*rows[:-1], (599, 7)]).known


@pytest.mark.parametrize(
    "leaf",
    [
        np.arange(5000),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(1.0),
        {"words": ["a", b"b"], "n": None},
    ],
)
def test_a_row_of_any_kind_is_told_from_others(leaf: Any) -> None:
    once, again = content([leaf, leaf]).known, content([leaf, leaf]).known
    assert once == again
    assert once != content([leaf, 0]).known


def test_a_change_inside_of_a_long_array_is_seen() -> None:
    other = np.arange(5000)
    other[2500] = -1
    assert content([np.arange(5000)]).known != content([other]).known


def refusal(out: Path) -> str:
    with pytest.raises(AgreementError) as refused:
        run(out, strategy="ddp", nproc=2)
    return str(refused.value)


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp")
def test_ranks_with_one_other_label_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lines, "ranks", ("1",))
    for said in launch(refusal, tmp_path / "run", nproc=2):
        assert (
            "of the training rows (what is random in them belongs into at(epoch)): rank 1 differs"
            " from rank 0" in said
        )


class Cycle:
    """Part of a cycle that only the garbage collector frees, which is noted."""

    def __init__(self, file: Path) -> None:
        self.file, self.itself = file, self

    def __del__(self) -> None:
        self.file.write_text(str(os.getpid()))


@pytest.mark.programs
def test_the_process_that_reads_frees_nothing_of_the_run(tmp_path: Path) -> None:
    """An inherited process group would wait for threads that are not there."""

    class Rows(list[int]):
        def __getitem__(self, row: Any) -> Any:
            gc.collect()
            return super().__getitem__(row)

    gc.collect()
    gc.disable()
    try:
        aside = content(Rows([1, 2]), seconds=0)
        Cycle(tmp_path / "freed")
        aside.continue_in_background()
        deadline = time.monotonic() + 30
        while aside.known is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not (tmp_path / "freed").exists()
    finally:
        gc.enable()
