"""Pages in a real browser: they draw without an error, without network and without a scroll
bar to the side.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import browser
import pytest
from run_folders import write_run

from distcore.cli.main import main
from distcore_workbench.pages.document import document, plot_places
from distcore_workbench.pages.figures import Bar, bars, log_dots, ranges
from distcore_workbench.pages.tables import html_table
from distcore_workbench.tuning import tune_page
from distcore_workbench.tuning.outcome import Outcome
from distcore_workbench.tuning.racing import Finalist
from distcore_workbench.tuning.record import Trial
from distcore_workbench.tuning.settings import Setting
from distcore_workbench.tuning.tune_table import tune_facts

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(browser.programs() is None, reason=browser.MISSING),
]
WIDTHS = (1200, 400)


@pytest.fixture(scope="module", params=[False, True], ids=["light", "dark"])
def window(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[browser.Browser]:
    with browser.Browser(tmp_path_factory.mktemp("profile"), dark=request.param) as opened:
        yield opened


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """The report of three runs."""
    for name, lr in (
        ("first", 1e-3),
        ("second", 3e-4),
        ("a-name-that-is-much-longer-than-others", 1e-2),
    ):
        write_run(tmp_path / "runs" / name, lr=lr)
    assert main(["report", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    return tmp_path / "report.html"


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    """A page with each kind of figure that is no curve, and a table of many columns."""
    rows = [
        Bar(name=name, parts=[3.0, 1.0], spread=(3.5, 4.5), text="4.0")
        for name in ("ddp", "fsdp:" + 50 * "x")
    ]
    shown = [
        bars("Speed", "samples/s", {"one": "--a", "two": "--b"}, rows), ranges("Time", "ms", rows),
        log_dots("Distance", "relative", [*rows, Bar(name="zero", parts=[0.0], text="0")]),
    ]  # fmt: skip
    page = tmp_path / "figures.html"
    many = [f"column {number}" for number in range(16)]
    table = html_table(
        many, [[f"{number}.4e-06" for number in range(16)], 16 * ["a-word-that-is-long"]]
    )
    command = "distcore compare --out " + 90 * "x"
    page.write_text(document("Figures", command, table + plot_places(shown), shown))
    return page


@pytest.fixture
def tune(tmp_path: Path) -> Path:
    """The page of a tune with two finalists, a ladder of two settings, and a trial that failed."""
    outcomes = [
        Outcome(result="ok", speed=90.0 / number, peak=2**28 // number, seconds=4.0)
        for number in (1, 2)
    ]
    outcomes.append(Outcome(result="out of memory", seconds=2.0, why="ended by SIGKILL"))
    settings: list[Setting] = [{"nproc": 1}, {"nproc": 2}, {"strategy": "fsdp"}]
    trials = [
        Trial(kind="screen", setting=setting, number=1, steps=9, outcome=outcome)
        for setting, outcome in zip(settings, outcomes, strict=True)
    ]
    rounds: list[Sequence[float]] = [[0.1, 0.2], [0.2, 0.1]]
    finals = [
        Finalist(setting={"nproc": number}, speeds=[100.0, 90.0 / number], rounds=rounds)
        for number in (1, 2)
    ]
    about = {
        "command": "distcore tune",
        "untraced": [],
        "fit_only": False,
        "untried": [],
        "load": None,
    }
    page = tmp_path / "tune.html"
    page.write_text(tune_page.page(tune_facts(trials, finals, {"nproc": 2}, about)))
    return page


def names_drawn(window: browser.Browser) -> list[str]:
    """The names of the curves that stand in the first plot."""
    names: list[str] = window.run(
        "return document.querySelector('.plot').data.filter(it => it.visible && 'axis' in"
        " it).map(it => it.name)"
    )
    return names


def set_control(window: browser.Browser, name: str, value: str, event: str) -> None:
    """Set a control of the page, and tell the page so."""
    it = f"document.getElementById('{name}')"
    window.run(f"{it}.value = '{value}'; {it}.dispatchEvent(new Event('{event}'))")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["report", "figures", "tune"])
def test_a_page_draws_itself_without_error_network_or_a_scroll_bar_to_the_side(
    window: browser.Browser, request: pytest.FixtureRequest, kind: str, width: int
) -> None:
    window.open(request.getfixturevalue(kind), width)
    assert window.console() == []
    assert window.run("return performance.getEntriesByType('resource').map(it => it.name)") == []
    assert window.run("return document.documentElement.scrollWidth") == width
    wide = (
        "[...document.querySelectorAll('.wide')].filter(it => it.scrollWidth >"
        " it.clientWidth).length"
    )
    assert window.run(f"return {wide}") == 0


def test_the_page_follows_the_color_scheme(window: browser.Browser, report: Path) -> None:
    window.open(report, WIDTHS[0])
    is_dark = window.run("return matchMedia('(prefers-color-scheme: dark)').matches")
    paper = window.run("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 24, 30)" if is_dark else "rgb(255, 255, 255)")
    line = window.run("return document.querySelector('.plot').data[0].line.color")
    assert line == ("#6fa0e0" if is_dark else "#3b6fb6")


def test_a_click_in_the_legend_hides_a_run_everywhere_and_a_second_one_shows_it(
    window: browser.Browser, report: Path
) -> None:
    window.open(report, WIDTHS[0])
    assert "second" in names_drawn(window)
    window.click(".runs button:nth-child(3)")
    names = names_drawn(window)
    assert "first" in names
    assert "second" not in names
    plots = "[...document.querySelectorAll('.plot')]"
    assert (
        window.run(
            f"return {plots}.flatMap(it => it.data).filter(it => it.run === 2 && it.visible)"
        )
        == []
    )
    window.click(".runs button:nth-child(3)")
    assert "second" in names_drawn(window)


def test_the_axis_is_chosen_for_all_plots_and_is_labeled(
    window: browser.Browser, report: Path
) -> None:
    window.open(report, WIDTHS[0])
    title = (
        "return [...new Set([...document.querySelectorAll('.xtitle')].map(it => it.textContent))]"
    )
    assert window.run(title) == ["step"]
    for value, label in (("epoch", "epoch"), ("seconds", "training time, s"), ("step", "step")):
        set_control(window, "axis", value, "change")
        assert window.run(title) == [label]


def test_a_constant_is_a_line_also_beside_one_point(
    window: browser.Browser, tmp_path: Path
) -> None:
    line = {
        "step": 20,
        "epoch": 0.4,
        "samples": 640,
        "eval/accuracy": 0.6,
        "eval/majority_accuracy": 0.5,
    }
    (write_run(tmp_path / "runs/short", 20) / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["report", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    window.open(tmp_path / "report.html", 1200)
    drawn = window.run(
        "return [...document.querySelectorAll('.plot')].flatMap(it => it.data.filter(one =>"
        " 'constant' in one).map(one => [it.data.find(other => 'axis' in other).x, one.x]))"
    )
    assert drawn == [[[20], [0, 40]]]


def test_smoothing_keeps_what_was_measured_behind(window: browser.Browser, report: Path) -> None:
    window.open(report, WIDTHS[0])
    set_control(window, "smoothing", "0.5", "input")
    data = "document.querySelector('.plot').data"
    measured, smooth = window.run(f"return {data}.slice(0, 2).map(it => [it.opacity, it.y])")
    assert measured[0] == 0.25
    assert smooth[1][:2] == pytest.approx(
        [measured[1][0], (measured[1][0] * 0.5 + measured[1][1]) / 1.5]
    )


def test_the_pointer_shows_values(window: browser.Browser, report: Path) -> None:
    window.open(report, WIDTHS[0])
    x, y, wide, high = window.run(
        "scrollTo(0, 0); const b = document.querySelector('.plot').getBoundingClientRect();"
        "return [b.x, b.y, b.width, b.height]"
    )
    window.point(x + wide / 2, y + high / 2)
    window.wait("document.querySelector('.hoverlayer').textContent.includes('second : 0.')")
