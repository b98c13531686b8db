"""Watch for forbidden events while a checkpoint is read: pickles, imports,
code, commands, connections, writing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EVENTS = {
    "pickle.find_class",
    "exec",
    "compile",
    "os.system",
    "subprocess.Popen",
    "os.mkdir",
    "socket.connect",
    "import",
}
UNPICKLERS = ("pickle.py", "_weights_only_unpickler.py")
_seen: list[list[str]] = []
"""Events of the active watches. An audit hook cannot be removed from the process."""


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yield the list of seen events. Imports are events, too, so call once before to warm up."""
    if not hasattr(sys, "_distcore_watch"):
        sys.addaudithook(_audit)
        vars(sys)["_distcore_watch"] = True
    events: list[str] = []
    _seen.append(events)
    sys.setprofile(_profile)
    try:
        yield events
    finally:
        sys.setprofile(None)
        _seen.remove(events)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    for events in _seen:
        writes = (
            event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        )
        if writes or event in EVENTS:
            events.append(f"{event} {arguments}")


def _profile(frame: FrameType, event: str, argument: object) -> None:
    """Record calls of unpicklers, because a pickle without globals raises no audit event."""
    owner = getattr(argument, "__self__", None)
    module = getattr(argument, "__module__", None) or type(owner).__module__
    in_c = event == "c_call" and module == "_pickle" and "load" in getattr(argument, "__name__", "")
    in_python = (
        event == "call"
        and frame.f_code.co_filename.endswith(UNPICKLERS)
        and "load" in frame.f_code.co_name
    )
    if in_c or in_python:
        for events in _seen:
            events.append(f"unpickles: {argument if in_c else frame.f_code.co_qualname}")
