"""``distcore compare`` of one process and two ranks of another strategy: what is measured,
and what is written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from drawn_pages import drawn_in
from text_task import TEXTS
from work_folder import enter, write_rows

from distcore.cli.main import main
from distcore_workbench.pages.plotly import source

JOB = ("--task", TEXTS, "--nproc", "2", "--max-steps", "4", "--dropout", "0", "--set", "device=cpu")


def compare(*arguments: str) -> int:
    return main(["compare", "--data", "rows.json", *JOB, *arguments])


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison: one process, two ranks, and a row of another seed."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        write_rows(folder)
        enter(folder, patch)
        own = (
            "--row",
            "single seed=1",
            "--allow-different",
            "seed",
            "--eval-data",
            "rows.json",
            "--out",
            "found",
        )
        assert compare("--strategies", "single,ddp", *own) == 0
    return folder / "found"


@pytest.fixture(scope="module")
def rows(compared: Path) -> dict[str, Any]:
    """The rows of compare.json, by name."""
    return {row["name"]: row for row in json.loads((compared / "compare.json").read_text())["rows"]}


@pytest.mark.slow
@pytest.mark.ranks
def test_a_row_has_all_its_numbers(rows: dict[str, Any]) -> None:
    ddp = rows["ddp"]
    assert (ddp["world_size"], ddp["micro_batch_size"], len(ddp["rounds"])) == (2, "auto", 1)
    assert rows["single"]["world_size"] == 1
    assert 0 < ddp["step_p50_seconds"] <= ddp["step_p95_seconds"]
    assert ddp["communication_seconds"] > 0
    assert ddp["peak_memory_bytes"] > 2**20
    low, high = ddp["samples_per_second_range"]
    assert low <= ddp["samples_per_second"] <= high


@pytest.mark.slow
@pytest.mark.ranks
def test_the_parts_of_the_wall_time_add_up(rows: dict[str, Any]) -> None:
    for row in rows.values():
        parts = [row[f"{part}_seconds"] for part in ("start_up", "warm_up", "training", "rest")]
        assert sum(parts) == pytest.approx(row["wall_seconds"])
        assert min(parts) >= 0
        assert row["start_up_seconds"] > 0.5  # an interpreter and torch


@pytest.mark.slow
@pytest.mark.ranks
def test_parameters_end_where_the_reference_ends(rows: dict[str, Any]) -> None:
    assert rows["single"]["distance"] == {"largest": 0.0, "relative": 0.0, "tensor": ""}
    assert 0 < rows["ddp"]["distance"]["relative"] < 1e-5
    assert rows["single seed=1"]["distance"]["relative"] > 0.5


@pytest.mark.slow
@pytest.mark.ranks
def test_a_row_that_differs_is_marked_in_every_output(compared: Path, rows: dict[str, Any]) -> None:
    assert rows["single seed=1"]["differs"] == {"seed": [1, 0]}
    assert rows["ddp"]["notes"] == []
    for name in ("compare.md", "compare.html"):
        text = (compared / name).read_text()
        assert "single seed=1 ≠ seed = 1, the reference has 0" in text
        assert re.search(r"[|>] ?single seed=1 ≠ ?[|<]", text)
        assert "ddp ≠" not in text


@pytest.mark.slow
@pytest.mark.ranks
def test_the_page_needs_nothing_else(compared: Path) -> None:
    page = (compared / "compare.html").read_text()
    assert page.count('class="plot"') == len(drawn_in(compared / "compare.html")["figures"]) == 5
    ours = page.replace(source(), "")
    assert re.findall(r'\b(?:src|href)="?([^">]*)', ours) == ["data:,"]  # no icon
    assert not re.search(r"<img|@import|url\(|https?:|\bfetch\(", ours)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_markdown_has_one_line_per_row(compared: Path) -> None:
    lines = (compared / "compare.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 2 + 3
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


@pytest.mark.slow
@pytest.mark.ranks
def test_a_row_that_fails_or_cannot_run_is_marked_and_the_others_run(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (work_folder / "bad.py").write_text(
        "from distcore import hookimpl\n"
        "class Bad:\n    @hookimpl\n    def on_run_start(self, run):\n"
        "        if run.world.size > 1: raise ValueError('no luck')\n"
    )
    options = (
        "--reference",
        "single",
        "--skip-missing",
        "--set",
        "extensions.bad.py:Bad=true",
        "--out",
        "found",
    )
    assert compare("--strategies", "ddp,single,absent", *options) == 3
    out = capsys.readouterr().out
    assert re.search(r"^single  +1 × ", out, re.M)
    assert re.search(
        r"^ddp: failed: rank \d of 2 failed: ValueError: no luck; traceback in \S+; raised at"
        r" \S*bad\.py:5$",
        out,
        re.M,
    )
    assert "\nabsent: left out: no strategy named 'absent' (installed: " in out
    for name in ("compare.md", "compare.html"):
        text = (work_folder / "found" / name).read_text()
        assert "ddp: failed: rank" in text
        assert "absent: left out: no strategy" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--strategies single,dpp", "row 'dpp': no strategy named 'dpp' .* \\(did you mean 'd"),
        (
            "--strategies fsdp:wrap=1,depth=1",
            "row 'fsdp:wrap=1,depth=1': strategy 'fsdp': unknown option 'depth'",
        ),
        ("--strategies fsdp:wide", "row 'fsdp:wide': strategy 'fsdp': sharding = 'wide': expected"),
        (
            "--strategies ddp:3",
            "row 'ddp:3': strategy = 'ddp:3': 'ddp' takes no value after a colon",
        ),
    ],
)
def test_a_row_that_no_strategy_can_be_is_one_line(
    work_folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert compare(*arguments.split(), "--out", "found") == 2
    err = capsys.readouterr().err
    assert re.fullmatch(f"error: .*{message}.*\n", err)
    assert not (work_folder / "found").exists()
