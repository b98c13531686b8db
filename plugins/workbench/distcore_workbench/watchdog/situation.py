"""The place of a rank in its run, as it tells the others: hook, step, line of
code, and last collective.
"""

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
"""Times in so many seconds that a rank compares its stack, to tell whether it moves."""
KEPT = 16
"""Collectives of a group that a rank tells: a rank that waits for nobody may be some ahead."""
RECORD = re.compile(r"_dump_\w+_trace_json")
"""Names of the functions that return torch's flight recorder, which some
backends have for themselves.
"""
PHASES = {
    "distcore.checkpoint.saver": "a save",
    "distcore.engine.evaluation": "an evaluation",
    "distcore.engine.prefetch": "its data",
}
"""Modules of the core by what a rank does in them, beside hooks and passes."""
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
    """Of this process group, from 1."""
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
        begun = (last[-1] for last in self.groups.values() if not last[-1].is_over)
        return next((f"{one.call}, number {one.number}" for one in begun), "")

    def dumps(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: bytes) -> Self:
        """Read what ``dumps`` wrote."""
        values: dict[str, Any] = json.loads(text)
        groups = {
            name: [Collective(**each) for each in last]
            for name, last in values.pop("groups").items()
        }
        return cls(groups=groups, **values)


def host_and_pid() -> str:
    """Return the machine and the number of this process."""
    return f"{socket.gethostname()} {os.getpid()}"


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread."""
    return sys._current_frames().get(thread)


def stuck_in(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a hook, or of the function that runs
    forward and backward passes.
    """
    return next(
        (one for one in _outward(frame) if one.f_code in _HOOKS or one.f_code in _PASSES), None
    )


def name_of(frame: FrameType) -> str:
    """Return the name of a frame that ``stuck_in`` returned."""
    name = frame.f_code.co_name
    return f"hook {name}()" if frame.f_code in _HOOKS else f"{name}()"


def capture_state(thread: int, rank: int, step: int, seconds: float) -> RankState:
    """Return the place of this rank, whose run is in ``thread``; takes ``WINDOW`` seconds."""
    is_progressing = _is_progressing(thread)
    frame = frame_of(thread)
    stuck, phase = stuck_in(frame), _phase(frame)
    of_phase = f" of {phase}" if phase and stuck and stuck.f_code in _HOOKS else ""
    return RankState(
        rank=rank,
        step=step,
        seconds=seconds,
        inside=f"{name_of(stuck)}{of_phase}" if stuck else phase,
        at=_line(frame),
        is_progressing=is_progressing,
        groups=collectives(),
    )


def rows_of(frame: FrameType | None) -> list[int]:
    """Return the rows of the micro-batch in work, or of the whole step where a strategy
    runs its passes itself.
    """
    ends = (*_PASSES, Hooks.train_step.__code__)
    passes = next((one for one in _outward(frame) if one.f_code in ends), None)
    if passes is None:
        return []
    if isinstance(micro := passes.f_locals.get("micro"), MicroBatch):
        return [int(row) for row in micro.indices]
    return [int(row) for micro, _ in passes.f_locals.get("micros", ()) for row in micro.indices]


def collectives() -> dict[str, list[Collective]]:
    """Return the last collectives in each group of torch's, by its flight recorder;
    empty for another library's.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    from torch._C import _distributed_c10d

    last: defaultdict[str, deque[Collective]] = defaultdict(partial(deque, maxlen=KEPT))
    for record in (
        value for name, value in vars(_distributed_c10d).items() if RECORD.fullmatch(name)
    ):
        for entry in json.loads(record()).get("entries", ()):  # in order
            if not entry["is_p2p"]:
                backend = entry["profiling_name"].partition(":")[0]
                last[f"{backend} {entry['process_group'][0]}"].append(_collective(entry))
    return {group: list(those) for group, those in last.items()}


def _collective(entry: Mapping[str, Any]) -> Collective:
    name = entry["profiling_name"].rpartition(":")[2]
    tensors = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    of = ", ".join(f"{dtype.lower()} {sizes}" for dtype, sizes in tensors)
    return Collective(
        number=entry["collective_seq_id"],
        call=f"{name} of {of}" if of else name,
        is_over=bool(entry["retired"]),
    )


def write_stacks(file: Path, situation: RankState, thread: int) -> None:
    """Add the stacks of all threads of this process to a file; ``thread`` is that of the
    run, and comes first.
    """
    names = {one.ident: one.name for one in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda one: one[0] != thread)
    lines = [f"{time.ctime()}: rank {situation.rank} ({host_and_pid()}) {situation}\n"]
    for number, frame in frames:
        lines += [f"\nthread {names.get(number, number)}:\n", *traceback.format_stack(frame)]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.writelines([*lines, "\n"])


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType | None) -> str:
    own = (
        one
        for one in _outward(frame)
        if one.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES
    )
    if (innermost := next(own, frame)) is None:
        return "no line of Python"
    code = innermost.f_code
    return f"{code.co_name}() ({Path(code.co_filename).name}:{innermost.f_lineno})"


def _phase(frame: FrameType | None) -> str:
    modules = (one.f_globals.get("__name__", "") for one in _outward(frame))
    return next((PHASES[module] for module in modules if module in PHASES), "")


def _is_progressing(thread: int) -> bool:
    """Return whether the stack of a thread changes, or it computes for half of the
    time that this takes.
    """
    before, stacks = _cpu_seconds(thread), set()
    for _ in range(LOOKS):
        stacks.add(tuple((id(one), one.f_lasti) for one in _outward(frame_of(thread))))
        time.sleep(WINDOW / LOOKS)
    return len(stacks) > 1 or _cpu_seconds(thread) - before > WINDOW / 2


def _cpu_seconds(thread: int) -> float:
    native = next((one.native_id for one in threading.enumerate() if one.ident == thread), None)
    try:
        return sum(
            one.user_time + one.system_time
            for one in psutil.Process().threads()
            if one.id == native
        )
    except psutil.Error:
        return 0.0
