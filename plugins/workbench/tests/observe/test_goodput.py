"""Goodput: where the time of a run went, over all of its attempts, adds up to the clock."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from run_folders import write_run
from text_task import TEXTS

from distcore import RankError, launch, load_config, train
from distcore.cli.main import main
from distcore_workbench.observe.goodput import KINDS, Goodput, goodput_of
from distcore_workbench.observe.observe import waited
from distcore_workbench.observe.times import FILE, attempts_of

CONFIG = {
    "task": TEXTS,
    "max_steps": 30,
    "global_batch_size": 8,
    "device": "cpu",
    "log_every": 2,
    "log_level": "error",
    "save_every": 10,
    "eval_every": 10,
    "out": "run",
    "checkpoints.best": None,
    "checkpoints.asynchronous": False,  # a rank that is killed soon after a save would lose it
    "extensions.progress": False,
    "extensions.observe": True,
}
KILLED = """
import os
import signal
from time import sleep
from distcore import hookimpl

class Killed:
    @hookimpl
    def on_step_end(self, run, progress):
        sleep(0.05)
        if progress.step == 17 and run.world.is_main:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ranks
def test_a_run_that_was_killed_and_resumed_adds_up_to_the_clock(
    work_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (work_folder / "killed.py").write_text(KILLED)
    began = time.time()
    with pytest.raises(RankError):
        launch(train, load_config(None, CONFIG | {"extensions.killed.py:Killed": True}), nproc=1)
    time.sleep(1)
    caplog.set_level(logging.INFO, "distcore")
    train(load_config(None, CONFIG | {"resume": "auto", "log_level": "info"}))
    clock = time.time() - began
    goodput = goodput_of(Path("run"))
    assert goodput is not None
    assert goodput.attempts == 2
    first, second = attempts_of(Path("run"))
    assert [(attempt[0].step, attempt[-1].event) for attempt in (first, second)] == [
        (0, "log"),
        (10, "end"),
    ]
    assert first[-1].step == 16
    for attempt in (first, second):
        for moment in attempt[1:]:
            assert sum(moment.seconds.values()) == pytest.approx(
                moment.at - attempt[0].at, rel=0.01
            )
    assert goodput.clock == pytest.approx(second[-1].at - first[0].at, rel=0.01)
    assert goodput.clock <= clock
    assert 1 <= goodput.seconds["not running"] == pytest.approx(second[0].at - first[-1].at)
    assert 6 * 0.05 <= goodput.seconds["lost"] < first[-1].at - first[0].at
    assert min(goodput.seconds[kind] for kind in KINDS if kind != "waiting for ranks") > 0
    assert str(goodput) in caplog.text


LINES = """
{"event": "start", "at": 100, "step": 0}
{"event": "log", "at": 120, "step": 10, "seconds": {"starting": 5, "step": 15}, "waited": 2}
{"event": "checkpoint", "at": 130, "step": 10, "seconds": {"starting": 5, "step": 15, "save": 10}, "waited": 2}
{"event": "log", "at": 150, "step": 20, "seconds": {"starting": 5, "step": 35, "save": 10}, "waited": 5}
{"event": "lo
{"event": "start", "at": 160, "step": 10}
{"event": "evaluation", "at": 190, "step": 20, "seconds": {"starting": 6, "data": 4, "evaluation": 20}, "waited": 0}
{"event": "start", "at": 190, "step": 10}
{"event": "end", "at": 200, "step": 20, "seconds": {"starting": 5, "step": 5}, "waited": 1}
"""  # noqa: E501


def test_steps_that_a_later_attempt_repeated_are_lost_time(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(LINES.strip())
    goodput = goodput_of(tmp_path)
    assert goodput is not None
    assert goodput.seconds == {
        "training": 15 - 2 + 5 - 1,
        "evaluating": 0,
        "saving": 10,
        "starting": 16,
        "waiting for ranks": 3,
        "lost": 20 + 24,
        "not running": 10,
    }
    assert goodput.clock == 100
    assert (
        str(goodput)
        == "time: 0:01:40 in 3 attempts: training 17.0%, saving 10.0%, starting 16.0%, waiting for"
        " ranks 3.0%, lost 44.0%, not running 10.0%"
    )


def test_a_run_that_was_not_observed_has_none(tmp_path: Path) -> None:
    assert goodput_of(tmp_path) is None
    (tmp_path / FILE).write_text('{"event": "start", "at": 100, "step": 0}\n')
    assert goodput_of(tmp_path) is None
    assert (
        str(Goodput(attempts=1, seconds={"training": 2.0}))
        == "time: 0:00:02 in 1 attempt: training 100.0%"
    )


def own(data: float, compute: float) -> dict[str, float]:
    return {"data_of_all": data, "compute_of_all": compute}


def test_the_fast_ranks_wait_for_the_slow_one() -> None:
    assert waited({0: own(1.0, 2.0), 1: own(1.0, 4.0)}) == 1.0
    assert waited({0: own(1.0, 2.0)}) == 0.0


def test_a_report_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / FILE).write_text(LINES)
    monkeypatch.setenv("COLUMNS", "400")
    page = tmp_path / "report.html"
    assert (
        main(["report", str(tmp_path / "run"), "--all"])
        == main(["report", str(tmp_path / "run"), "--html", str(page)])
        == 0
    )
    says = "run: time: 0:01:40 in 3 attempts: training 17.0%, "
    assert says in capsys.readouterr().out
    assert says in page.read_text()


SLOW = """
from time import sleep
from distcore import hookimpl

class Slow:
    @hookimpl(wrapper=True)
    def accumulate(self, run):
        sleep(0.1 * run.world.rank)
        return (yield)
"""


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_the_time_that_ranks_wait_is_no_training(work_folder: Path) -> None:
    (work_folder / "slow.py").write_text(SLOW)
    changes = {"strategy": "ddp", "nproc": 2, "max_steps": 10, "extensions.slow.py:Slow": True}
    launch(train, load_config(None, CONFIG | changes), nproc=2)
    goodput = goodput_of(Path("run"))
    assert goodput is not None
    # One of two ranks waits for 0.1 s in each step: mean over ranks.
    assert goodput.seconds["waiting for ranks"] == pytest.approx(10 * 0.1 / 2, rel=0.3)
