"""Plant hangs in real ranks: each is named by the watchdog, and ends; then a run with
jitter, without an alarm.

    python benchmarks/hangs.py [--kinds NAME …] [--limit 4] [--jitter-minutes 120]

Each kind is a run of three ranks under ``ddp`` over gloo, in which rank 1 (of one kind, rank 0)
does something else in step 6. It is named rightly if the watchdog's first line names this rank and
what it does, at most 15 s after the limit. The run then gets SIGTERM, and has to end within 15 s;
the table has the seconds, and the step that the others saved. The run with jitter has sleeps of up
to half of the limit in data, forward passes and callbacks of all ranks, with evaluations and saves.
Ranks whose collectives differ in shape or dtype alone do not hang over gloo, which ends one of them
at once.

Bounds: all kinds but one are named rightly; all that are named end; no alarm with jitter.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import distcore.engine.fit
from distcore import (
    Datasets,
    Direction,
    Progress,
    Run,
    RunConfig,
    StepResult,
    hookimpl,
    load_config,
    train,
)

RANKS, ODD, STEP, WIDTH = 3, 1, 6, 16
LATE = 15.0
"""Seconds after the limit in which a hang must be named."""
ENDS = 15.0
"""Seconds after SIGTERM in which a hang that was named must end."""
START = 120.0
"""Seconds until the hang is planted, at most."""
LONG = 600.0
"""Seconds of what would never end."""
PLANTED = "planted"
"""The file that tells when."""


def sleeps() -> None:
    time.sleep(LONG)


def spins() -> None:
    while True:
        pass


def waits_for_itself() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def reads_a_fifo() -> None:
    pipe = Path(tempfile.mkdtemp(), "pipe")
    os.mkfifo(pipe)
    pipe.read_text()


def waits_for_a_program() -> None:
    subprocess.run(["sleep", str(LONG)], check=True)


def waits_for_a_peer() -> None:
    socket.create_server(("127.0.0.1", 0)).accept()


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def keeps_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(int(LONG))


def sums() -> None:
    dist.all_reduce(torch.ones(7))


def sends() -> None:
    dist.broadcast(torch.ones(5), 0)


def gathers() -> None:
    dist.all_gather([torch.empty(7) for _ in range(RANKS)], torch.ones(7))


def gathers_and_sums() -> None:
    gathers()
    sums()


def sums_and_gathers() -> None:
    sums()
    gathers()


def alone(evaluates: bool, saves: bool) -> None:
    """Have this rank evaluate or save after this step."""
    distcore.engine.fit.due = lambda *_: (evaluates, saves)


class Kind(NamedTuple):
    """A hang."""

    place: str
    """``data``, ``forward``, ``backward``, ``callback``, ``log`` or ``write``."""
    odd: Callable[[], object]
    """The odd rank's action in one step."""
    says: str
    """A pattern in the watchdog's line."""
    usual: Callable[[], object] = lambda: None
    """The action of all ranks in each step."""
    rank: int = ODD
    """The odd rank."""
    config: Mapping[str, Any] = MappingProxyType({})
    """Keys of the run."""


KINDS = {
    "extra collective": Kind(
        "callback", gathers, r"another collective, \w*all_?gather\w* of float \[7\]"
    ),
    "missing collective": Kind("callback", lambda: None, r"another collective, all_reduce", sends),
    "other collective": Kind("callback", gathers, r"another collective, \w*all_?gather", sums),
    "other order": Kind(
        "callback", gathers_and_sums, r"another collective, \w*all_?gather", sums_and_gathers
    ),
    "a barrier of one rank": Kind("callback", dist.barrier, r"another collective, barrier"),
    "slow rank": Kind("forward", sleeps, r"train_step\(\).*sleeps\(\)"),
    "stopped rank": Kind("forward", stops, r"process \d+ on .*: stopped\) does not answer"),
    "stopped rank 0": Kind(
        "forward", stops, r"process \d+ on .*: stopped\) does not answer", rank=0
    ),
    "stuck loader": Kind("data", sleeps, r"in its data.*sleeps\(\)"),
    "stuck loader process": Kind("data", sleeps, r"in its data", config={"loader.workers": 1}),
    "stuck disk": Kind("data", reads_a_fifo, r"in its data.*reads_a_fifo\(\)"),
    "a lock in a user's hook": Kind(
        "callback", waits_for_itself, r"on_step_end\(\).*waits_for_itself\(\)"
    ),
    "one rank in evaluation": Kind(
        "callback", lambda: alone(True, False), r"in hook gather_outputs\(\) of an evaluation"
    ),
    "one rank in save": Kind(
        "callback", lambda: alone(False, True), r"in hook gather_outputs\(\) of a save"
    ),
    "a save on a stuck disk": Kind(
        "write", reads_a_fifo, r"in a save.*reads_a_fifo\(\)", config={"save_every": 3}
    ),
    "sleep in a callback": Kind("log", sleeps, r"hook on_log\(\).*sleeps\(\)"),
    "a loop without end": Kind("callback", spins, r"hook on_step_end\(\).*spins\(\)"),
    "a backward hook": Kind("backward", sleeps, r"hook backward\(\).*sleeps\(\)"),
    "a program that does not end": Kind(
        "callback", waits_for_a_program, r"waits_for_a_program\(\)"
    ),
    "a peer that does not come": Kind("callback", waits_for_a_peer, r"waits_for_a_peer\(\)"),
    "code that keeps the interpreter": Kind("callback", keeps_the_interpreter, r"does not answer"),
}


class Data:
    """Random inputs, as a distcore dataset."""

    def __init__(self, rows: int, job: Job) -> None:
        self.inputs = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))
        self.lengths, self.items = np.ones(rows, dtype=np.int64), np.ones(rows, dtype=np.int64)
        self._job = job

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``."""
        self._job.at("data")
        return {"inputs": self.inputs[torch.from_numpy(indices)]}


class Job:
    """A small job in which one rank hangs, or all have jitter."""

    metrics: ClassVar[dict[str, Direction]] = {"loss": "min"}

    def __init__(self, kind: str | None, jitter: float, out: Path, steps: int) -> None:
        self.kind, self.jitter, self.out, self.steps = KINDS.get(kind or ""), jitter, out, steps
        self.rank, self.step, self.batches = int(os.environ.get("RANK", 0)), 0, 0

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the data."""
        few = Data(30, self)
        return Datasets(train=Data(30 * self.steps, self), evaluation=few, test=few)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Build the model."""
        self.rank = int(os.environ.get("RANK", 0))
        write = os.fsync

        def fsync(fd: int) -> None:
            self.at("write")
            write(fd)

        os.fsync = fsync  # type: ignore[assignment]  # of numbers alone
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def row_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of each row."""
        self.at("forward")
        outputs = model(batch["inputs"])
        if outputs.requires_grad:
            outputs.register_hook(lambda _: self.at("backward"))
        return mse_loss(outputs, batch["inputs"], reduction="none").mean(1)

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress, result: StepResult) -> None:
        """Count the step."""
        self.step = progress.step
        self.at("callback")

    @hookimpl
    def on_log(self, record: dict[str, float]) -> None:
        """Pass by."""
        self.at("log")

    def at(self, place: str) -> None:
        """Do at this place what the kind of hang says, or sleep a little."""
        if self.jitter and random.random() < 0.2:
            time.sleep(self.jitter * random.random() ** 4)
        if self.kind is None or self.kind.place != place or not self._is_training(place):
            return
        if self.rank == self.kind.rank and self.is_time(place):
            (self.out / PLANTED).write_text(str(time.time()))
            self.kind.odd()
        else:
            self.kind.usual()

    def is_time(self, place: str) -> bool:
        """Return whether the hang comes now."""
        return (
            self.batches == STEP
            if place == "data"
            else self.step >= STEP and not (self.out / PLANTED).exists()
        )

    def _is_training(self, place: str) -> bool:
        self.batches += place == "data"
        return True


def run(kind: str | None, jitter: float, limit: float, out: Path, steps: int) -> None:
    """Train."""
    more = dict(KINDS[kind].config) if kind else {"eval_every": 20, "save_every": 30}
    settings: dict[str, Any] = {
        "out": str(out / "run"),
        "max_steps": steps,
        "global_batch_size": 30,
        "strategy": "ddp",
        "nproc": RANKS,
        "device": "cpu",
        "lr": 1e-3,
        "data_guard_steps": 0,
        "log_every": 2,
        "eval_at_epoch_end": False,
        "extensions": {"progress": False, "watchdog": {"limit": limit}},
    }
    train(load_config(None, settings | more), Job(kind, jitter, out, steps))


class Measured(NamedTuple):
    """How a hang was named, and how it ended."""

    is_right: bool
    """Whether the line names the odd rank and its doing, in time."""
    late: float
    """Seconds from the limit to the line."""
    ending: float
    """Seconds from SIGTERM to the end of the run; infinite for one that had to be killed."""
    saved: str
    """The newest checkpoint."""
    line: str
    """The watchdog's."""


def measure(kind: str, limit: float) -> Measured:
    """Plant a hang, wait for its line, and stop the run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--run", kind, "--limit", str(limit), "--out", folder]
        with start(command) as process:
            lines, began = Lines(process), time.time()
            planted = Path(folder, PLANTED)
            while not planted.exists() and process.poll() is None and time.time() < began + START:
                time.sleep(0.1)
            at = float(planted.read_text()) if planted.exists() else time.time()
            while not lines.alarms and process.poll() is None and time.time() < at + limit + LATE:
                time.sleep(0.05)
            late, stopped = time.time() - at - limit, time.time()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2 * ENDS)
            ending = time.time() - stopped if process.poll() is not None else float("inf")
            end(process)
        saved = sorted(path.name for path in Path(folder, "run/checkpoints").glob("step-*"))
    line = (
        lines.alarms[0]
        if lines.alarms
        else "nothing; last: " + (lines.all[-1] if lines.all else "")
    )
    is_right = (
        re.search(rf"watchdog: rank {KINDS[kind].rank} .*{KINDS[kind].says}", line) is not None
    )
    return Measured(
        is_right and late <= LATE, late, ending, saved[-1] if saved else "nothing", line
    )


def start(command: list[str]) -> subprocess.Popen[str]:
    """Start a run in a process group of its own."""
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """Kill a run and its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Lines:
    """Lines of a process, read by a thread."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.all: list[str] = []
        self.alarms: list[str] = []
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.all.append(line.strip())
            if "watchdog: " in line:
                self.alarms.append(line.strip())


def false_alarms(minutes: float, limit: float) -> int:
    """Return the alarms of a run with jitter."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--run",
            "jitter",
            "--limit",
            str(limit),
            "--out",
            folder,
        ]
        with start(command) as process:
            lines = Lines(process)
            deadline = time.time() + 60 * minutes
            while process.poll() is None and time.time() < deadline:
                time.sleep(1)
            if process.poll() is not None:
                sys.exit(f"the run with jitter ended: {lines.all[-1:]}")
            end(process)
    print(*lines.alarms, sep="\n")
    return len(lines.alarms)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help="kinds of hangs")
    parser.add_argument("--limit", type=float, default=4.0, help="the watchdog's, in seconds")
    parser.add_argument(
        "--jitter-minutes", type=float, default=120.0, help="length of the run with jitter"
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        jitter = given.limit / 2 if given.run == "jitter" else 0.0
        run(
            None if jitter else given.run, jitter, given.limit, given.out, 10**6 if jitter else 1000
        )
        return
    columns = ("kind", "named", "s after the limit", "s from SIGTERM to the end", "saved", "line")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    rights = ended = 0
    for kind in given.kinds:
        done = measure(kind, given.limit)
        rights, ended = rights + done.is_right, ended + (done.ending <= ENDS)
        named = "yes" if done.is_right else "NO"
        print(
            f"| {kind} | {named} | {done.late:.1f} | {done.ending:.1f} | {done.saved} |"
            f" {done.line} |",
            flush=True,
        )
    print(f"named rightly: {rights} of {len(given.kinds)} (bound: all but one)")
    print(f"ended in time: {ended} of {len(given.kinds)} (bound: all)")
    wrong = false_alarms(given.jitter_minutes, given.limit) if given.jitter_minutes else 0
    print(f"alarms in {given.jitter_minutes:g} minutes of jitter: {wrong} (bound: 0)")
    sys.exit(rights < len(given.kinds) - 1 or ended < len(given.kinds) or wrong > 0)


if __name__ == "__main__":
    main()
