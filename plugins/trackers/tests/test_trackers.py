"""Trackers: what their own readers find after a run, after one that was stopped and resumed,
and after a failure.
"""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from text_task import TEXTS
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distcore import Evaluation, Progress, RunConfig, Session, load_config, train
from distcore.checkpoint import Checkpoint
from distcore.engine.trainer import load_extensions
from distcore.errors import StoppedError, StrategyError
from distcore_trackers.tracking import Tracker

events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
wandb = pytest.importorskip("wandb")
mlflow = pytest.importorskip("mlflow")

TRACKERS = ("tensorboard", "wandb", "mlflow")
STOP = """
import os, signal
from distcore import hookimpl
class Stop:
    @hookimpl
    def on_log(self, record):
        if record["step"] == 3 and not os.path.exists("stopped"):
            open("stopped", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
"""
LOSSES = {1: 0.5, 2: 0.25}


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a file that ``wandb sync`` uploads: chunks of 32 KiB, each
    with parts of records.
    """
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    raw, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        part += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield messages.Record.FromString(part)
            part = b""


def wandb_found(out: Path) -> dict[str, Any]:
    """Ids of the runs, their config, history and summary as the uploaded files have
    them, older runs first.
    """
    uploaded: dict[str, Any] = {"ids": [], "config": {}, "history": [], "summary": {}}
    for file in sorted(
        out.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime
    ):
        for record in wandb_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                uploaded["ids"].append(record.run.run_id)
                uploaded["config"] |= {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
            elif kind == "history":
                items = {
                    "/".join(item.nested_key) or item.key: item.value_json
                    for item in record.history.item
                }
                uploaded["history"].append({key: json.loads(value) for key, value in items.items()})
            elif kind == "summary":
                items = {
                    "/".join(item.nested_key) or item.key: item.value_json
                    for item in record.summary.update
                }
                uploaded["summary"] |= {key: json.loads(value) for key, value in items.items()}
    return uploaded


def mlflow_client(out: Path) -> Any:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return mlflow.MlflowClient((out / "mlflow").absolute().as_uri())


def mlflow_run(out: Path) -> Any:
    client = mlflow_client(out)
    experiment = client.get_experiment_by_name("distcore")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def steps_in_mlflow(out: Path, metric: str) -> list[int]:
    return [
        point.step
        for point in mlflow_client(out).get_metric_history(mlflow_run(out).info.run_id, metric)
    ]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run with all three trackers: stopped after step 3, and resumed from the
    checkpoint of step 2.
    """
    import work_folder

    folder = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        work_folder.write_rows(folder)
        work_folder.enter(folder, patch)
        Path("stop.py").write_text(STOP)
        config = RunConfig.model_validate(
            {
                "task": TEXTS,
                "task_options": {"data": "rows.json", "model": "bert-tiny"},
                "max_steps": 5,
                "log_every": 1,
                "save_every": 2,
                "out": "run",
                "device": "cpu",
                "extensions": (
                    dict.fromkeys((*TRACKERS, "stop.py:Stop"), True) | {"progress": False}
                ),
            }
        )
        with pytest.raises(StoppedError, match="stopped after step"):
            train(config)
        assert mlflow_run(folder / "run").info.status == "KILLED"
        train(config.model_copy(update={"resume": "run/checkpoints/step-00000002"}))
        yield folder / "run"


@pytest.mark.programs
def test_tensorboard_holds_each_step_once_the_config_the_card_and_the_checkpoints(
    resumed: Path,
) -> None:
    accumulator = events.EventAccumulator(str(resumed / "tensorboard")).Reload()
    assert {
        "train/loss",
        "train/lr",
        "train/peak_memory_bytes",
        "eval/accuracy",
        "test/accuracy",
    } <= set(accumulator.Tags()["scalars"])
    assert [event.step for event in accumulator.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    texts = {tag.removesuffix("/text_summary") for tag in accumulator.Tags()["tensors"]}
    assert {"config", "card/data_sha256", "checkpoints/step-00000005"} <= texts
    (written,) = accumulator.Tensors("card/model/text_summary")
    assert written.tensor_proto.string_val == [b"BertForSequenceClassification"]


def test_a_run_that_begins_anew_replaces_the_curves_of_the_attempt_before_it(
    tmp_path: Path,
) -> None:
    run = made_up_run(tmp_path)
    for losses in ([5.0, 4.0, 3.0], [9.0, 8.0]):  # the first was killed, and had no checkpoint
        attempt = tracker("tensorboard")
        attempt.on_run_start(run, Progress())
        for step, loss in enumerate(losses, 1):
            attempt.on_log(run, {"step": step, "loss": loss})
        attempt._end(finished=False)
    curve = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(point.step, point.value) for point in curve] == [(1, 9.0), (2, 8.0)]


@pytest.mark.programs
@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_the_last_of_attempts_that_begin_anew_is_left_alone(name: str, tmp_path: Path) -> None:
    """The first was killed before its first checkpoint; what it had logged is not that of
    the same step now.
    """
    for rate, losses in ((0.1, [5.0, 4.0, 3.0]), (0.2, [9.0, 8.0])):
        run = made_up_run(tmp_path)
        run.config = run.config.model_copy(update={"lr": rate})
        attempt = tracker(name)
        attempt.on_run_start(run, Progress())
        for step, loss in enumerate(losses, 1):
            attempt.on_log(run, {"step": step, "loss": loss})
        attempt._end(finished=False)
    if name == "mlflow":
        left = mlflow_run(tmp_path)
        points = mlflow_client(tmp_path).get_metric_history(left.info.run_id, "train/loss")
        curve, lr = [(point.step, point.value) for point in points], left.data.params["lr"]
    else:
        deadline = time.monotonic() + 30
        while not (uploaded := wandb_found(tmp_path))["ids"] and time.monotonic() < deadline:
            time.sleep(0.1)  # its service writes on after the run has finished
        assert len(uploaded["ids"]) == 1
        curve = [
            (line["_step"], line["train/loss"])
            for line in uploaded["history"]
            if "train/loss" in line
        ]
        lr = str(uploaded["config"]["lr"])
    assert curve == [(1, 9.0), (2, 8.0)]
    assert lr == "0.2"


@pytest.mark.programs
def test_weights_and_biases_goes_on_under_the_same_id(resumed: Path) -> None:
    uploaded = wandb_found(resumed)
    assert len(uploaded["ids"]) == 2
    assert len(set(uploaded["ids"])) == 1
    steps = [line["_step"] for line in uploaded["history"] if "train/loss" in line]
    assert steps[:2] == [1, 2]
    assert steps[-3:] == [3, 4, 5]
    last = uploaded["history"][-1]
    assert {"train/loss", "train/grad_norm", "eval/accuracy", "test/accuracy"} <= last.keys()
    assert uploaded["config"]["task_options"]["model"] == "bert-tiny"
    newest = resumed / "checkpoints/step-00000005"
    assert Path(uploaded["summary"]["checkpoints/step-00000005"]).resolve() == newest.resolve()
    assert uploaded["summary"]["card/data_sha256"] == Checkpoint(newest).job_state()["data"]


@pytest.mark.programs
def test_mlflow_goes_on_with_the_same_run_and_has_each_step_once(resumed: Path) -> None:
    run = mlflow_run(resumed)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert steps_in_mlflow(resumed, "train/loss") == [1, 2, 3, 4, 5]
    assert steps_in_mlflow(resumed, "test/accuracy") == [5]
    assert run.data.params["task_options.model"] == "bert-tiny"
    assert run.data.tags["card/strategy"] == "single"
    assert "torch " in run.data.tags["card/environment"]
    assert run.data.tags["checkpoints/step-00000005"].endswith("run/checkpoints/step-00000005")


@pytest.mark.programs
def test_every_tracker_has_the_losses_of_the_log_lines(resumed: Path) -> None:
    """Those are means over all items since the line before, which the core's tests hold."""
    lines = [json.loads(line) for line in Path(resumed, "metrics.jsonl").read_text().splitlines()]
    log_lines = [line for line in lines if "train/loss" in line]
    logged = {line["step"]: line["train/loss"] for line in log_lines}

    accumulator = events.EventAccumulator(str(resumed / "tensorboard")).Reload()
    in_tensorboard = {event.step: event.value for event in accumulator.Scalars("train/loss")}
    client, run = mlflow_client(resumed), mlflow_run(resumed)
    points = client.get_metric_history(run.info.run_id, "train/loss")
    in_mlflow = {point.step: point.value for point in points}
    history = [line for line in wandb_found(resumed)["history"] if "train/loss" in line]
    in_wandb = {line["_step"]: line["train/loss"] for line in history}

    assert sorted(logged) == [1, 2, 3, 4, 5]
    assert in_mlflow == logged
    assert in_wandb == logged
    assert in_tensorboard == pytest.approx(logged, rel=1e-6)  # it stores float32


def made_up_run(out: Path) -> Any:
    """The part of a run that a tracker reads."""
    out.mkdir(parents=True, exist_ok=True)
    world = SimpleNamespace(is_main=True)
    return SimpleNamespace(
        config=RunConfig(out=str(out), nproc=1), world=world, module=SimpleNamespace()
    )


def tracker(name: str, **options: Any) -> Tracker:
    loaded = load_extensions(RunConfig.model_validate({"extensions": {name: options or True}}))[
        name
    ]
    assert isinstance(loaded, Tracker)
    return loaded


def tell(listener: Tracker, run: Any) -> None:
    """Have it hear a short run."""
    listener.on_run_start(run, Progress())
    for step, loss in LOSSES.items():
        listener.on_log(run, {"step": step, "loss": loss})
    evaluation = Evaluation(
        outputs={}, metrics={"loss": 0.1}, evaluated=1, unique=1, dataset_size=1
    )
    listener.on_evaluation_end(run, Progress(step=2), evaluation)
    listener.on_checkpoint(run, Progress(step=2), Path(run.config.out, "checkpoints/step-00000002"))
    listener._end(finished=False)


def test_a_loop_of_ones_own_is_recorded(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 16)[:, None]

    def off(model: nn.Module, batch: Any) -> Tensor:
        squares: Tensor = (model(batch[0]) - batch[1]).square()
        return squares[:, 0]

    settings = {
        "out": str(tmp_path), "device": "cpu", "max_steps": 4, "log_every": 1,
        "global_batch_size": 4, "lr": 0.01, "extensions.tensorboard": True,
    }  # fmt: skip
    rows = TensorDataset(x, x.sin())
    with Session(load_config(None, settings), lambda: nn.Linear(1, 1), rows) as session:
        for step in session:
            step.gradients(lambda model, batch: off(model, batch).sum())
            step.apply()
            session.log(own=session.progress.step / 2)
        session.evaluate(rows, off)
    written = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"train/loss", "train/own", "eval/loss"} <= set(written.Tags()["scalars"])
    assert [(event.step, event.value) for event in written.Scalars("train/own")] == [
        (1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0),
    ]  # fmt: skip
    # The checkpoint's card is written at an end that no signal brought.
    assert any(tag.startswith("card/") for tag in written.Tags()["tensors"])


@pytest.mark.parametrize("name", TRACKERS)
def test_ranks_other_than_the_main_one_write_nothing(name: str, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run")
    run.world.is_main = False
    tell(tracker(name), run)
    assert not list((tmp_path / "run").iterdir())


UNREACHABLE = "http://127.0.0.1:9"


def heard_by_pytest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the logger print nothing, though a run of an earlier test has set it
    up for the screen.
    """
    monkeypatch.setattr(logging.getLogger("distcore"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("distcore"), "handlers", [])


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages that distcore logged."""
    return [record.getMessage() for record in caplog.records if record.name == "distcore"]


@pytest.mark.programs
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("tensorboard", {"folder": "occupied/events"}, "Not a directory|File exists|exists"),
        ("wandb", {"project": "no/slashes"}, "project"),
        ("wandb", {"mode": "online"}, "connection refused"),
        ("mlflow", {"uri": "occupied/store"}, "Not a directory|exists"),
        ("mlflow", {"uri": UNREACHABLE}, "127.0.0.1"),
        ("mlflow", {"uri": "nothing://there"}, "nothing"),
    ],
)
def test_a_tracker_that_fails_is_one_line(
    name: str,
    options: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", UNREACHABLE)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    wandb.teardown()  # what an earlier test has set up knows another address
    monkeypatch.setattr("distcore_trackers.wandb.PATIENCE", 2)
    heard_by_pytest_alone(monkeypatch)
    run = made_up_run(tmp_path / "run")
    (tmp_path / "run/occupied").write_text("a file\n")
    tell(tracker(name, **options), run)
    (line,) = messages(caplog)
    assert line.startswith(f"tracker {name}: ")
    assert line.endswith("; the run goes on without it")
    assert re.search(said, line)
    printed = [
        line
        for line in "".join(capfd.readouterr()).splitlines()
        if "Loaded credentials" not in line
    ]
    assert not printed  # no traceback, and none of a thread either


BEGIN_ONLINE = """
import logging
from types import SimpleNamespace
from distcore import Progress, RunConfig
from distcore_trackers.wandb import WeightsAndBiases
logging.getLogger("distcore").addHandler(logging.StreamHandler())
run = SimpleNamespace(config=RunConfig(out="run", nproc=1), world=SimpleNamespace(is_main=True))
WeightsAndBiases(mode="online").on_run_start(run, Progress())
"""


@pytest.mark.programs
def test_a_missing_key_is_one_line_and_no_question_at_a_terminal(tmp_path: Path) -> None:
    without_key = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    home = {"HOME": str(tmp_path), "WANDB_BASE_URL": UNREACHABLE}
    terminal, end_of_child = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", BEGIN_ONLINE],
        cwd=tmp_path,
        env=without_key | home,
        stdin=end_of_child,
        stdout=end_of_child,
        stderr=end_of_child,
        timeout=60,
        check=False,
    )
    printed = os.read(terminal, 10_000).decode()
    assert done.returncode == 0, printed
    assert printed.splitlines() == [
        "tracker wandb: No API key configured. Use `wandb login` to log in; the run goes on"
        " without it"
    ]


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("train/loss", "train/loss"),
        ("eval/recall@1", "eval/recall_1"),
        ("eval/f1 (macro)", "eval/f1 _macro_"),
        ("extensions.../early.py:Shout", "extensions.../early.py_Shout"),
        ("options.https://there/./../x", "options.https_/there/_/__/x"),
        ("eval/" + "a" * 300, "eval/" + "a" * 245),
    ],
)
def test_mlflow_records_under_a_name_that_it_takes(
    name: str, accepted: str, tmp_path: Path
) -> None:
    run = made_up_run(tmp_path)
    listener = tracker("mlflow")
    listener.on_run_start(run, Progress())
    listener.scalars({name: 0.5, "train/lr": 0.1}, 1)  # raises if MLflow refuses the name
    listener._end(finished=True)
    assert mlflow_run(tmp_path).data.metrics == {accepted: 0.5, "train/lr": 0.1}


@pytest.mark.parametrize(
    ("name", "options"), [("tensorboard", {"folder": "disk/x"}), ("mlflow", {"uri": "disk/x"})]
)
def test_a_full_disk_is_one_line(
    name: str,
    options: dict[str, Any],
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    heard_by_pytest_alone(monkeypatch)
    (small_disk / "ballast").write_bytes(bytes(2**21 - 2**14))
    run = made_up_run(tmp_path)
    listener = tracker(name, **options)
    listener.on_run_start(run, Progress())
    for step in range(500):
        listener.on_log(run, {"step": step} | {f"value {number}": 0.5 for number in range(10)})
    listener._end(finished=False)
    (line,) = messages(caplog)
    assert "No space left on device" in line
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_library_that_is_missing_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Python's own way to say that it cannot be imported
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StrategyError, match=rf"extension '{name}': .* pip install {name}"):
        tracker(name)
