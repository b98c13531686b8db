"""``distcore tune`` with real trials: what is thrown out, what survives, how it goes on,
and what it refuses.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from text_task import TEXTS
from work_folder import STRANGERS, enter, install, write_rows

from distcore.cli.main import main
from distcore_workbench.tuning import bench, racing, settings, tune
from distcore_workbench.tuning.candidates import TuneRequest

JOB = (
    "tune",
    "--task",
    TEXTS,
    "--data",
    "rows.json",
    "--set",
    "device=cpu",
    "--global-batch-size",
    "8",
)
ODD = """
import os, signal
from dataclasses import dataclass
from typing import ClassVar
from distcore import defaults, hookimpl
from distcore.strategies.single import SingleStrategy

@dataclass(frozen=True, kw_only=True)
class Odd(SingleStrategy):
    tunes: ClassVar = ({"factor": 2.0}, {"dies": True}, {"hangs_up": True})
    factor: float = 1.0
    dies: bool = False
    hangs_up: bool = False

    @hookimpl
    def backward(self, run, loss):
        (loss * self.factor).backward()
        return loss.detach()

    @hookimpl
    def step(self, run, clip):
        if self.dies: os.kill(os.getpid(), signal.SIGKILL)
        if self.hangs_up: raise MemoryError
        return defaults.step(run, clip)
"""
"""A stranger's strategy: a gradient that is twice too large, which AdamW hides in the loss, and
two ways to die.
"""


def trials(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()][1:]


@pytest.mark.needs("distcore-ddp")
@pytest.mark.parametrize(
    ("changes", "own", "most"),
    [
        ({"nproc": 2}, 1, 2),
        ({"nproc": 4, "strategy": "single"}, 1, 4),
        ({"nproc": 2, "strategy": "ddp"}, 2, 2),
        ({"nproc": 1}, 1, None),
        ({}, "auto", None),
    ],
)
def test_the_ranks_that_are_asked_for_bound_what_is_tried(
    changes: dict[str, Any], own: int | str, most: int | None, tmp_path: Path
) -> None:
    """A job whose own strategy runs in one process, as the default one, was refused."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({"task": "tasks.py:Mine", **changes}))
    for config, given in ((None, changes), (str(file), {})):
        request = TuneRequest(
            config=config,
            changes=given,
            budget=1.0,
            strategies="",
            fit_only=False,
            json=False,
            out=None,
        )
        alone, most_ranks = tune.ranks_of(request)
        assert (alone.load().nproc, most_ranks) == (own, most)


@pytest.mark.slow
@pytest.mark.programs
def test_wrong_mathematics_and_dead_trials_are_thrown_out_and_the_tune_goes_on(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (work_folder / "odd.py").write_text(ODD)
    install(work_folder, "distcore-odd", "[distcore.strategies]\nodd = odd:Odd\n")
    monkeypatch.syspath_prepend(work_folder)
    monkeypatch.setenv("PYTHONPATH", str(work_folder))
    monkeypatch.setenv("DISTCORE_LOAD_PLUGINS", "distcore-odd,distcore-workbench")
    monkeypatch.setattr(bench, "SECONDS", {"screen": 0.1, "final": 0.1})
    axes = settings.axes
    # On a slow machine, too, there is time for all of the first axis.
    monkeypatch.setattr(settings, "axes", lambda *given: axes(*given)[:1])
    monkeypatch.setattr(racing, "ROUNDS", 1)
    command = [*JOB, "--budget", "9", "--out", "t", "--seed", "3"]
    assert main(command) == 0
    out, err = capfd.readouterr()
    outcomes = {
        one["setting"]["strategy_options"].popitem()[0]: one["outcome"]
        for one in trials(Path("t"))
        if one["setting"].get("strategy") == "odd"
    }
    assert {name: one["result"] for name, one in outcomes.items()} == {
        "factor": "differs", "dies": "out of memory", "hangs_up": "out of memory",
    }  # fmt: skip
    assert outcomes["factor"]["why"].startswith("gradient norm of step 1 is ")
    assert "odd dies=true nproc=1: out of memory: ended by SIGKILL" in out
    assert "odd factor=2.0 nproc=1: differs: gradient norm of step 1" in err
    config = yaml.safe_load(Path("t/config.yaml").read_text())
    assert (config["strategy"], config["seed"], config["max_steps"]) == ("single", 3, None)
    assert (
        Path("t/config.yaml").read_text().splitlines()[1]
        == "# train with: distcore train t/config.yaml"
    )
    facts = json.loads(Path("t/tune.json").read_text())
    assert facts["complete"]
    assert facts["chosen"]["name"] in [
        one["name"] for one in facts["finals"] if not one["told_apart"]
    ]
    assert facts["ladder"][0]["peak_bytes"] > 2**27
    assert "differs: gradient norm" in Path("t/tune.md").read_text()
    assert "odd factor=2.0 nproc=1" in re.sub("<[^>]*>", "", Path("t/tune.html").read_text())
    assert not list(Path("t/trials").glob("*/checkpoints"))

    before = trials(Path("t"))
    assert main(command) == 0  # nothing is left to try: it only says again what it found
    assert trials(Path("t")) == before
    assert f"train with: distcore train {Path('t/config.yaml')}" in capfd.readouterr().out
    assert main([*command, "--lr", "0.1"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: --out t: holds the trials of another job: lr = 0.0")
    assert said.endswith("there, now 0.1; choose another folder\n")


@pytest.mark.programs
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL],
    ids=lambda number: number.name,
)
def test_no_trial_outlives_the_tune(number: signal.Signals, tmp_path: Path) -> None:
    write_rows(tmp_path)
    own = {"DISTCORE_CACHE": str(tmp_path / "cache"), "DISTCORE_BLOCK_PLUGINS": STRANGERS}
    own["DISTCORE_LOAD_PLUGINS"] = "distcore-workbench"
    command = [sys.executable, "-m", "distcore", *JOB, "--out", str(tmp_path / "t")]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | own, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: bool(running(tmp_path / "t/trials")))
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    wait_until(lambda: not running(tmp_path / "t/trials"))
    assert (tmp_path / "t/trials.jsonl").is_file()
    if number == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 128 + number
        assert told.splitlines()[-1].startswith("tune stopped after 0 trials; go on with: ")
        assert json.loads((tmp_path / "t/tune.json").read_text())["complete"] is False


def running(folder: Path) -> list[int]:
    """The processes that were started with a file of this folder."""
    processes = []
    for process in psutil.process_iter(["cmdline", "status"]):
        arguments = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(
            str(folder) in word for word in arguments
        ):
            processes.append(process.pid)
    return processes


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "0"), "--budget 0: expected minutes, more than 0"),
        (("--budget", "ten"), "--budget ten: expected minutes, such as 10 or 0.5"),
        (("--budget", "nan"), "--budget nan: expected minutes, more than 0"),
        (("none.yaml",), "config file none.yaml: cannot be read: No such file or directory"),
        (("--strategy", "dddp"), "no strategy named 'dddp'"),
        (("--strategies", "single,dddp"), "no strategy named 'dddp'"),
        (
            ("--strategies", "single:size=3"),
            "strategy 'single': unknown option 'size' (options: none)",
        ),
        (
            ("--out", "taken"),
            "--out taken: is a file, or holds something else; choose another folder",
        ),
        (("--set", "out=x"), "--set out: trials have a folder of their own; leave it out"),
        (("--resume", "auto"), "unknown flag '--resume'"),
        (("--out", "damaged"), "--out damaged: trials.jsonl is damaged; choose another folder"),
        (("--global-batch-size", "0"), "--global-batch-size '0'"),
    ],
)
def test_wrong_input_is_one_line_before_the_first_trial(
    work_folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    for name, file in (("taken", "notes.txt"), ("damaged", "trials.jsonl")):
        (work_folder / name).mkdir()
        (work_folder / name / file).write_text("{}\n")
    assert main([*JOB, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1
    assert not list(work_folder.glob("runs/*"))


@pytest.mark.usefixtures("work_folder")
def test_a_rank_of_another_launcher_does_not_tune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1" if "SIZE" in name else "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main([*JOB]) == 2
    assert "started this process as a rank; tune starts its own" in capsys.readouterr().err


HEAVY = (
    "--model",
    "bert-medium",
    "--data",
    "long.json",
    "--max-seq-len",
    "512",
    "--set",
    "device=cpu",
    "--max-steps",
    "2",
    "--set",
    "packing=off",
    "--global-batch-size",
    "8",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_that_dies_in_two_gibibytes_fits_after_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ulimit -d: what a process allocates. -v would count addresses, of which torch reserves
    many it never uses.
    """
    enter(tmp_path, monkeypatch)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    rows = [[" ".join(words[(n * k) % 10] for k in range(480)), n % 2] for n in range(48)]
    Path("long.json").write_text(json.dumps(rows))

    def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = f"ulimit -d {2 * 2**20}; exec {sys.executable} -m distcore " + " ".join(arguments)
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=1500)

    assert limited("train", *HEAVY, "--out", "dies").returncode != 0
    done = limited("tune", *HEAVY, "--fit-only", "--budget", "20", "--out", "t")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(Path("t/tune.json").read_text())
    assert facts["chosen"]["setting"]
    assert facts["trials"][0]["result"] in ("out of memory", "does not fit")
    done = limited("train", "t/config.yaml", "--out", "lives")
    assert done.returncode == 0, done.stderr
    assert Path("lives/report.json").is_file()
