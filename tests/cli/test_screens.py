"""Output fits the screen, breaks at no place inside a word, and ends quietly where nobody reads on."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest
from first_line import after_first_line
from rich.console import Console

from distcore.cli.commands import summaries
from distcore.cli.main import main
from distcore.tables import print_cells, print_described

ROWS = [("ddp", "many", "fp32 bf16 fp16", "no"), ("single", "one", "fp32", "yes")]


def screen(width: int) -> Console:
    return Console(width=width, file=io.StringIO())


def text_of(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_table_that_fits_is_one() -> None:
    console = screen(40)
    print_cells(console, ("name", "ranks", "precision", "shards"), ROWS)
    assert text_of(console) == [
        "name    ranks  precision       shards",
        "ddp     many   fp32 bf16 fp16  no",
        "single  one    fp32            yes",
    ]


def test_columns_that_do_not_fit_follow_beside_the_first_one_again() -> None:
    console = screen(36)
    print_cells(console, ("name", "ranks", "precision", "shards"), ROWS, numbers=True)
    assert text_of(console) == [
        "name    ranks       precision",
        "ddp      many  fp32 bf16 fp16",
        "single    one            fp32",
        "",
        "name    shards",
        "ddp         no",
        "single     yes",
    ]


def test_only_the_first_column_is_narrowed_so_that_headings_stay_whole() -> None:
    console = screen(40)
    print_cells(
        console, ("run", "macro_f1 ↑"), [("lr=0.001 of a long sweep of many settings", "0.0873 *")], numbers=True
    )
    lines = text_of(console)
    assert lines[0].endswith("macro_f1 ↑")
    assert lines[1] == "lr=0.001 of a long sweep of     0.0873 *"


def test_a_cell_is_no_markup() -> None:
    console = screen(70)
    print_described(console, ("option", "type", "meaning"), [("betas", "tuple[float, float]", "two [b] rates")])
    assert text_of(console)[1] == "betas   tuple[float, float]  two [b] rates"
    for table in (print_cells, print_described):
        table(console := screen(70), ("my.py:Ring: [x]", "type"), [("a", "b")])
        assert text_of(console)[0].split("  ")[0] == "my.py:Ring: [x]"


def test_prose_is_wrapped_between_words_beside_names_that_stay_whole() -> None:
    console = screen(50)
    rows = [("bucket_mb", "int or none", "Gradient bucket size in MiB; larger ones overlap less")]
    print_described(console, ("option", "type", "meaning"), rows)
    assert text_of(console) == [
        "option     type     meaning",
        "bucket_mb  int or   Gradient bucket size in MiB;",
        "           none     larger ones overlap less",
    ]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in summaries())], ids=" ".join)
def test_help_is_as_wide_as_columns_says(
    arguments: list[str], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    longest = max(capsys.readouterr().out.splitlines(), key=len)
    assert len(longest) <= columns, longest
    if arguments == ["train", "--help"]:
        assert len(longest) > (80 if columns > 80 else 64)


@pytest.mark.parametrize(
    "command", ["strategies", "tasks", "strategies ddp", "tasks text-classification", "train --help all"]
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
    prose = re.compile(r"^\S+: (limit|cannot be used): ")  # whole lines, for programs that read them
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
def test_one_strategy_is_shown_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "ddp"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^strategy +ddp +$", out, re.M)
    assert re.search(r"^distribution +distcore-ddp ", out, re.M)
    assert re.search(r"^bucket_mb +int +25 ", out, re.M)
    assert "single" not in out
    assert main(["strategies", "ddp", "--json"]) == 0
    assert [facts["name"] for facts in json.loads(capsys.readouterr().out)] == ["ddp"]


@pytest.mark.needs("distcore-tasks")
def test_one_task_is_shown_by_name(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_name_that_is_not_there_is_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err)
    assert err.count("\n") == 1


@pytest.mark.parametrize("argument", ["tasks", "--help"], ids=["rich prints", "argparse prints"])
def test_a_reader_that_has_gone_ends_the_command_quietly(argument: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "distcore", argument]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=buffered)
    os.close(writer)
    assert (done.returncode, after_first_line(done.stderr.decode())) == (141, "")
