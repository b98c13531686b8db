"""``distcore watch`` follows a run by its files alone; run folders are made up."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import write_run

from distcore.cli.main import main
from distcore.files import lock_shared
from distcore_workbench.observe import watch as watching
from distcore_workbench.observe.screen import lines_from, steps_of
from distcore_workbench.observe.times import FILE
from distcore_workbench.observe.watch import watch
from distcore_workbench.report.folders import read

OBSERVED = {
    "train/loss": 0.5,
    "train/samples_per_second": 64.0,
    "train/tokens_per_second": 2000.0,
    "train/mfu": 0.25,
    "train/forward_seconds": 3.0,
    "train/backward_seconds": 1.0,
    "train/peak_memory_max_bytes": 2**30,
    "train/peak_memory_max_rank": 1,
}
RANKS = {
    str(rank): {"peak_memory": 2**30, "data": 0.5, "compute": 1.5 + rank} for rank in range(11)
}


def observed_run(folder: Path, finished: bool = False) -> Path:
    """A run of 11 ranks that is at step 110 of 200."""
    write_run(folder, finished=finished, max_steps=200)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 110, "epoch": 2.2, "samples": 3520} | OBSERVED) + "\n")
    lines: list[dict[str, object]] = [{"event": "start", "at": 100, "step": 0}]
    lines.append(
        {
            "event": "log",
            "at": 120,
            "step": 110,
            "seconds": {"forward": 20},
            "ranks": RANKS,
            "slow": ["rank 7 is slow"],
        }
    )
    (folder / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def grow_old(folder: Path) -> None:
    for file in folder.iterdir():
        os.utime(file, (time.time() - 100,) * 2)


def test_the_screen_is_lines_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observed_run(tmp_path / "run", finished=True)
    assert main(["watch", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 10/200  epoch 0.2  loss 0.8187  200 samples/s  left 0:00:30"
    assert "evaluation at step 50: loss 0.5, accuracy 0.25" in lines
    assert lines[-3:] == [
        (
            "step 110/200  epoch 2.2  loss 0.5000  64 samples/s  2000 tokens/s  MFU 25.0%  rank 1"
            " 1024 MiB  left 0:00:45"
        ),
        "time: 0:00:20 in 1 attempt: training 100.0%",
        "ended",
    ]


def test_a_terminal_has_one_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a screen is too narrow for the path of a test
    console = Console(force_terminal=True, width=100, height=60, record=True)
    observed_run(Path("run"), finished=True)
    with console.capture() as captured:
        watch(Path("run"), console)
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", captured.get())
    assert "run: step 110/200  epoch 2.2  loss 0.5000" in shown
    assert "train loss " in shown
    assert "time: forward 75%, backward 25%" in shown
    ranks = [line.split() for line in shown.splitlines() if re.match(r" *\d+ +1024 ", line)][
        -len(RANKS) :
    ]  # drawn last
    assert [(row[0], row[3]) for row in ranks] == [
        (str(rank), f"{1500 + 1000 * rank:.1f}") for rank in range(11)
    ]
    assert "forward seconds" not in shown
    assert shown.rindex("rank 7 is slow") > shown.rindex("compute ms/step")


def test_the_screen_ends_when_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PAUSE", 0.05)
    folder, console = observed_run(tmp_path / "run"), Console(force_terminal=False, width=200)
    grow_old(folder)
    held = lock_shared(folder / "config.yaml")
    assert held is not None

    def go_on() -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            time.sleep(0.3)
            file.write(json.dumps({"step": 120, "epoch": 2.4, "samples": 3840} | OBSERVED) + "\n")
        time.sleep(0.3)
        (folder / "report.json").write_text("{}")
        held.close()

    thread = threading.Thread(target=go_on)
    thread.start()
    with console.capture() as captured:
        watch(folder, console, grace=0.2)
    thread.join()
    assert captured.get().count("step 110/200") == captured.get().count("step 120/200") == 1
    assert captured.get().endswith("ended\n")


def test_a_run_that_was_killed_ends_too(tmp_path: Path) -> None:
    folder, console = observed_run(tmp_path / "run"), Console(force_terminal=False, width=200)
    grow_old(folder)
    began = time.monotonic()
    with console.capture() as captured:
        watch(folder, console)
    assert time.monotonic() - began < 5
    assert captured.get().endswith("ended without a report: silent for 30 s\n")


def test_the_screen_waits_before_the_first_step(tmp_path: Path) -> None:
    folder, console = (
        write_run(tmp_path / "run", 0, finished=True),
        Console(force_terminal=True, width=300),
    )
    with console.capture() as captured:
        watch(folder, console)
    assert "run: waiting for the first step; Ctrl-C ends" in captured.get()


def test_without_max_steps_the_end_follows_from_the_epochs(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", epochs=4))
    assert steps_of(run, {"step": 30, "epoch": 0.5}) == 240
    assert steps_of(run, {"step": 30}) is None
    assert lines_from(run)[0] == "step 10/200  epoch 0.2  loss 0.8187  200 samples/s  left 0:00:30"


def test_no_run_and_several_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert main(["watch", str(tmp_path)]) == 2
    for name in "ab":
        write_run(tmp_path / name)
    assert main(["watch", str(tmp_path)]) == 2
    (tmp_path / "a/metrics.jsonl").write_text("no line\n")
    assert main(["watch", str(tmp_path / "a")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.search(r"watch \S*nowhere: no such folder; give a run folder", errors[0])
    assert re.search(
        r"watch \S*: no run folder: it has no config.yaml; give a run folder", errors[1]
    )
    assert re.search(r"watch \S*: holds 2 runs; give one of them, such as \S*/a", errors[2])
    assert re.search(
        r"metrics.jsonl, line 1: damaged, expected a JSON object with a step: 'no line'", errors[3]
    )
