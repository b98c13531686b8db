"""Extensions hear a run, or wrap its operations, and change nothing."""

from __future__ import annotations

import json
import re
import signal
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from work_folder import install

from distcore import RankError, RunConfig, registry, train
from distcore.engine.trainer import load_extensions
from distcore.errors import StrategyError, TrainingError
from distcore.extensions.progress import ProgressLine, describe, describe_evaluation, time_left
from distcore.files import is_locked

pytestmark = pytest.mark.programs  # its runs are whole ones

WATCH = '''
from dataclasses import dataclass
from pathlib import Path
from distcore import hookimpl

@dataclass
class Watch:
    file: str = "events.txt"
    """Where the events go."""

    def tell(self, *words):
        with Path(self.file).open("a") as out:
            print(*words, file=out)

    @hookimpl
    def on_run_start(self, run): self.tell("start", run.total_steps)
    @hookimpl
    def on_step_end(self, progress): self.tell("step", progress.step)
    @hookimpl
    def on_log(self, record): self.tell("log", record["step"])
    @hookimpl
    def on_evaluation_end(self, progress): self.tell("evaluation", progress.step)
    @hookimpl
    def on_checkpoint(self, progress): self.tell("checkpoint", progress.step)
    @hookimpl
    def on_run_end(self, report): self.tell("end", report["steps"])
'''


@pytest.fixture
def config(work_folder: Path) -> RunConfig:
    """Two quick steps over 40 rows, in the current folder."""
    return RunConfig(
        task_options={"data": "rows.json", "model": "bert-tiny"},
        max_steps=2,
        log_every=1,
        out="run",
        device="cpu",
    )


def with_extensions(config: RunConfig, **extensions: Any) -> RunConfig:
    return RunConfig.model_validate(config.model_dump() | {"extensions": extensions})


def lines_of(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


@pytest.mark.needs("distcore-tasks")
def test_a_users_extension_from_a_file_hears_all_events_in_order(config: RunConfig) -> None:
    Path("mine.py").write_text(WATCH)
    train(with_extensions(config, **{"mine.py:Watch": {"file": "heard.txt"}}))
    assert Path("heard.txt").read_text().splitlines() == [
        "start 2",
        "step 1",
        "log 1",
        "step 2",
        "log 2",
        "evaluation 2",
        "checkpoint 2",
        "end 2",
    ]


@pytest.mark.needs("distcore-workbench", "distcore-tasks")
def test_naming_one_extension_leaves_the_default_ones_on(config: RunConfig) -> None:
    loaded = load_extensions(with_extensions(config, nan_guard=True))
    on = ["metrics", "batch_norm", "observe", "watchdog"]
    assert list(loaded) == ["progress", *on, "nan_guard"]
    assert list(load_extensions(with_extensions(config, progress=False))) == on


def test_extensions_that_distributions_name_are_on_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTCORE_LOAD_PLUGINS", "other")
    assert list(RunConfig().extensions) == ["progress", "metrics"]
    (tmp_path / "site").mkdir()
    groups = ("extensions", "default_extensions")
    install(
        tmp_path / "site",
        "other",
        "".join(f"[distcore.{group}]\nloud = other:Loud\n" for group in groups),
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert RunConfig().extensions == dict.fromkeys(("loud", "metrics", "progress"), True)
    assert RunConfig.model_validate({"extensions": {"loud": False}}).extensions["loud"] is False
    assert "other" not in sys.modules
    monkeypatch.setenv("DISTCORE_BLOCK_PLUGINS", "loud")
    assert "loud" not in RunConfig().extensions


@pytest.mark.needs("distcore")
def test_a_default_extension_that_is_named_where_it_is_missing_is_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = [
        entry
        for entry in registry.all_offers("extensions")
        if entry.name in ("progress", "metrics")
    ]
    monkeypatch.setattr(registry, "all_offers", lambda group: core if group == "extensions" else [])
    load_extensions(RunConfig())
    named = RunConfig.model_validate({"extensions": {"watchdog": {"limit": 300}}})
    with pytest.raises(
        StrategyError,
        match=r"^no extension named 'watchdog' .*Install it with: pip install .*workbench",
    ):
        load_extensions(named)


def test_every_shipped_extension_documents_its_options() -> None:
    from distcore.plugin.options import options_of

    for name in registry.entries("extensions"):
        options = options_of(registry.load("extensions", name))
        assert options or name == "batch_norm", name
        assert all(option.doc and option.default for option in options), name


@pytest.mark.needs("distcore-trackers", "distcore-workbench")
def test_extensions_do_not_change_the_weights(config: RunConfig) -> None:
    quiet = with_extensions(config, progress=False, metrics=False).model_copy(
        update={"out": "quiet"}
    )
    trackers: dict[str, Any] = dict.fromkeys(("tensorboard", "wandb", "mlflow"), True)
    loud = with_extensions(config, nan_guard=True, **trackers).model_copy(update={"out": "loud"})
    assert train(quiet)["evaluation"]["loss"] == train(loud)["evaluation"]["loss"]


@pytest.mark.needs("distcore-tasks")
def test_metrics_has_a_line_for_each_logged_step_and_each_evaluation(config: RunConfig) -> None:
    report = train(with_extensions(config, observe=False))
    first, second, evaluation = lines_of("run/metrics.jsonl")
    logged = {
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "train/samples_per_second",
        "train/peak_memory_bytes",
    }
    assert set(first) == {"step", "epoch", "samples", *logged}
    assert (second["step"], second["samples"]) == (2, report["samples"])
    texts = {"classification_report", "remark"}
    numbers = {name: value for name, value in report["evaluation"].items() if name not in texts}
    assert evaluation == {
        **{key: second[key] for key in ("step", "epoch", "samples")},
        **{f"eval/{name}": value for name, value in numbers.items()},
    }
    assert 0 < first["epoch"] < second["epoch"] == 1


@pytest.mark.needs("distcore-tasks")
def test_metrics_has_each_step_once_after_a_resume_from_an_older_checkpoint(
    config: RunConfig,
) -> None:
    longer = config.model_copy(update={"max_steps": 4, "save_every": 2})
    train(longer)
    first = lines_of("run/metrics.jsonl")
    with Path("run/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/lo')  # as a run that was killed while it wrote leaves it
    train(longer.model_copy(update={"resume": "run/checkpoints/step-00000002"}))
    lines = lines_of("run/metrics.jsonl")
    assert [line["step"] for line in lines] == [line["step"] for line in first]
    speed = "train/samples_per_second"
    assert [line.get(speed) == old.get(speed) for line, old in zip(lines, first, strict=True)] == [
        line["step"] <= 2 or speed not in line for line in lines
    ]


@pytest.mark.needs("distcore-tasks")
def test_metrics_has_each_step_once_after_a_kill_and_a_resume_from_an_older_checkpoint(
    config: RunConfig,
) -> None:
    Path("kills.py").write_text(
        "import os, signal\nfrom distcore import hookimpl\n"
        "class Kills:\n    @hookimpl(trylast=True)\n    def on_log(self, record):\n"
        "        if record['step'] == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    longer = config.model_copy(update={"max_steps": 6, "save_every": 2})
    child = get_context("fork").Process(
        target=train, args=(with_extensions(longer, **{"kills.py:Kills": True}),)
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    logged = [line["step"] for line in lines_of("run/metrics.jsonl") if "train/loss" in line]
    assert logged == [1, 2, 3, 4, 5]
    train(longer.model_copy(update={"resume": "run/checkpoints/step-00000002"}))
    logged = [line["step"] for line in lines_of("run/metrics.jsonl") if "train/loss" in line]
    assert logged == [1, 2, 3, 4, 5, 6]


@pytest.mark.needs("distcore-tasks")
def test_a_run_holds_its_folder_as_long_as_it_lives(config: RunConfig) -> None:
    Path("looks.py").write_text(
        "from pathlib import Path\nfrom distcore import hookimpl\nfrom distcore.files import"
        " is_locked\nclass Looks:\n    @hookimpl\n    def on_log(self):\n       "
        " Path('held.txt').write_text(str(is_locked(Path('run/config.yaml'))))\n"
    )
    train(with_extensions(config, **{"looks.py:Looks": True}))
    assert Path("held.txt").read_text() == "True"
    assert not is_locked(Path("run/config.yaml"))


@pytest.mark.needs("distcore-tasks")
def test_metrics_keeps_its_lines_until_a_resumed_run_has_one_of_its_own(config: RunConfig) -> None:
    longer = config.model_copy(update={"max_steps": 4, "save_every": 2})
    train(longer)
    before = lines_of("run/metrics.jsonl")
    Path("ends.py").write_text(
        "from distcore import hookimpl\n"
        "class Ends:\n    @hookimpl\n    def on_step_end(self): raise ValueError('at once')\n"
    )
    again = with_extensions(longer, **{"ends.py:Ends": True}).model_copy(
        update={"resume": "run/checkpoints/step-00000002"}
    )
    with pytest.raises(RankError, match=r"^ValueError: at once; "):
        train(again)
    assert lines_of("run/metrics.jsonl") == before


@pytest.mark.needs("distcore-tasks")
def test_metrics_writes_null_for_what_is_not_a_number(config: RunConfig) -> None:
    with pytest.raises(TrainingError, match="the loss is not finite since step 2"):
        train(
            config.model_copy(
                update={"lr": 1e30, "clip": config.clip.model_copy(update={"norm": None})}
            )
        )
    losses = [line["train/loss"] for line in lines_of("run/metrics.jsonl") if "train/loss" in line]
    assert any(loss is None or loss > 10 for loss in losses)


@pytest.mark.needs("distcore-tasks")
def test_progress_writes_plain_lines_to_a_file(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config)
    lines = capsys.readouterr().err.splitlines()
    # The logger has lines of its own, where another test of this process has set it up.
    first, second, evaluation = (
        line for line in lines if line.startswith(("step ", "evaluation "))
    )
    assert first.startswith("step 1/2  epoch 0.5  loss 0.")
    assert "  lr " in second
    assert "samples/s  " in second
    assert second.endswith(" tokens/s  eta 0:00:00")
    assert evaluation.startswith("evaluation at step 2: loss 0.")
    assert evaluation.endswith("evaluated 4 of 4")


@pytest.mark.needs("distcore-tasks")
def test_progress_redraws_one_line_on_a_terminal(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    train(config)
    screen = capsys.readouterr().err
    assert "\x1b[2K" in screen  # erases what it draws again
    assert "step 2/2" in screen
    assert screen.rstrip().endswith("\x1b[?25h")  # leaves the cursor visible


class FewColumns:
    """The part of a run that the progress line reads: step 120 of 630, in batches of 32 rows."""

    total_steps = 630
    config = RunConfig(global_batch_size=32)

    class world:
        is_main = True


RECORD = {
    "step": 120,
    "epoch": 1.904761,
    "loss": 0.41234,
    "lr": 0.000412,
    "samples_per_second": 213.4,
}


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (120, "step 120/630  epoch 1.9  loss 0.4123  lr 0.000412  213 samples/s  eta 0:01:16"),
        (80, "step 120/630  epoch 1.9  loss 0.4123  lr 0.000412  213 samples/s  eta 0:01:16"),
        (60, "step 120/630  loss 0.4123  213 samples/s  eta 0:01:16"),
        (44, "step 120/630  213 samples/s  eta 0:01:16"),
    ],
)
def test_a_narrow_screen_keeps_speed_and_time_left(
    columns: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    progress, run = ProgressLine(), FewColumns()
    progress.on_run_start(run)  # type: ignore[arg-type]
    progress.on_log(run, RECORD)  # type: ignore[arg-type]
    progress.on_run_end(run, {})  # type: ignore[arg-type]
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", capsys.readouterr().err).splitlines()
    drawn = [text.strip() for text in shown if "step" in text]
    assert drawn
    assert all(text.endswith(line) and text.startswith("━") == (columns == 120) for text in drawn)
    assert all(len(text.rstrip()) <= columns for text in shown)


def test_the_line_has_the_further_speeds_of_a_record() -> None:
    more = RECORD | {"tokens_per_second": 12345.6, "mfu": 0.4567}
    assert "  213 samples/s  12346 tokens/s  MFU 45.7%  eta " in describe(FewColumns(), more)  # type: ignore[arg-type]


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_a_loss_that_is_not_finite_is_said_once(
    terminal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    monkeypatch.setenv("COLUMNS", "400")
    progress, run = ProgressLine(), FewColumns()
    progress.on_run_start(run)  # type: ignore[arg-type]
    for loss in (0.4, float("nan"), float("inf")):
        progress.on_log(run, RECORD | {"loss": loss})  # type: ignore[arg-type]
    progress.on_run_end(run, {})  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert err.count("the loss is ") == err.count("the loss is nan: try a lower lr (--lr), ") == 1


def test_the_time_left_follows_the_speed(config: RunConfig) -> None:
    class Half:
        total_steps = 120
        config = RunConfig(global_batch_size=32)

    assert time_left(Half(), 60, 32.0) == "0:01:00"  # type: ignore[arg-type]
    assert time_left(Half(), 60, 0.0) == "-:--:--"  # type: ignore[arg-type]


def test_an_evaluation_is_one_line() -> None:
    summary = {
        "loss": 0.4123,
        "accuracy": 0.8734,
        "report": "long",
        "evaluated": 320,
        "unique": 320,
        "dataset_size": 320,
    }
    assert (
        describe_evaluation("evaluation at step 120", summary)
        == "evaluation at step 120: loss 0.412, accuracy 0.873, evaluated 320 of 320"
    )


def test_a_folder_of_data_is_no_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a script, Python would import it as an empty package."""
    (tmp_path / "folder_of_rows").mkdir()
    (tmp_path / "words.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not registry.is_installed("folder_of_rows")
    assert registry.is_installed("words")
