"""``distcore report``: what is in run folders, in the terminal and as a page; run
folders are made up.
"""

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
from drawn_pages import drawn_in
from first_line import after_first_line
from rich.console import Console
from run_folders import write_predictions, write_run

from distcore.cli.main import main
from distcore.files import lock_shared
from distcore_workbench.pages.plotly import source
from distcore_workbench.report import live
from distcore_workbench.report.curve_figures import MOST_POINTS, thinned
from distcore_workbench.report.curves import Baseline, Point, charts_of, training_seconds
from distcore_workbench.report.predictions import MOST_CLASSES, Classified, Confusion, answers_of
from distcore_workbench.report.terminal import sparkline

lxml = pytest.importorskip("lxml.html")

LABELS = ("good", "bad", "so so")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two finished runs and one that was stopped, in ``runs``, which is in the
    current folder; 80 columns.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_run(Path("runs/first"))
    write_run(Path("runs/second"), 60, lr=3e-4)
    write_run(Path("runs/stopped"), 40, finished=False, lr=1e-2)
    predicted = [("good", "good"), ("good", "bad"), ("bad", "bad"), ("so so", "good")]
    rows = [
        {"index": n, "label": label, "prediction": guess}
        for n, (label, guess) in enumerate(predicted)
    ]
    write_predictions(Path("runs/first"), *rows)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines of the report, without colors."""
    assert main(["report", *arguments]) == 0
    return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()


def test_a_finished_run_that_was_resumed_has_no_speed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Path("runs/first/report.json")
    report.write_text(
        json.dumps(
            json.loads(report.read_text()) | {"samples_per_second": 0.0, "train_seconds": 0.01}
        )
    )
    lines = shown(capsys, "runs/first", "--all")
    row = next(line for line in lines if line.startswith("first  "))
    assert row.split()[-3:-1] == ["n/a", "n/a"]


def test_a_report_of_one_run_in_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, "runs/first")
    assert lines[0].startswith(
        "first: task text-classification, global batch size 32, strategy single, "
    )
    assert [" ".join(line.split()) for line in lines[2:4]] == [
        "run loss ↓ accuracy ↑",
        "first 0.2000 0.9000",
    ]
    assert [" ".join(line.split()) for line in lines[5:12]] == [
        "first: classification report",
        "class precision recall F1 rows",
        "bad 0.500 1.000 0.667 1",
        "good 0.500 0.500 0.500 2",
        "so so 0.000 0.000 0.000 1",
        "macro avg 0.333 0.500 0.389 4",
        "weighted avg 0.375 0.500 0.417 4",
    ]
    assert [" ".join(line.split()) for line in lines[13:18]] == [
        "first: confusion matrix",
        "class ↓ predicted → bad good so so",
        "bad 1 0 0",
        "good 1 1 0",
        "so so 0 1 0",
    ]
    assert re.fullmatch(r"curve +steps 10 to 100 +last +least +most", lines[19])
    assert re.fullmatch(r"train loss +█[█▇▆▅▄▃▂▁]+▁ +0\.1353 +0\.1353 +0\.8187", lines[20])
    assert re.fullmatch(r"eval loss +▄+ +0\.5 +0\.5 +0\.5", lines[21])
    assert lines[22].startswith("accuracy ")
    assert lines[23:] == ["--all shows the other curves, times and memory"]
    assert max(map(len, lines[1:])) <= 80


def test_all_of_a_report_has_the_other_curves_times_memory_and_wrong_rows(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "index": number,
            "file": "reviews.csv",
            "row": number + 1,
            "label": "good",
            "prediction": prediction,
            "scores": {prediction: 0.5 + number / 20, "none": 0.1},
        }
        for number, prediction in enumerate(["bad", "good", "bad", "so so", "bad", "bad", "bad"])
    ]
    write_predictions(Path("runs/first"), *rows)
    lines = shown(capsys, "runs/first", "--all")
    assert " ".join(lines[2].split()) == "run loss ↓ accuracy ↑ samples/s training s peak MiB/rank"
    start = next(n for n, line in enumerate(lines) if line.startswith("curve "))
    names = [line.split("  ")[0] for line in lines[start + 3 : start + 8]]
    assert names == ["accuracy", "learning rate", "gradient norm", "samples/s", "peak memory, MiB"]
    wrong = lines.index("first: wrong with the most confidence")
    assert [line.split() for line in lines[wrong + 2 : wrong + 8]] == [
        ["index", "6"],
        ["file", "reviews.csv"],
        ["row", "7"],
        ["label", "good"],
        ["prediction", "bad"],
        ["confidence", "0.8000"],
    ]
    answers = answers_of(Path("runs/first"))
    assert isinstance(answers, Classified)
    assert [row["index"] for row in answers.wrong] == ["6", "5", "4", "3", "2"]
    assert max(map(len, lines[1:])) <= 80


def test_the_classification_report_is_that_of_scikit_learn(tmp_path: Path) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    labels = [number * number % 7 for number in range(60)]
    predictions = [number * 3 % 5 for number in range(60)]
    write_predictions(
        tmp_path,
        *(
            {"label": label, "prediction": prediction}
            for label, prediction in zip(labels, predictions, strict=True)
        ),
    )
    answers = answers_of(tmp_path)
    assert isinstance(answers, Classified)
    theirs = metrics.classification_report(labels, predictions, output_dict=True, zero_division=0)
    for of_class in answers.report:
        expected = theirs[of_class.name]
        assert [of_class.precision, of_class.recall, of_class.f1, of_class.rows] == pytest.approx(
            [expected[key] for key in ("precision", "recall", "f1-score", "support")]
        )
    matrix = metrics.confusion_matrix(labels, predictions)
    assert [list(counts) for counts in answers.confusion.counts] == matrix.tolist()


def test_reports_of_several_runs_stand_below_each_other_and_their_configs_beside(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, "runs")
    losses = [line.split()[:3] for line in lines if line.startswith("train loss")]
    assert [words[2] for words in losses] == ["first", "second", "stopped"]
    (stopped,) = (line for line in lines if line.startswith("train loss") and "stopped" in line)
    (first,) = (line for line in lines if line.startswith("train loss") and "first" in line)
    assert stopped.count("▁") < len(re.findall("[▁-█]", first))
    # it ends earlier on the same axis
    assert len(re.findall("[▁-█]", stopped)) < len(re.findall("[▁-█]", first))
    settings = [line.split()[:2] for line in lines if line.startswith(("first ", "second "))]
    assert settings == [["first", "auto"], ["second", "0.0003"]]
    assert lines[0].startswith("3 runs: task text-classification, ")
    assert "stopped: not finished, it has no report.json" in lines
    assert max(map(len, lines[1:])) <= 80


def test_the_page_has_results_and_predictions_first_and_folds_costs_away(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys, "runs", "--html", "pages/report.html") == ["report: pages/report.html"]
    page: Any = lxml.document_fromstring(Path("pages/report.html").read_text())
    headings = [cell.text_content() for cell in page.find(".//table").findall(".//thead//th")]
    assert headings[:4] == ["run", "lr", "loss ↓", "accuracy ↑"]
    titles = [title.text_content() for title in page.findall(".//h2")]
    assert titles == [
        "first: classification report",
        "first: confusion matrix",
        "loss (evaluations: dashed)",
        "accuracy",
        "learning rate",
        "gradient norm",
        "samples/s",
        "peak memory, MiB",
    ]
    (folded,) = page.findall(".//details")
    assert [title.text_content() for title in folded.findall(".//h2")] == titles[4:]
    assert [cell.text_content() for cell in folded.find(".//table").findall(".//thead//th")] == [
        "run", "samples/s", "training s", "peak MiB/rank",
    ]  # fmt: skip
    assert folded.get("open") is None
    assert [button.text_content() for button in page.findall(".//button")] == [
        "first",
        "second",
        "stopped",
    ]
    assert len(page.find_class("plot")) == 6
    (counts,) = page.find_class("shaded")
    cells = [[cell.text_content() for cell in row] for row in counts.findall(".//tr")]
    assert cells[1:] == [["bad", "1", "0", "0"], ["good", "1", "1", "0"], ["so so", "0", "1", "0"]]


def test_curves_of_the_page_have_steps_epochs_and_times(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(capsys, "runs/first", "--html", "report.html")
    drawn = drawn_in(Path("report.html"))
    training, evaluation = drawn["figures"][0]["traces"]
    assert training["name"] == "first"
    assert training["y"] == [float(f"{math.exp(-step / 50):.6g}") for step in range(10, 101, 10)]
    axis = drawn["axes"][training["axis"]]
    assert axis["step"] == list(range(10, 101, 10))
    assert axis["epoch"] == pytest.approx([step / 50 for step in axis["step"]])
    assert axis["seconds"] == pytest.approx([step * 32 / 200 for step in axis["step"]])
    assert drawn["axes"][evaluation["axis"]]["seconds"] == pytest.approx([8, 16])
    # of the learning rate: written once
    assert drawn["figures"][2]["traces"][0]["axis"] == training["axis"]


@pytest.mark.programs  # as long as one
def test_a_page_of_very_many_points_stays_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in range(20):
        write_run(tmp_path / f"runs/{run}", steps=20_000, lr=1e-4 * (run + 1))
    shown(capsys, str(tmp_path / "runs"), "--html", str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").stat().st_size < 1_500_000


def test_a_table_with_more_settings_than_a_screen_has_room_for_is_turned(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "lr": 1e-4,
        "seed": 7,
        "epochs": 2,
        "global_batch_size": 8,
        "eval_every": 3,
        "save_every": 5,
        "log_every": 2,
        "clip.norm": 2.0,
        "task_options.max_seq_len": 64,
        "timeout": 60,
    }
    write_run(Path("runs/other"), 60, True, **settings)
    shown(capsys, "runs/first", "runs/other", "--html", "page.html")
    page: Any = lxml.document_fromstring(Path("page.html").read_text())
    (table,) = page.find_class("turned")
    assert [cell.text_content() for cell in table.findall(".//thead//th")] == [
        "run",
        "first",
        "other",
    ]


def test_a_name_is_text_and_no_html(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("runs/<b>x"))
    write_predictions(Path("runs/<b>x"), {"index": 0, "prompt": "<script>", "generated": "a & b"})
    shown(capsys, "runs/<b>x", "--html", "page.html")
    text = Path("page.html").read_text()
    assert "<b>" not in text.replace(source(), "")
    # plotly.js reads markup
    assert drawn_in(Path("page.html"))["figures"][0]["traces"][0]["name"] == "&lt;b&gt;x"
    page: Any = lxml.document_fromstring(text)
    (table,) = page.find_class("texts")
    assert [cell.text_content() for cell in table.findall(".//td")] == ["0", "<script>", "a & b"]


def test_a_constant_is_a_line_in_the_plot_of_its_metric() -> None:
    common = {"eval/accuracy": 0.5, "eval/majority_accuracy": 0.25}
    lines = [[{"step": 1, **common, "eval/f1": 0.1}], [{"step": 1, **common}]]
    data = [{"lookup_f1": 0.3, "rows": 9}, {"lookup_f1": 0.4}]
    accuracy, f1 = charts_of(lines, data)
    assert (accuracy.title, f1.title) == ("accuracy", "f1")
    assert accuracy.baselines == (Baseline(name="majority accuracy", run=None, value=0.25),)
    lookups = [
        Baseline(name="lookup f1", run=run, value=value) for run, value in [(0, 0.3), (1, 0.4)]
    ]
    assert f1.baselines == tuple(lookups)


def test_each_evaluation_set_has_charts_with_constants_of_its_own() -> None:
    lines = [
        {
            "step": 1,
            "eval/hard/accuracy": 0.5,
            "eval/hard/majority_accuracy": 0.25,
            "eval/easy/accuracy": 0.75,
        }
    ]
    hard, easy = charts_of([lines], [{"easy/lookup_accuracy": 0.5, "easy/rows": 9}])
    assert (hard.title, easy.title) == ("hard/accuracy", "easy/accuracy")
    assert hard.baselines == (Baseline(name="hard/majority accuracy", run=None, value=0.25),)
    assert easy.baselines == (Baseline(name="easy/lookup accuracy", run=None, value=0.5),)


def test_training_time_is_samples_by_speed_and_evaluations_lie_between() -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "samples": 100, "train/samples_per_second": 50.0},
        {"step": 2, "samples": 150, "eval/loss": 1.0},
        {"step": 3, "samples": 200, "train/samples_per_second": 100.0},
        {"step": 4, "samples": 300, "eval/loss": 1.0},
    ]
    assert training_seconds(lines) == [2.0, 2.5, 3.0, 3.0]
    assert training_seconds([{"step": 1, "eval/loss": 1.0}]) == [None]


def test_a_run_of_a_sweep_keeps_its_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("runs/betas=[0.9,0.98]"))
    lines = shown(capsys, "runs/first", "runs/betas=[0.9,0.98]")
    assert any(re.search(r"^train loss +betas=\[0\.9,0\.98\] ", line) for line in lines)


def test_a_value_that_is_not_finite_is_left_out_of_its_curve(runs: Path) -> None:
    lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    (norm,) = [chart for chart in charts_of([lines]) if chart.title == "gradient norm"]
    assert [point.step for point in norm.curves[0].points][:3] == [10, 30, 40]


def test_a_baseline_is_a_level_line_in_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = runs / "runs/first/metrics.jsonl"
    constants = {"eval/accuracy": 0.5, "eval/majority_accuracy": 0.25}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line | constants) + "\n" for line in lines))
    (drawn,) = (line for line in shown(capsys, "runs/first") if line.startswith("majority"))
    assert re.fullmatch(r"majority accuracy +─{5,} +0\.25 +0\.25 +0\.25", drawn)


def test_memory_is_in_mib(runs: Path) -> None:
    lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    (memory,) = [chart for chart in charts_of([lines]) if chart.title == "peak memory, MiB"]
    assert {point.value for point in memory.curves[0].points} == {256.0}


def test_curves_of_many_points_become_means_and_keep_their_ends() -> None:
    points = [Point(step, None, step / 2, float(step)) for step in range(10 * MOST_POINTS)]
    few = thinned(points, MOST_POINTS)
    assert len(few) == MOST_POINTS
    assert few[0] == (4.5, None, 2.25, 4.5)
    assert few[-1][0] == pytest.approx(10 * MOST_POINTS - 5.5)


def test_a_sparkline_begins_and_ends_where_its_curve_does() -> None:
    points = [Point(step, None, None, value) for step, value in [(1, 0.0), (2, 1.0), (4, 0.5)]]
    assert sparkline(points, (1, 4), 4) == "▁██▅"
    assert sparkline([Point(3, None, None, 2.0)], (1, 4), 4) == "  ▄"


def test_samples_of_a_language_model_are_its_texts(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"index": n, "prompt": f"say {n}", "generated": f"word\n{n}", "loss": 0.25}
        for n in range(9)
    ]
    write_predictions(Path("runs/second"), *rows)
    lines = shown(capsys, "runs/second")
    assert "second: the first predictions of the final test" in lines
    assert any(line.split() == ["generated", "word", "0"] for line in lines)
    shown(capsys, "runs/second", "--html", "page.html")
    page: Any = lxml.document_fromstring(Path("page.html").read_text())
    cells = [cell.text_content() for cell in page.find_class("texts")[0].findall(".//td")]
    assert cells[:4] == ["0", "say 0", "word\n0", "0.2500"]


def test_tags_of_words_are_counted_word_by_word_and_several_classes_of_a_row_are_not(
    tmp_path: Path,
) -> None:
    write_predictions(
        tmp_path, {"label": ["O", "O", "B", None], "prediction": ["O", "B", "B", None]}
    )
    tags = answers_of(tmp_path)
    assert isinstance(tags, Classified)
    assert tags.confusion == Confusion(
        classes=("B", "O"), counts=((1, 0), (1, 1)), hidden_classes=0
    )
    write_predictions(tmp_path, {"label": ["x", "y"], "prediction": ["x", "z"]})
    assert isinstance(answers_of(tmp_path), list)
    write_predictions(tmp_path, {"label": 3.5, "prediction": 3.1})
    assert answers_of(tmp_path) == [{"label": "3.5000", "prediction": "3.1000"}]


def test_the_classes_with_most_rows_are_shown_of_very_many(tmp_path: Path) -> None:
    rows = [{"label": n, "prediction": 0} for n in range(30) for _ in range(1 + (n % 2))]
    write_predictions(tmp_path, *rows)
    answers = answers_of(tmp_path)
    assert isinstance(answers, Classified)
    confusion = answers.confusion
    assert (len(confusion.classes), confusion.hidden_classes) == (MOST_CLASSES + 1, 10)
    # The others are one row and one column, so that all rows are counted.
    assert confusion.classes[-1] == "others"
    assert sum(map(sum, confusion.counts)) == len(rows)
    assert len(answers.report) == MOST_CLASSES + 2


def test_a_last_line_that_is_being_written_is_left_out(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("runs/stopped/metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "train/lo')
    assert any("steps 10 to 40" in line for line in shown(capsys, "runs/stopped"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("runs/frist", "report runs/frist: no such folder; give run folders"),
        ("empty", "report empty: no run folder: it has no config.yaml; give run folders"),
        ("runs/young", "report runs/young: no step is logged yet; --follow waits for it"),
        (
            "runs/damaged",
            (
                r"runs/damaged/metrics.jsonl, line 3: damaged, expected a JSON object with a step:"
                r" 'what\?'"
            ),
        ),
        (
            "runs/answers",
            "runs/answers/predictions.jsonl, line 2: damaged, expected a JSON object: '3'",
        ),
        ("runs/listed", "runs/listed/report.json: cannot be read: expected a JSON object"),
        (
            "runs/first --html rows.csv",
            "--html rows.csv: expected the name of a page to write, such as rows.html",
        ),
        (
            "runs/first --html empty",
            "--html empty: is a folder, expected a file to write, such as empty/report.html",
        ),
        (
            "runs/first --html runs/first/config.yaml/x.html",
            "--html runs/first/config.yaml/x.html: cannot be written: .+",
        ),
        ("runs/first --htlm x", r"unknown flag '--htlm' \(did you mean '--html'\?\); .*"),
    ],
)
def test_a_folder_that_cannot_be_reported_is_one_line(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    (runs / "empty").mkdir()
    write_run(runs / "runs/young", steps=0, finished=False)
    lines = write_run(runs / "runs/damaged") / "metrics.jsonl"
    kept = lines.read_text().splitlines()
    lines.write_text("\n".join([*kept[:2], "what?", *kept[3:]]) + "\n")
    (write_run(runs / "runs/listed") / "report.json").write_text("[1]")
    (write_run(runs / "runs/answers") / "predictions.jsonl").write_text(
        '{"label": 1, "prediction": 1}\n3\n'
    )
    assert main(["report", *arguments.split()]) == 2
    assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)


@pytest.mark.programs
def test_a_report_does_not_wait_for_torch(runs: Path) -> None:
    program = (
        "import sys; from distcore.cli.main import main; code = main(['report', 'runs', '--html',"
        " 'page.html']); print([name for name in ('torch', 'transformers', 'sklearn') if name in"
        " sys.modules]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_following_ends_when_the_run_has_its_report(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, looks = lock_shared(runs / "runs/stopped/config.yaml"), []
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


@pytest.mark.programs
def test_ctrl_c_ends_following_in_one_line(runs: Path) -> None:
    held = lock_shared(runs / "runs/stopped/config.yaml")
    command = [sys.executable, "-m", "distcore", "report", "runs/stopped", "--follow"]
    environment = os.environ | {"TTY_COMPATIBLE": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell's background jobs ignore Ctrl-C
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as child:  # fmt: skip
        assert child.stdout
        assert "curve" in "".join(child.stdout.readline() for _ in range(2))
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=30)
    assert (child.returncode, after_first_line(error)) == (130, "interrupted\n")
    assert held
