"""Parameters that a pattern freezes stay as they were, have no optimizer state, and cost
nothing under any strategy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import strategy_chain
import torch
from work_folder import enter, write_rows

from distcore import ConfigError, RunConfig, train
from distcore.checkpoint import Checkpoint
from distcore.errors import CheckpointError

pytestmark = pytest.mark.programs  # its runs are whole ones

FROZEN = r"embeddings|encoder\.layer\.0"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter(tmp_path, monkeypatch)
    return write_rows(tmp_path)


def config(rows: Path, **changes: Any) -> RunConfig:
    options = {"model": "bert-tiny", "data": str(rows), "max_seq_len": 8, "dropout": 0.0}
    tree: dict[str, Any] = {
        "task_options": options,
        "freeze": FROZEN,
        "lr": 1e-3,
        "global_batch_size": 8,
        "max_steps": 2,
        "device": "cpu",
        "log_every": 1,
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
    }
    return RunConfig(**tree | changes)


def newest(run: Path) -> Checkpoint:
    return Checkpoint(max((run / "checkpoints").iterdir()))


@pytest.mark.needs("distcore-tasks")
def test_frozen_parameters_stay_and_have_no_optimizer_state(rows: Path, tmp_path: Path) -> None:
    for steps in (1, 2):
        train(config(rows, max_steps=steps, out=str(tmp_path / str(steps))))
    first, second = newest(tmp_path / "1"), newest(tmp_path / "2")
    weights = [name for name in second if name.startswith("model/")]
    stays = {name for name in weights if torch.equal(first[name], second[name])}
    assert stays == {name for name in weights if "embeddings" in name or "encoder.layer.0" in name}
    assert {name.split("/")[1] for name in second if name.startswith("optimizer/")}.isdisjoint(
        name.split("/")[1] for name in stays
    )


@pytest.mark.needs("distcore-tasks")
def test_a_resume_with_other_frozen_parameters_is_refused(rows: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    train(config(rows, out=out))
    with pytest.raises(
        CheckpointError, match=r"freeze was .* and is None: .*; resume with the same$"
    ):
        train(
            config(
                rows,
                out=out,
                freeze=None,
                resume="auto",
                max_steps=3,
                resume_changed=["total_steps"],
            )
        )


@pytest.mark.needs("distcore-tasks")
@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (
            "embedings",
            r"^freeze = 'embedings': matches no parameter's name; names are such as bert\.emb.*, ",
        ),
        (".", r"^freeze = '\.': matches every parameter's name; names are such as "),
        ("(", r"^freeze = '\(': not a regular expression: missing \), "),
    ],
)
def test_a_pattern_that_freezes_none_or_all_is_one_line(
    rows: Path, tmp_path: Path, pattern: str, line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        train(config(rows, out=str(tmp_path / "run"), freeze=pattern))


@pytest.mark.slow
@pytest.mark.ranks
def test_a_chain_of_checkpoints_over_all_strategies_is_one_run(rows: Path, tmp_path: Path) -> None:
    """Laws 2, 5 and 7 where some parameters are not trained."""
    train(config(rows, out=str(tmp_path / "single"), max_steps=10))
    strategy_chain.run_chain(tmp_path / "chain", lambda **changes: config(rows, **changes))
    strategy_chain.assert_one_run(tmp_path / "chain", tmp_path / "single")
