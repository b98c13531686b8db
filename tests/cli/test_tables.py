"""Output fits the screen, breaks at no place inside a word, and ends quietly
where nobody reads on.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from first_line import after_first_line
from rich.console import Console

from distcore.cli import print_cells, print_described
from distcore.cli.commands import summaries
from distcore.cli.main import main

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


def test_the_first_column_alone_is_narrowed_so_that_headings_stay_whole() -> None:
    console = screen(40)
    print_cells(
        console,
        ("run", "macro_f1 ↑"),
        [("lr=0.001 of a long sweep of many settings", "0.0873 *")],
        numbers=True,
    )
    lines = text_of(console)
    assert lines[0].endswith("macro_f1 ↑")
    assert lines[1] == "lr=0.001 of a long sweep of     0.0873 *"


def test_a_cell_is_no_markup() -> None:
    console = screen(70)
    print_described(
        console, ("option", "type", "meaning"), [("betas", "tuple[float, float]", "two [b] rates")]
    )
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
@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in summaries())], ids=" ".join
)
def test_help_is_as_wide_as_columns_says(
    arguments: list[str],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    longest = max(capsys.readouterr().out.splitlines(), key=len)
    assert len(longest) <= columns, longest
    if arguments == ["train", "--help"]:
        assert len(longest) > (80 if columns > 80 else 64)


@pytest.mark.programs
@pytest.mark.parametrize("argument", ["tasks", "--help"], ids=["rich prints", "argparse prints"])
@pytest.mark.needs("distcore-workbench")
def test_a_reader_that_has_gone_ends_the_command_quietly(argument: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "distcore", argument]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=buffered)
    os.close(writer)
    assert (done.returncode, after_first_line(done.stderr.decode())) == (141, "")
