"""``distcore report``: what is in run folders, in the terminal and as a page; run folders are made up."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from distcore.cli.main import main
from distcore.config import dump_config, load_config
from distcore.files import hold
from distcore_workbench.report import live
from distcore_workbench.report.curves import charts_of
from distcore_workbench.report.line_chart import MOST_POINTS, thinned
from distcore_workbench.report.predictions import MOST_CLASSES, Confusion, answers_of
from distcore_workbench.report.terminal import sparkline

lxml = pytest.importorskip("lxml.html")

LABELS = ("good", "bad", "so so")


def write_run(folder: Path, steps: int = 100, finished: bool = True, **changes: Any) -> Path:
    """A run folder as a run leaves it: a log line every 10 steps, an evaluation every 50."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        dump_config(load_config(None, {"nproc": 1, "task": "text-classification"} | changes))
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(10, steps + 1, 10):
            how_far = {"step": step, "epoch": step / 50, "samples": step * 32}
            logged = {"loss": math.exp(-step / 50), "lr": 1e-3 * (1 - step / steps), "samples_per_second": 200.0,
                      "peak_memory_bytes": 2**28, "grad_norm": None if step == 20 else 1.5}  # fmt: skip
            file.write(json.dumps(how_far | {f"train/{name}": value for name, value in logged.items()}) + "\n")
            if step % 50 == 0:
                found = {"loss": 0.5, "accuracy": step / 200, "evaluated": 20, "unique": 20, "dataset_size": 20}
                file.write(json.dumps(how_far | {f"eval/{name}": value for name, value in found.items()}) + "\n")
    report = {"steps": steps, "world_size": 1, "train_seconds": 2.5, "samples_per_second": 203.3,
              "peak_memory_bytes": 2**28, "metrics": {"loss": "min", "accuracy": "max"},
              "evaluation": {"loss": 0.2, "accuracy": 0.9, "dataset_size": 20}}  # fmt: skip
    if finished:
        (folder / "report.json").write_text(json.dumps(report))
    return folder


def write_predictions(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two finished runs and one that was stopped, in ``runs``, which is in the current folder; 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_run(Path("runs/first"))
    write_run(Path("runs/second"), 60, lr=3e-4)
    write_run(Path("runs/stopped"), 40, finished=False, lr=1e-2)
    predicted = [("good", "good"), ("good", "bad"), ("bad", "bad"), ("so so", "good")]
    rows = [{"index": n, "label": label, "prediction": found} for n, (label, found) in enumerate(predicted)]
    write_predictions(Path("runs/first"), *rows)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines of the report, without colors."""
    assert main(["report", *arguments]) == 0
    return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()


def test_one_run_in_the_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "runs/first")
    assert lines[0].startswith("first: task text-classification, global batch size 32, strategy single, ")
    assert re.fullmatch(r"curve +steps 10 to 100 +last +least +most", lines[2])
    assert re.fullmatch(r"train loss +█[█▇▆▅▄▃▂▁]+▁ +0\.1353 +0\.1353 +0\.8187", lines[3])
    assert re.fullmatch(r"eval loss +▄+ +0\.5 +0\.5 +0\.5", lines[4])
    names = [line.split("  ")[0] for line in lines[5:10]]
    assert names == ["accuracy", "learning rate", "gradient norm", "samples/s", "peak memory, MiB"]
    assert " ".join(lines[11].split()) == "run loss ↓ accuracy ↑ samples/s training s peak MiB/rank"
    table = [line.split() for line in lines[15:19]]
    assert table == [["class", "bad", "good", "so", "so"], ["bad", "1", "0", "0"], ["good", "1", "1", "0"],
                     ["so", "so", "0", "1", "0"]]  # fmt: skip
    assert max(map(len, lines[1:])) <= 80


def test_several_runs_stand_below_each_other_and_their_configs_beside(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, "runs")
    losses = [line.split()[:3] for line in lines if line.startswith("train loss")]
    assert [words[2] for words in losses] == ["first", "second", "stopped"]
    (stopped,) = (line for line in lines if line.startswith("train loss") and "stopped" in line)
    (first,) = (line for line in lines if line.startswith("train loss") and "first" in line)
    assert stopped.count("▁") < len(re.findall("[▁-█]", first))
    assert len(re.findall("[▁-█]", stopped)) < len(re.findall("[▁-█]", first))  # it ends earlier on the same axis
    settings = [line.split() for line in lines if line.startswith(("first ", "second ")) and line.split()[-1] != "256"]
    assert [words[-1] for words in settings] == ["auto", "0.0003"]
    assert "stopped: not finished, it has no report.json" in lines
    assert max(len(line) for line in lines if not line.startswith(("first: ", "second: ", "stopped: "))) <= 80


def test_the_page_works_alone_and_has_curves_tables_and_answers(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "runs", "--html", "pages/report.html")[-1] == "report: pages/report.html"
    text = Path("pages/report.html").read_text()
    assert not re.search(r"<script|https?://|<link|<img|@import|url\(", text)
    page: Any = lxml.document_fromstring(text)
    titles = [title.text_content() for title in page.findall(".//h2")]
    assert titles == [
        "loss, of evaluations dashed", "accuracy", "learning rate", "gradient norm", "samples/s", "peak memory, MiB",
        "first: rows by class, and what they were predicted as",
    ]  # fmt: skip
    charts = page.findall(".//svg")
    assert len(charts) == 6
    assert len(charts[0].findall("path")) == 5  # training of three runs, evaluation of two
    assert [path.get("class") for path in charts[1].findall("path")] == ["curve a", "curve b"]
    for chart in charts:
        width, height = map(int, chart.get("viewbox").split()[2:])
        places = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", "".join(path.get("d") for path in chart.findall("path")))
        assert places
        assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in places)
    counts = [[cell.text_content() for cell in row] for row in page.findall(".//table")[1].findall(".//tr")]
    assert counts[1:] == [["bad", "1", "0", "0"], ["good", "1", "1", "0"], ["so so", "0", "1", "0"]]


def test_a_name_is_text_and_no_html(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("runs/<b>x"))
    write_predictions(Path("runs/<b>x"), {"index": 0, "prompt": "<script>", "generated": "a & b"})
    shown(capsys, "runs/<b>x", "--html", "page.html")
    text = Path("page.html").read_text()
    assert "<b>" not in text
    assert "<td>&lt;script&gt;</td><td>a &amp; b</td>" in text


def test_a_run_of_a_sweep_keeps_its_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("runs/betas=[0.9,0.98]"))
    lines = shown(capsys, "runs/first", "runs/betas=[0.9,0.98]")
    assert any(re.search(r"^train loss +betas=\[0\.9,0\.98\] ", line) for line in lines)


def test_what_is_not_finite_is_left_out_of_its_curve(runs: Path) -> None:
    lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    (norm,) = [chart for chart in charts_of([lines]) if chart.title == "gradient norm"]
    assert [step for step, _ in norm.curves[0].points][:3] == [10, 30, 40]


def test_memory_is_in_mib(runs: Path) -> None:
    lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    (memory,) = [chart for chart in charts_of([lines]) if chart.title == "peak memory, MiB"]
    assert {value for _, value in memory.curves[0].points} == {256.0}


def test_many_points_become_means_and_keep_their_ends() -> None:
    points = [(step, float(step)) for step in range(10 * MOST_POINTS)]
    few = thinned(points)
    assert len(few) == MOST_POINTS
    assert few[0] == (4.5, 4.5)
    assert few[-1][0] == pytest.approx(10 * MOST_POINTS - 5.5)


def test_a_sparkline_begins_and_ends_where_its_curve_does() -> None:
    assert sparkline([(1, 0.0), (2, 1.0), (4, 0.5)], (1, 4), 4) == "▁██▅"
    assert sparkline([(3, 2.0)], (1, 4), 4) == "  ▄"


def test_samples_of_a_language_model_are_its_texts(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"index": n, "prompt": f"say {n}", "generated": f"word\n{n}", "loss": 0.25} for n in range(9)]
    write_predictions(Path("runs/second"), *rows)
    lines = shown(capsys, "runs/second", "--html", "page.html")
    assert "second: the first answers of the final test" in lines
    assert any(line.split() == ["generated", "word", "0"] for line in lines)
    assert "<td>0</td><td>say 0</td><td>word\n0</td><td>0.2500</td>" in Path("page.html").read_text()


def test_tags_of_words_are_counted_word_by_word_and_several_classes_of_a_row_are_not(tmp_path: Path) -> None:
    write_predictions(tmp_path, {"label": ["O", "O", "B", None], "prediction": ["O", "B", "B", None]})
    tags = answers_of(tmp_path)
    assert tags == Confusion(classes=("B", "O"), counts=((1, 0), (1, 1)), skipped_fraction=0)
    write_predictions(tmp_path, {"label": ["x", "y"], "prediction": ["x", "z"]})
    assert isinstance(answers_of(tmp_path), list)
    write_predictions(tmp_path, {"label": 3.5, "prediction": 3.1})
    assert answers_of(tmp_path) == [{"label": "3.5000", "prediction": "3.1000"}]


def test_of_very_many_classes_those_with_most_rows_are_shown(tmp_path: Path) -> None:
    rows = [{"label": n, "prediction": 0} for n in range(30) for _ in range(1 + (n % 2))]
    write_predictions(tmp_path, *rows)
    found = answers_of(tmp_path)
    assert isinstance(found, Confusion)
    assert (len(found.classes), found.skipped_fraction) == (MOST_CLASSES, 10)


def test_a_last_line_that_is_being_written_is_left_out(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("runs/stopped/metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "train/lo')
    assert any("steps 10 to 40" in line for line in shown(capsys, "runs/stopped"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("runs/frist", "report runs/frist: no such folder; give run folders"),
        ("empty", "report empty: no run folder: it has no config.yaml; give run folders"),
        ("runs/young", "report runs/young: no step is logged yet; --follow waits for it"),
        ("runs/damaged", r"runs/damaged/metrics.jsonl, line 3: damaged, expected a JSON object with a step: 'what\?'"),
        ("runs/answers", "runs/answers/predictions.jsonl, line 2: damaged, expected a JSON object: '3'"),
        ("runs/listed", "runs/listed/report.json: cannot be read: expected a JSON object"),
        ("runs/first --html empty", "--html empty: is a folder, expected a file to write, such as empty/report.html"),
        ("runs/first --html runs/first/config.yaml/x", "--html runs/first/config.yaml/x: cannot be written: .+"),
        ("runs/first --htlm x", r"unknown flag '--htlm' \(did you mean '--html'\?\); .*"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    (runs / "empty").mkdir()
    write_run(runs / "runs/young", steps=0, finished=False)
    lines = write_run(runs / "runs/damaged") / "metrics.jsonl"
    kept = lines.read_text().splitlines()
    lines.write_text("\n".join([*kept[:2], "what?", *kept[3:]]) + "\n")
    (write_run(runs / "runs/listed") / "report.json").write_text("[1]")
    (write_run(runs / "runs/answers") / "predictions.jsonl").write_text('{"label": 1, "prediction": 1}\n3\n')
    assert main(["report", *arguments.split()]) == 2
    assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)


def test_a_report_does_not_wait_for_torch(runs: Path) -> None:
    program = (
        "import sys; from distcore.cli.main import main; code = main(['report', 'runs', '--html', 'page.html']); "
        "print([name for name in ('torch', 'transformers', 'sklearn') if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_following_ends_when_the_run_has_its_report(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, looks = hold(runs / "runs/stopped/config.yaml"), []
    console = Console(width=80, force_terminal=True, file=(runs / "screen").open("w"))

    def pause(_: float) -> None:
        looks.append(time.monotonic())
        if len(looks) == 1:
            with Path("runs/stopped/metrics.jsonl").open("a") as file:
                file.write('{"step": 990, "train/loss": 0.01}\n')
        elif len(looks) == 2:
            Path("runs/stopped/report.json").write_text("{}")
        elif held is not None:
            held.close()

    monkeypatch.setattr("distcore_workbench.report.live.time.sleep", pause)
    live.follow([runs / "runs/stopped"], console)
    console.file.close()
    assert len(looks) == 3  # a report beside a run that goes on is that of before its resume
    screen = (runs / "screen").read_text()
    assert "steps 10 to 40" in screen
    assert "steps 10 to 990" in screen


def test_a_run_that_nobody_works_on_any_more_is_not_waited_for(runs: Path) -> None:
    began = time.monotonic()
    live.follow([runs / "runs/stopped"], Console(), grace=0.1)
    assert time.monotonic() - began < 10


def test_ctrl_c_ends_following_in_one_line(runs: Path) -> None:
    held = hold(runs / "runs/stopped/config.yaml")
    command = [sys.executable, "-m", "distcore", "report", "runs/stopped", "--follow"]
    environment = os.environ | {"TTY_COMPATIBLE": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore Ctrl-C
    ) as child:  # fmt: skip
        assert child.stdout
        assert "curve" in "".join(child.stdout.readline() for _ in range(2))
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=30)
    assert (child.returncode, error) == (130, "interrupted\n")
    assert held
