"""``distcore compare``: the same job under several strategies, what it refuses,
and what it writes.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import write
from text_task import TEXTS

from distcore import State
from distcore.cli.main import main
from distcore_workbench.compare.comparison import schedule
from distcore_workbench.compare.comparison_table import remarks
from distcore_workbench.compare.distance import Distance, OtherBits, distance, other_bits

JOB = ("--task", TEXTS, "--nproc", "2", "--max-steps", "4", "--dropout", "0", "--set", "device=cpu")


def compare(*arguments: str) -> int:
    return main(["compare", "--data", "rows.json", *JOB, *arguments])


def test_every_second_round_goes_backwards() -> None:
    assert list(schedule("abc", rounds=3, interleave=True)) == [
        (1, "a"), (1, "b"), (1, "c"), (2, "c"), (2, "b"), (2, "a"), (3, "a"), (3, "b"), (3, "c"),
    ]  # fmt: skip
    assert list(schedule("ab", rounds=2, interleave=False)) == [
        (1, "a"),
        (2, "a"),
        (1, "b"),
        (2, "b"),
    ]


@pytest.mark.slow
@pytest.mark.ranks
def test_later_rounds_are_compared_with_the_first(work_folder: Path) -> None:
    assert compare("--strategies", "single", "--rounds", "2", "--out", "compared") == 0
    (row,) = json.loads((work_folder / "compared/compare.json").read_text())["rows"]
    low, high = row["samples_per_second_range"]
    assert len(row["rounds"]) == 2
    assert low < high
    assert row["distance_between_rounds"]["largest"] == 0
    assert (work_folder / "compared/runs/00-single/round-1/checkpoints").exists()
    assert not (work_folder / "compared/runs/00-single/round-2/checkpoints").exists()


def test_parameters_of_other_shapes_are_infinitely_far(tmp_path: Path) -> None:
    one, other = (
        write(tmp_path, [{"model/weight": torch.full((size,), 2.0)}], step)
        for step, size in ((1, 3), (2, 4))
    )
    assert distance(one, one) == Distance(largest=0.0, relative=0.0, tensor="")
    assert distance(one, other) == Distance(largest=math.inf, relative=math.inf, tensor="weight")


def test_distance_is_the_largest_difference_and_the_norm_of_all(tmp_path: Path) -> None:
    weights = (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    one, other = (write(tmp_path, [{"model/w": value}], step) for step, value in enumerate(weights))
    assert distance(other, one) == Distance(largest=0.5, relative=0.1, tensor="w")


def test_other_bits_are_those_of_all_tensors(tmp_path: Path) -> None:
    nan = float("nan")
    tensors: list[State] = [
        {"model/w": torch.tensor([0.0, nan, 1.0]), "optimizer/w/exp_avg": torch.ones(3)},
        {"model/w": torch.tensor([-0.0, nan, 1.0]), "optimizer/w/exp_avg": torch.ones(2)},
    ]
    one, other = (write(tmp_path, [tensor], step) for step, tensor in enumerate(tensors))
    assert other_bits(one, one) == OtherBits(differing=0, elements=6, tensor="")
    assert other_bits(one, other) == OtherBits(
        differing=3, elements=5, tensor="optimizer/w/exp_avg"
    )


@pytest.mark.parametrize(
    ("differing", "loss", "ends"),
    [
        (0, 0.5, "0 of 1,200 elements of weights and moments have other bits than those of single;"
        " the metrics are the same"),
        (3, 0.6, "3 of 1,200 elements of weights and moments have other bits than those of single,"
        " most of them in model/w; so have loss"),
    ],
)  # fmt: skip
def test_a_line_under_the_table_says_how_many_bits_differ(
    differing: int, loss: float, ends: str
) -> None:
    bits = {"differing": differing, "elements": 1200, "tensor": "model/w"}
    row: dict[str, Any] = {
        "failed": None,
        "cannot_run": None,
        "notes": [],
        "metrics": {"loss": 0.5},
    }
    rows = [
        row | {"name": "single", "other_bits": None},
        row | {"name": "ddp", "other_bits": bits, "metrics": {"loss": loss}},
    ]
    facts = {"complete": True, "reference": "single", "rows": rows}
    assert list(remarks(facts)) == [f"ddp: {ends}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--strategies single,single", "row 'single' is given twice"),
        ("--strategies single,,single", "expected names separated by commas"),
        ("--strategies single --reference ddp", "--reference ddp: no such row .*rows: single"),
        ("--strategies single --rounds 0", "--rounds 0: must be at least 1"),
        (
            "--strategies single --strategy ddp",
            "unknown flag '--strategy' .did you mean '--strategies'",
        ),
        (
            "--strategies single --allow-different sed",
            "--allow-different sed: no such key .did you mean 'seed'",
        ),
        ("--strategies single --data none.json", "none.json"),
        ("", "no rows; give --strategies"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_one_line(
    work_folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert compare(*arguments.split(), "--out", "compared") == 2
    err = capsys.readouterr().err
    assert re.fullmatch(f"error: .*{message}.*\n", err)
    assert not (work_folder / "compared").exists()


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            "single global_batch_size=64",
            (
                "row 'single global_batch_size=64': not comparable: global_batch_size = 64, "
                "'single' has 32; .*--allow-different global_batch_size"
            ),
        ),
        (
            "single seed=3 optimizer.eps=1e-6",
            "optimizer.eps = 1e-06, 'single' has 1e-08; seed = 3, 'single' has 0",
        ),
        ("single precision", "--row 'single precision': expected KEY=VALUE, found 'precision'"),
        ("single out=x", "--row 'single out=x': a row cannot set out"),
    ],
)
def test_a_row_of_another_job_is_refused(
    work_folder: Path, capsys: pytest.CaptureFixture[str], own: str, message: str
) -> None:
    assert compare("--strategies", "single", "--row", own, "--out", "compared") == 2
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 0.1}}},
            r"schedule\.name = .*deepspeed's own.*, 'single' has 'linear'",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            r"deepspeed's own .*, 'single' has",
        ),
    ],
)
def test_a_schedule_or_optimizer_that_an_engine_brings_makes_another_job(
    work_folder: Path, capsys: pytest.CaptureFixture[str], engine: dict[str, Any], message: str
) -> None:
    pytest.importorskip("distcore_deepspeed")
    (work_folder / "engine.json").write_text(json.dumps(engine))
    own = "deepspeed strategy_options.stage=0 strategy_options.config=engine.json"
    assert compare("--strategies", "single", "--row", own, "--out", "compared") == 2
    said = capsys.readouterr().err
    assert re.fullmatch(f"error: .*not comparable: .*{message}.*--allow-different .*\n", said), said


def test_a_folder_that_holds_a_comparison_is_not_written_to(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (work_folder / "compared").mkdir()
    (work_folder / "compared/compare.json").write_text("{}")
    assert compare("--strategies", "single", "--out", "compared") == 2
    assert "--out compared: holds another comparison" in capsys.readouterr().err
