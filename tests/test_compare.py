"""``distcore compare``: the same job under several strategies, what it refuses, and what it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distcore.cli import main

JOB = ("--nproc", "2", "--model", "bert-tiny", "--max-steps", "4", "--dropout", "0", "--set", "device=cpu")


def prepare(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make ``folder`` the current one, with a small data file and a cache of its own."""
    rows = [[f"{'good' if n % 2 else 'bad'} text {n}", n % 2] for n in range(80)]
    (folder / "rows.json").write_text(json.dumps(rows))
    patch.chdir(folder)
    patch.setenv("DISTCORE_CACHE", str(folder / "cache"))
    for variable in ("RANK", "WORLD_SIZE"):
        patch.delenv(variable, raising=False)


def compare(*arguments: str) -> int:
    return main(["compare", "--data", "rows.json", *JOB, *arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison: one process, two ranks twice over, and a row of another seed."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        prepare(folder, patch)
        own = ("--row", "ddp timeout=500", "--row", "single seed=1")
        assert compare("--strategies", "single,ddp", *own, "--allow-different", "seed", "--out", "found") == 0
    return folder / "found"


@pytest.fixture(scope="module")
def rows(compared: Path) -> dict[str, Any]:
    """What compare.json says, by row."""
    return {row["name"]: row for row in json.loads((compared / "compare.json").read_text())["rows"]}


def test_a_row_has_all_its_numbers(rows: dict[str, Any]) -> None:
    ddp = rows["ddp"]
    assert (ddp["world_size"], ddp["micro_batch_size"], len(ddp["rounds"])) == (2, 16, 1)
    assert rows["single"]["world_size"] == 1
    assert 0 < ddp["step_p50_seconds"] <= ddp["step_p95_seconds"]
    assert ddp["communication_seconds"] > 0
    assert ddp["peak_memory_bytes"] > 2**20
    low, high = ddp["samples_per_second_range"]
    assert low <= ddp["samples_per_second"] <= high


def test_the_parts_of_the_wall_time_add_up(rows: dict[str, Any]) -> None:
    for row in rows.values():
        parts = [row[f"{part}_seconds"] for part in ("start_up", "warm_up", "training", "rest")]
        assert sum(parts) == pytest.approx(row["wall_seconds"])
        assert min(parts) >= 0
        assert row["start_up_seconds"] > 0.5  # an interpreter and torch


def test_parameters_end_where_the_reference_ends(rows: dict[str, Any]) -> None:
    assert rows["single"]["distance"] == {"largest": 0.0, "relative": 0.0, "tensor": ""}
    assert 0 < rows["ddp"]["distance"]["relative"] < 1e-5
    assert rows["ddp timeout=500"]["distance"] == rows["ddp"]["distance"]
    assert rows["single seed=1"]["distance"]["relative"] > 0.5


def test_a_row_that_differs_is_marked_in_every_output(compared: Path, rows: dict[str, Any]) -> None:
    assert rows["single seed=1"]["differs"] == {"seed": [1, 0]}
    assert rows["ddp"]["notes"] == []
    for name in ("compare.md", "compare.html"):
        text = (compared / name).read_text()
        assert "single seed=1 ≠ seed = 1, the reference has 0" in text
        assert re.search(r"[|>] ?single seed=1 ≠ ?[|<]", text)
        assert "ddp ≠" not in text


def test_the_page_needs_nothing_else(compared: Path) -> None:
    page = (compared / "compare.html").read_text()
    assert page.count("<svg") == 5
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:|\b(src|href)=", page)


def test_the_markdown_has_a_line_a_row(compared: Path) -> None:
    lines = (compared / "compare.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 2 + 4
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_later_rounds_go_backwards_and_are_compared_with_the_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare("--strategies", "single,dp", "--rounds", "2", "--no-communication", "--out", "found") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("round")]
    assert [line.split(":")[:2] for line in said] == [
        ["round 1 of 2", " single"], ["round 1 of 2", " dp"], ["round 2 of 2", " dp"], ["round 2 of 2", " single"],
    ]  # fmt: skip
    rows = json.loads((folder / "found/compare.json").read_text())["rows"]
    assert [len(row["rounds"]) for row in rows] == [2, 2]
    assert [row["distance_between_rounds"]["largest"] for row in rows] == [0, 0]
    assert (folder / "found/runs/00-single/round-1/checkpoints").exists()
    assert not (folder / "found/runs/00-single/round-2/checkpoints").exists()


def test_a_row_whose_rank_fails_is_marked_and_the_others_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.py").write_text(
        "from distcore import hookimpl\n"
        "class Bad:\n    @hookimpl\n    def on_run_start(self, run):\n"
        "        if run.world.size > 1: raise ValueError('no luck')\n"
    )
    bad = ("--set", "extensions.bad.py:Bad=true", "--no-communication", "--out", "found")
    assert compare("--strategies", "ddp,single", "--reference", "single", *bad) == 3
    out = capsys.readouterr().out
    assert re.search(r"^single  +1 × ", out, re.M)
    assert re.search(r"^ddp: failed: rank \d of 2 failed: ValueError: no luck; traceback in \S+$", out, re.M)
    assert "ddp: failed: rank" in (folder / "found/compare.html").read_text()


def test_a_row_that_cannot_run_here_is_left_out_on_demand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--skip-missing", "--no-communication", "--out", "found")
    assert compare("--strategies", "single,mesh", *options) == 0
    assert "mesh: left out: no strategy named 'mesh'" in capsys.readouterr().out
    assert "mesh: left out" in (folder / "found/compare.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--strategies single,dpp", "row 'dpp': no strategy named 'dpp' .* \\(did you mean 'd"),
        ("--strategies ddp,single,ddp", "row 'ddp' is asked for twice"),
        ("--strategies single,,ddp", "expected names with commas between them"),
        ("--strategies single --reference ddp", "--reference ddp: no such row .*rows: single"),
        ("--strategies single --rounds 0", "--rounds 0: must be at least 1"),
        ("--strategies single --strategy ddp", "unknown flag '--strategy' .did you mean '--strategies'"),
        ("--strategies single --allow-different sed", "--allow-different sed: no such key .did you mean 'seed'"),
        ("--strategies fsdp:wide", "row 'fsdp:wide': strategy 'fsdp': sharding = 'wide': input should be"),
        ("--strategies ddp:3", "row 'ddp:3': strategy = 'ddp:3': 'ddp' takes no value after a colon"),
        ("--strategies single --data none.json", "none.json"),
        ("", "no rows; give --strategies"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert compare(*arguments.split(), "--out", "found") == 2
    err = capsys.readouterr().err
    assert re.fullmatch(f"error: .*{message}.*\n", err)
    assert not (folder / "found").exists()


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("ddp global_batch_size=64", "row 'ddp global_batch_size=64': not comparable: global_batch_size = 64, "
         "'single' has 32; .*--allow-different global_batch_size"),
        ("ddp seed=3 optimizer.eps=1e-6", "optimizer.eps = 1e-06, 'single' has 1e-08; seed = 3, 'single' has 0"),
        ("ddp precision", "--row 'ddp precision': expected KEY=VALUE, found 'precision'"),
        ("ddp out=x", "--row 'ddp out=x': out is not a row's to set"),
    ],
)  # fmt: skip
def test_a_row_of_another_job_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], own: str, message: str
) -> None:
    assert compare("--strategies", "single", "--row", own, "--out", "found") == 2
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)


def test_a_folder_that_holds_a_comparison_is_not_written_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "found").mkdir()
    (folder / "found/compare.json").write_text("{}")
    assert compare("--strategies", "single", "--out", "found") == 2
    assert "--out found: holds another comparison" in capsys.readouterr().err
