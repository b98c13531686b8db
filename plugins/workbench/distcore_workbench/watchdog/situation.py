"""The state of a rank in its run, for the others: hook, step, line of code, last collectives."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import psutil
import torch.distributed as dist

from distcore import MicroBatch
from distcore.lab import Hooks, forward_all, train_step

LIBRARIES = {*sys.stdlib_module_names, "torch", "pluggy", "numpy", "horovod"}
"""Packages whose frames do not say where a program is: the caller's does."""
LOOKS, WINDOW = 10, 0.5
"""A rank looks ``LOOKS`` times in ``WINDOW`` seconds at its stack, to see whether it moves."""
KEPT = 16
"""Last collectives of a group that a rank sends: one that waits for nobody may be some ahead."""
RECORD = re.compile(r"_dump_\w+_trace_json")
"""Names of the functions that return torch's flight recorder; some backends have their own."""
PHASES = {
    "distcore.checkpoint.saver": "a save",
    "distcore.engine.evaluation": "an evaluation",
    "distcore.engine.prefetch": "its data",
}
"""Names, by module of the core, for what a rank does outside of hooks and passes."""
_HOOKS = {
    method.__code__
    for name, method in vars(Hooks).items()
    if callable(method) and not name.startswith("_")
}
# ``forward_all`` may be decorated; its frames have the code of the function inside.
EVALUATES: CodeType = getattr(forward_all, "__wrapped__", forward_all).__code__
"""The code of an evaluation's forward passes."""
_PASSES = {train_step.__code__, EVALUATES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A collective that a rank has begun in a process group."""

    number: int
    """Its number in this process group, from 1."""
    call: str
    """Name, dtype and shape, such as ``all_reduce of float32 [3]``."""
    is_over: bool
    """False while the rank has not taken its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """The place of one rank."""

    rank: int
    """Its number."""
    step: int
    """The optimizer step that it is in, from 1."""
    seconds: float
    """Seconds since its last sign of progress."""
    inside: str = ""
    """The hook, the pass or the phase; empty outside of all."""
    at: str = ""
    """The innermost line of code that is in no library: function, file and line."""
    is_progressing: bool = False
    """Whether it executed anything just now."""
    groups: Mapping[str, Sequence[Collective]] = field(default_factory=dict)
    """The last collectives in each process group in order, by the group's name."""

    def __str__(self) -> str:
        inside = f" in {self.inside}" if self.inside else ""
        return f"for {self.seconds:.0f} s{inside}, in step {self.step}, at {self.at}"

    @property
    def waits_in(self) -> str:
        """The collective whose result the rank has not taken, with its number; empty for none."""
        for collectives_of_group in self.groups.values():
            newest = collectives_of_group[-1]
            if not newest.is_over:
                return f"{newest.call}, number {newest.number}"
        return ""

    def dumps(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: bytes) -> Self:
        """Read what ``dumps`` wrote."""
        values: dict[str, Any] = json.loads(text)
        groups = {}
        for name, collectives_of_group in values.pop("groups").items():
            groups[name] = [Collective(**fields) for fields in collectives_of_group]
        return cls(groups=groups, **values)


def host_and_pid() -> str:
    """Return the machine and the number of this process."""
    return f"{socket.gethostname()} {os.getpid()}"


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread."""
    return sys._current_frames().get(thread)


def stuck_in(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a hook, or of a function that runs the passes.

    ``None`` outside of both.
    """
    for caller in _outward(frame):
        if caller.f_code in _HOOKS or caller.f_code in _PASSES:
            return caller
    return None


def name_of(frame: FrameType) -> str:
    """Return the name of a frame that ``stuck_in`` returned."""
    name = frame.f_code.co_name
    return f"hook {name}()" if frame.f_code in _HOOKS else f"{name}()"


def capture_state(thread: int, rank: int, step: int, seconds: float) -> RankState:
    """Return the place of this rank, whose run is in ``thread``; takes ``WINDOW`` seconds."""
    is_progressing = _is_progressing(thread)
    frame = frame_of(thread)
    stuck = stuck_in(frame)
    phase = _phase(frame)
    inside = phase
    if stuck is not None:
        inside = name_of(stuck)
        if phase and stuck.f_code in _HOOKS:
            inside += f" of {phase}"
    return RankState(
        rank=rank,
        step=step,
        seconds=seconds,
        inside=inside,
        at=_line(frame),
        is_progressing=is_progressing,
        groups=collectives(),
    )


def rows_of(frame: FrameType | None) -> list[int]:
    """Return the rows of the micro-batch in work.

    Where a strategy runs its passes itself, these are the rows of the whole step. Empty outside
    of passes.
    """
    passes = (*_PASSES, Hooks.train_step.__code__)
    for caller in _outward(frame):
        if caller.f_code not in passes:
            continue
        # ``micro`` and ``micros`` are variables of the passes.
        micro_batch = caller.f_locals.get("micro")
        if isinstance(micro_batch, MicroBatch):
            return [int(row) for row in micro_batch.indices]
        rows: list[int] = []
        for micro_of_step, _ in caller.f_locals.get("micros", ()):
            rows += map(int, micro_of_step.indices)
        return rows
    return []


def collectives() -> dict[str, list[Collective]]:
    """Return the last collectives in each process group, by torch's flight recorder.

    Empty where another library communicates.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    from torch._C import _distributed_c10d

    last: defaultdict[str, deque[Collective]] = defaultdict(partial(deque, maxlen=KEPT))
    members = vars(_distributed_c10d).items()
    recorders = [member for name, member in members if RECORD.fullmatch(name)]
    for record in recorders:
        for entry in json.loads(record()).get("entries", ()):  # in order
            if not entry["is_p2p"]:
                backend = entry["profiling_name"].partition(":")[0]
                group = f"{backend} {entry['process_group'][0]}"
                last[group].append(_collective(entry))
    return {group: list(collectives_of_group) for group, collectives_of_group in last.items()}


def _collective(entry: Mapping[str, Any]) -> Collective:
    """Return the collective in an entry of the flight recorder."""
    call = entry["profiling_name"].rpartition(":")[2]
    tensors = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    operands = ", ".join(f"{dtype.lower()} {sizes}" for dtype, sizes in tensors)
    if operands:
        call += f" of {operands}"
    return Collective(number=entry["collective_seq_id"], call=call, is_over=bool(entry["retired"]))


def write_stacks(file: Path, situation: RankState, thread: int) -> None:
    """Add the stacks of all threads of this process to a file.

    ``thread`` is that of the run, and comes first.
    """
    names = {running.ident: running.name for running in threading.enumerate()}
    frames = sys._current_frames()
    numbers = sorted(frames, key=lambda number: number != thread)
    lines = [f"{time.ctime()}: rank {situation.rank} ({host_and_pid()}) {situation}\n"]
    for number in numbers:
        lines.append(f"\nthread {names.get(number, number)}:\n")
        lines += traceback.format_stack(frames[number])
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.writelines([*lines, "\n"])


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType | None) -> str:
    """Return the innermost line of code that is in no library: function, file and line.

    Of a stack with libraries alone, it is the innermost line.
    """
    if frame is None:
        return "no line of Python"
    shown = frame
    for caller in _outward(frame):
        package = _module_of(caller).partition(".")[0]
        if package not in LIBRARIES:
            shown = caller
            break
    code = shown.f_code
    return f"{code.co_name}() ({Path(code.co_filename).name}:{shown.f_lineno})"


def _phase(frame: FrameType | None) -> str:
    """Return the innermost of ``PHASES`` that a stack is in; empty outside of all."""
    for caller in _outward(frame):
        module = _module_of(caller)
        if module in PHASES:
            return PHASES[module]
    return ""


def _module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs; empty if it has none."""
    name: str = frame.f_globals.get("__name__", "")
    return name


def _is_progressing(thread: int) -> bool:
    """Return True if the stack of a thread changes, or it computes for half of ``WINDOW``."""
    cpu_seconds_before = _cpu_seconds(thread)
    stacks = set()
    for _ in range(LOOKS):
        frames = _outward(frame_of(thread))
        stacks.add(tuple((id(frame), frame.f_lasti) for frame in frames))
        time.sleep(WINDOW / LOOKS)
    cpu_seconds = _cpu_seconds(thread) - cpu_seconds_before
    return len(stacks) > 1 or cpu_seconds > WINDOW / 2


def _cpu_seconds(thread: int) -> float:
    """Return the processor time of a thread of this process, in seconds; 0 if it is not known."""
    native_ids = [running.native_id for running in threading.enumerate() if running.ident == thread]
    seconds = 0.0
    try:
        for usage in psutil.Process().threads():
            if usage.id in native_ids:
                seconds += usage.user_time + usage.system_time
    except psutil.Error:
        return 0.0
    return seconds
