"""The process that has imported the large libraries, whose forks become programs of tests.

``python warm_process.py NAME FD`` listens on that socket, of that name. It imports with the first
request, so that a session of tests without programs costs nothing. ``at_start/warm_start.py`` asks.

What forks hide: they share the seed with which Python hashes, and the libraries are imported in the
order of ``LIBRARIES``, before distcore.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.process
import os
import random
import resource
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import sitecustomize
import warm_start

LIBRARIES = {
    warm_start.WITH_TORCH: ("torch", "torch._dynamo"),
    warm_start.WITH_ALL: (
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.elastic.multiprocessing",
        "torch.distributed.tensor",
        "torch.optim.lr_scheduler",
        "transformers",
        "transformers.modeling_utils",
        "transformers.tokenization_utils_tokenizers",
        "pydantic",
        "rich.console",
        "safetensors.torch",
        "tokenizers",
        "yaml",
    ),
}
"""What is imported here, by the name of the socket: nothing of distcore, whose imports are a part
of each program.
"""
PRINT = sys.__excepthook__
"""Prints a traceback."""
MANY = 64
"""Most open files of a program."""
PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h."""


@dataclass
class Warm:
    """The listening process, and the programs that run."""

    name: str
    listener: socket.socket
    same: dict[str, Any] = field(default_factory=warm_start.same)
    """Before imports, of which some set variables."""
    is_warm: bool = False
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def serve(self) -> dict[str, Any]:
        """Answer requests forever; in each fork, return the request: it is to become that."""
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        while True:
            for key, _ in self.selector.select():
                # One answer may end what the next one is about.
                if key.fd in self.selector.get_map():
                    answer: Callable[[], dict[str, Any] | None] = key.data
                    request = answer()
                    if request is not None:
                        return request

    def _accept(self) -> dict[str, Any] | None:
        """Start the program of one request; return the request in the program alone."""
        accepted, _ = self.listener.accept()
        with accepted:
            request, files = _receive(accepted)
            if request is None or request["same"] != self.same:
                _close(files)
                self._tell(request["same"] if request else self.same)
                return None
            self._warm_up()
            with contextlib.suppress(OSError):  # who asked is gone: the program ends at once
                accepted.sendall(b"w")
            waiting = accepted.detach()
        process = os.fork()
        if process == 0:
            self._leave(waiting)
            _take_files(dict(zip(request["files"], files, strict=True)))
            return request
        _close(files)
        self._watch(process, waiting)
        return None

    def _tell(self, other: dict[str, Any]) -> None:
        """Add a line for the end of the session: what of a program differs, which starts fresh."""
        names = [name for name in self.same if other[name] != self.same[name]]
        pairs = self.same["variables"].items() ^ other["variables"].items()
        variables = sorted({variable for variable, _ in pairs})
        with open(os.path.join(os.path.dirname(self.listener.getsockname()), "fresh"), "a") as file:
            file.write(f"{', '.join(names)} {' '.join(variables)}\n")

    def _leave(self, waiting: int) -> None:
        """Close in a fork what belongs to the process that listens."""
        others = {key.fd for key in self.selector.get_map().values()} - {self.listener.fileno()}
        _close([waiting, *others])
        self.selector.close()
        self.listener.close()

    def _warm_up(self) -> None:
        """Import the libraries, once."""
        if self.is_warm:
            return
        for name in LIBRARIES[self.name]:
            importlib.import_module(name)
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, "a fork would lack the threads of a library"
        gc.collect()
        gc.freeze()  # a fork need not walk over what is here
        self.is_warm = True

    def _watch(self, process: int, waiting: int) -> None:
        """See to the end of a program, to signals for it, and to the end of who waits for it."""
        alive = os.pidfd_open(process)

        def ended() -> None:
            _, status = os.waitpid(process, 0)
            with contextlib.suppress(OSError):  # nobody waits any more
                os.write(waiting, status.to_bytes(4, "big"))
            for number in (alive, waiting):
                if number in self.selector.get_map():
                    self.selector.unregister(number)
                os.close(number)

        def asked() -> None:
            signals = b""
            with contextlib.suppress(ConnectionResetError):
                signals = os.read(waiting, 16)
            for number in signals:
                os.kill(process, number)
            if not signals:  # who waits was killed
                os.kill(process, signal.SIGKILL)
                self.selector.unregister(waiting)

        self.selector.register(alive, selectors.EVENT_READ, ended)
        self.selector.register(waiting, selectors.EVENT_READ, asked)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return a request and its open files; no request if who asked is gone."""
    item = array.array("i")
    head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(MANY * item.itemsize))
    for _, _, data in ancillary:
        item.frombytes(data)
    files = list(item)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        part = b""
        with contextlib.suppress(ConnectionResetError):
            part = connection.recv(1 << 16)
        if not part:
            return None, files
        text += part
    return (json.loads(text) if text else None), files


def _close(files: Iterable[int]) -> None:
    for number in files:
        os.close(number)


def _take_files(files: dict[int, int]) -> None:
    """Give the files, which are open under other numbers, those that the program was given."""
    above = max(*files, *files.values()) + 1  # else one would take the place of another
    moved = {number: fcntl.fcntl(given, fcntl.F_DUPFD, above) for number, given in files.items()}
    _close(files.values())
    for number, given in moved.items():
        os.dup2(given, number)
    _close(moved.values())


def _die_with_parent() -> None:
    """Have Linux kill this process once its parent is dead."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_state(request: dict[str, Any]) -> None:
    """Have this process be as the one that asked for the program."""
    _die_with_parent()
    os.setpgid(0, request["group"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    for name, limits in request["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ignored = number in request["ignored"]
        if is_ignored != (signal.getsignal(number) is signal.SIG_IGN):
            signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environ"])
    # what modules have kept of this process
    tempfile.tempdir = None
    multiprocessing.process.ORIGINAL_DIR = request["folder"]  # type: ignore[attr-defined]
    importlib.invalidate_caches()
    random.seed()


def _without_these_frames(
    kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
) -> None:
    """Print a traceback as one of the program alone."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    PRINT(kind, error.with_traceback(traceback), traceback)


def _folder_of(program: str) -> str:
    """Return where Python looks for modules first, unless it is told not to."""
    return os.getcwd() if program == "-m" else os.path.dirname(os.path.realpath(program))


def become(request: dict[str, Any]) -> None:
    """Run the program of the request as ``__main__``; an exit raises SystemExit."""
    _take_state(request)
    words = request["words"]
    sys.orig_argv = request["orig_argv"]
    sys.warnoptions[:] = request["options"]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    # both: a program may ask whether there is another hook than Python's
    sys.excepthook = sys.__excepthook__ = _without_these_frames
    sitecustomize.watch_ranks()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    own_folder = [] if request["is_safe"] else [_folder_of(words[0])]
    sys.path[:] = [*own_folder, *request["path"]]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    else:
        sys.argv = words
        main.__file__ = os.path.abspath(words[0])
        with open(main.__file__, "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
        exec(code, vars(main))


if __name__ == "__main__":
    _die_with_parent()  # also where a time limit kills the tests
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the tests
    become(Warm(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))).serve())
