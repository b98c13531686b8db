"""One trial: a ``distcore train`` of few steps in processes of its own, which end with it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distcore import RunConfig, dump_config, with_changes
from distcore_workbench.compare.runs import end, error_line, train_command
from distcore_workbench.planning.available import process_limits
from distcore_workbench.tuning import trial_extension
from distcore_workbench.tuning.outcome import Kind, Outcome, Result
from distcore_workbench.tuning.settings import THREADS, Setting
from distcore_workbench.tuning.trial_extension import HEAVIEST

WARM_UP = 3
"""First steps, which do not count for speed."""
PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h: the signal that a process gets when its parent dies."""
NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError|bad_alloc|killed by"
    r" SIGKILL|"
    r"ended by SIGKILL|failed to map segment|for want of memory",
    re.IGNORECASE,
)
"""How a program says that memory ran out; the kernel says it by SIGKILL. Under ``ulimit``
many libraries just crash.
"""


def trial_config(config: RunConfig, kind: Kind, steps: int) -> RunConfig:
    """Return a config as it is tried: few steps, no checkpoints, no progress line and no metrics.

    A ``screen`` is without dropout, whose masks depend on how a step is cut, and at a constant
    rate, so that losses do not depend on the number of steps; it logs every step.
    """
    extension = {
        f"{Path(trial_extension.__file__).resolve()}:Trial": {"steps": steps, "ends": kind != "fit"}
    }
    off: dict[str, bool | dict[str, Any]] = {"progress": False, "metrics": False}
    changed: dict[str, Any] = {
        "max_steps": steps + HEAVIEST,
        "eval_every": 0,
        "save_every": 0,
        "patience": 0,
        "resume": None,
        "max_restarts": 0,
        "log_every": 1 if kind == "screen" else config.log_every,
        "checkpoints.best": None,
        "extensions": {**off, **extension},
    }
    if kind == "screen":
        options = dict(config.task_options)
        if "dropout" in options:
            options["dropout"] = 0.0
        changed["task_options"] = options
        changed |= {
            "schedule.name": "constant",
            "schedule.warmup_steps": 0,
            "schedule.warmup_ratio": 0.0,
        }
        changed["lora.dropout"] = 0.0
    return with_changes(config, changed)


class Runner:
    """Runs trials one after the other; ``stop`` ends the one that runs."""

    def __init__(self, folder: Path) -> None:
        """``folder``: for the files of trials."""
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self.signals: list[int] = []

    def run(
        self, config: RunConfig, setting: Setting, name: str, timeout: float
    ) -> tuple[Outcome, int]:
        """Run a trial of the resolved ``config`` of ``trial_config``; return its outcome and the
        number of timed steps.

        ``name``: of its log. Its processes are ended after ``timeout`` seconds.
        """
        out = self._folder / name
        log = self._folder / f"{name}.log"
        shutil.rmtree(out, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{name}.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        began = time.monotonic()
        code = self._wait(train_command(file, out), setting, log, timeout)
        seconds = time.monotonic() - began
        facts = _read(out, int(config.nproc))
        shutil.rmtree(out, ignore_errors=True)
        if facts:
            return _outcome(facts, seconds), len(facts[0]["seconds"])
        if code is None:
            why = f"was not done after {timeout:.0f} s; its output is in {log}"
            return Outcome(result="too slow", seconds=seconds, why=why), 0
        why = error_line(log, code)
        output = log.read_text(encoding="utf-8", errors="replace") + why
        # Under a limit of its address space, a library that checks no allocation crashes.
        has_limits = any(True for _ in process_limits())
        is_crash_of_memory = has_limits and -code in (signal.SIGSEGV, signal.SIGABRT)
        is_out_of_memory = is_crash_of_memory or NO_MEMORY.search(output)
        result: Result = "out of memory" if is_out_of_memory else "failed"
        return Outcome(result=result, seconds=seconds, why=why), 0

    def stop(self, number: int) -> None:
        """End the trial that runs; the caller sees ``signals``."""
        self.signals.append(number)
        if self._child is not None and self._child.returncode is None:
            self._child.terminate()

    def _wait(self, command: list[str], setting: Setting, log: Path, timeout: float) -> int | None:
        """Run a command, and return its exit code; ``None`` if it took too long.

        No child of it is left.
        """
        environment = dict(os.environ)
        if setting.get(THREADS):
            environment["OMP_NUM_THREADS"] = str(setting[THREADS])
        with log.open("wb") as output:
            self._child = child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_set_parent_death_signal(),
            )
            try:
                return child.wait(timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                end(child)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # Processes that a rank has started, such as loaders, may be left.
                    os.killpg(child.pid, signal.SIGKILL)


def _set_parent_death_signal() -> Callable[[], None] | None:
    """Return a function that ties a new process to this one's life; ``None`` where the system
    has no such way.
    """
    if sys.platform != "linux":
        return None
    # looked up here: a child between fork and exec should do as little as can be
    prctl = ctypes.CDLL(None).prctl

    def set_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    return set_signal


def _read(out: Path, ranks: int) -> list[Mapping[str, Any]]:
    """Return the records of the ranks, in their order; none unless all have written theirs."""
    files = [out / f"trial-{rank}.json" for rank in range(ranks)]
    return (
        [json.loads(file.read_text(encoding="utf-8")) for file in files]
        if all(map(Path.exists, files))
        else []
    )


def _outcome(facts: list[Mapping[str, Any]], seconds: float) -> Outcome:
    """Return the outcome of a trial that ran; ``facts``: the measurements of each rank."""
    main = facts[0]
    samples = main["samples"]
    # The first steps compile and fill caches; of a short trial half of them count.
    warm_up = min(WARM_UP, len(main["seconds"]) // 2)
    timed = main["seconds"][warm_up:]
    rows_of_warm_up = samples[warm_up - 1] if warm_up else 0
    rows = samples[-1] - rows_of_warm_up
    return Outcome(
        result="ok",
        seconds=seconds,
        speed=rows / sum(timed),
        times=tuple(round(step_seconds, 6) for step_seconds in timed),
        peak=max(rank_facts["peak"] for rank_facts in facts),
        losses=_numbers(main["losses"]),
        norms=_numbers(main["norms"]),
    )


def _numbers(values: list[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)  # JSON has no NaN
