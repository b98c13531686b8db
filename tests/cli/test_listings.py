"""``distcore strategies`` and ``distcore tasks``: tables that fit a screen, JSON, and a line for
what has an error.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from work_folder import install

from distcore.cli.main import main


@pytest.mark.needs("distcore-ddp")
def test_strategies_as_json_say_what_each_declares_and_its_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["strategies", "--json"]) == 0
    strategies = {facts["name"]: facts for facts in json.loads(capsys.readouterr().out)}
    assert strategies["single"]["declares"]["processes"] == "one"
    assert strategies["single"]["distribution"] == "distcore-core 0.1.0"
    bucket = {option["name"]: option for option in strategies["ddp"]["options"]}["bucket_mb"]
    assert (bucket["type"], bucket["default"]) == ("int ≥ 0", "25")
    assert bucket["doc"].startswith("Gradient bucket size in MiB")


@pytest.mark.needs("distcore-ddp")
def test_strategies_as_tables_fit_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^single +one +any", out, re.MULTILINE)
    assert main(["strategies", "ddp"]) == 0
    assert "bucket_mb" in capsys.readouterr().out


def test_broken_and_colliding_strategies_cost_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, module in (("one-dist", "missing_module:X"), ("two-dist", "missing_module:Y")):
        install(tmp_path, name, f"[distcore.strategies]\nboth = {module}\nonly-{name} = {module}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (both,) = (line for line in lines if line.startswith("both:"))
    assert "is provided twice: by one-dist 1.0 and by two-dist 1.0" in both
    (broken,) = (line for line in lines if line.startswith("only-one-dist:"))
    assert "does not import: ModuleNotFoundError: No module named 'missing_module'" in broken
    assert any(line.startswith("single ") for line in lines)


@pytest.mark.parametrize(
    "command",
    ["strategies", "tasks", "strategies ddp", "tasks text-classification", "train --help all"],
)
@pytest.mark.needs("distcore-ddp", "distcore-tasks")
def test_listings_fit_eighty_columns_and_keep_names_whole(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = command.split()
    try:
        main(words)
    except SystemExit:
        assert "--help" in command
    out = capsys.readouterr().out
    # whole lines, for programs that read them
    prose = re.compile(r"^\S+: (limit|cannot be used): ")
    assert not [line for line in out.splitlines() if len(line) > 80 and not prose.match(line)]
    of_help = words[0] == "train"
    assert main([*(["tasks", "text-classification"] if of_help else words), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    if len(words) == 1:
        names = {facts["name"] for facts in described}
    else:
        names = {option["name"] for option in described[0]["options"]}
    if of_help:
        names = {f"--{name.replace('_', '-')}" for name in names if "." not in name}
    assert not names - set(out.split())


def test_the_strategies_are_a_table_of_a_few_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 12
    assert lines[0].split() == ["strategy", "ranks", "devices", "precision", "shards", "owns"]
    assert lines[-1] == "distcore strategies NAME shows the options of one."


@pytest.mark.needs("distcore-ddp")
def test_a_strategy_is_shown_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "ddp"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^strategy +ddp +$", out, re.M)
    assert re.search(r"^distribution +distcore-ddp ", out, re.M)
    assert re.search(r"^bucket_mb +int ≥ 0 +25 ", out, re.M)
    assert "single" not in out
    assert main(["strategies", "ddp", "--json"]) == 0
    assert [facts["name"] for facts in json.loads(capsys.readouterr().out)] == ["ddp"]


@pytest.mark.needs("distcore-tasks")
def test_a_task_is_shown_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "text-classification"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^metrics +loss↓ accuracy↑", out, re.M)
    assert "--set task_options.NAME=VALUE" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("strategies dpp", r"no strategy named 'dpp' \(installed: .*\) \(did you mean 'ddp'\?\)"),
        ("tasks text", "no task named 'text'"),
    ],
)
@pytest.mark.needs("distcore-ddp")
def test_a_name_that_is_not_there_is_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err)
    assert err.count("\n") == 1
