"""``distcore check --all``: a row for each strategy in each layout and for each
task, and a page.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distcore import StrategyError
from distcore.cli.main import main
from distcore.testing import STRATEGIES, TASKS, Finding, everything
from distcore.testing.everything import Measurement, layouts, page_of


def finding(
    case: str, law: str, error: float | None, bound: float = 1e-5, note: str = ""
) -> Finding:
    held = None if error is None else error <= bound
    return Finding(law=law, case=case, held=held, error=error, bound=bound, note=note)


ROWS = {
    "strategy": [
        Measurement(
            name="one",
            findings=[
                finding("partitions", "gradient", 2e-6),
                finding("ragged-tail", "gradient", 5e-7),
                finding("bf16-steps", "gradient", 1e-2, 2e-2),
                finding("all-rows", "evaluation", 0.0, 0.0),
                finding("phases", "gradient", None, note="it has none"),
            ],
        ),
        Measurement(
            name="two:a=1", findings=[finding("all-rows", "evaluation", 3.0, 0.0, "3 rows twice")]
        ),
        Measurement(name="three", refused="needs a GPU"),
    ],
    "task": [Measurement(name="rows", findings=[finding("same-rows", "order", 0.0, 0.0)])],
}


def test_the_page_has_a_cell_per_law_and_a_line_for_what_did_not_hold() -> None:
    lines = page_of(ROWS, 3.2, 2).splitlines()
    assert "in 3 minutes, on 2 ranks" in lines[2]
    assert lines[5:9] == [
        "| strategy | 2 gradient | 2 in half precision | 4 evaluation | cases |",
        "|---|---|---|---|---|",
        "| `one` | 2.0e-06 | 1.0e-02 | 0 | 4 held, 1 skipped |",
        "| `two:a=1` |  |  | **all-rows** | 1 broken |",
    ]
    assert lines[10:13] == [
        "| task | 1 order | cases |",
        "|---|---|---|",
        "| `rows` | 0 | 1 held |",
    ]
    assert lines[14:] == [
        "- `three` was not measured: needs a GPU",
        "- phases is skipped (one): it has none",
        "- all-rows is broken (two:a=1): 3 rows twice",
    ]


FEW = ("rows-of-a-step", "partitions", "bf16", *STRATEGIES.own_modules)
"""Cases of a strategy: all are measured by the contract of ``single``, but for its own modules."""


def offering(monkeypatch: pytest.MonkeyPatch, **names: list[str]) -> None:
    monkeypatch.setattr(
        everything, "offers", lambda group: {name: [] for name in names.get(group, [])}
    )


@pytest.mark.ranks
@pytest.mark.needs("distcore-tasks")
def test_everything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    offering(monkeypatch, strategies=["single"], tasks=["image-classification"])
    monkeypatch.setattr(STRATEGIES, "measure", partial(STRATEGIES.measure, only=FEW))
    page = tmp_path / "laws" / "page.md"
    assert main(["check", "--all", "--out", str(page)]) == 0
    said = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [
        "strategy single",
        "task image-classification",
        "page",
    ]
    text = page.read_text()
    assert "| `single` |" in text
    assert "| `image-classification` |" in text
    assert "broken" not in text.partition("| strategy")[2]


def test_a_broken_or_refused_plugin_is_in_the_exit_code_and_the_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offering(monkeypatch, strategies=["single"], tasks=["rows"])

    def refused(*_: object) -> Any:
        raise StrategyError("needs a GPU")

    monkeypatch.setattr(STRATEGIES, "measure", refused)
    for error in (0.0, 1.0):
        monkeypatch.setattr(
            TASKS, "measure", lambda *_, of=error: [finding("same-rows", "order", of, 0.0)]
        )
        assert main(["check", "--all"]) == error
    said = capsys.readouterr().out
    assert "strategy single: needs a GPU" in said
    assert "task rows: 1 held" in said
    assert "task rows: 1 broken" in said


@pytest.mark.needs("distcore-fsdp")
def test_layouts_are_the_default_and_those_worth_trying_each_once() -> None:
    every = list(layouts("fsdp"))
    assert every[0] == {}
    assert {"sharding": "grad"} in every
    assert all(every.count(options) == 1 for options in every)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--all --json", "--all: measures every case"),
        ("--all --case partitions", "--all: measures every case"),
        ("--all --out page.html", "name a file that ends in .md"),
        ("--strategy single --out page.md", "is the page of --all"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words.split()]) == 2
    assert says in capsys.readouterr().err
