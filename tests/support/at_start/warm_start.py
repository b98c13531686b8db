"""Have a program run in a process that has imported the large libraries already.

A program of distcore spends seconds of a core on importing torch and transformers before it does
anything. ``tests/support/warm_programs.py`` keeps processes that have imported them, and nothing of
distcore: a fork of one becomes the program, with the arguments, the environment, the folder, the
files and the limits of this process, which waits for its end and passes signals on to it.

Where that would not be the same, the program starts here, as users start it.
"""

from __future__ import annotations

import array
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

FOLDER = "DISTCORE_TEST_WARM"
"""Environment variable with the folder of the sockets of warm processes; not set: start fresh."""
WITH_ALL, WITH_TORCH = "all", "torch"
"""Sockets by what their processes have imported."""
MODULES = {
    "distcore": WITH_ALL,
    "torch.distributed.run": WITH_ALL,
    # It looks for what a strategy imports, and has imported torch by then.
    "distcore.testing.fresh": WITH_TORCH,
}
"""What ``python -m`` may name, with the socket for it."""
SCRIPTS = ("distcore", "torchrun", "accelerate")
"""Programs of the environment; beside them any file ``*.py``."""
MAY_DIFFER = (
    *("PWD", "OLDPWD", "SHLVL", "_", "PATH", "TMPDIR", "COLUMNS", "LINES"),
    *("CUBLAS_WORKSPACE_CONFIG", "HF_XET_HIGH_PERFORMANCE", "KINETO_LOG_LEVEL"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "OMP_WAIT_POLICY"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR"),
)
"""Environment variables that change nothing of what the warm process has imported. The process of
the tests has many of them from libraries that it has imported.
"""
OF_OTHERS = ("PYTEST_", "DISTCORE_", "DS_", "MLFLOW_", "_MLFLOW_", "WANDB_")
"""How variables begin that only those read which are not imported there."""
AGENT = "DISTCORE_AGENT"
"""The variable of a rank that must be the child of an agent."""
LOST = 70
"""The exit code if the warm process is gone before the program has ended."""
PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
"""Signals to this process that the program gets in its place."""
NO_FLAGS = ("count", "index", "safe_path")
"""Methods of ``sys.flags``, and where modules are looked for, which is set in the program."""
FLAGS = sorted(name for name in dir(sys.flags) if name[0] != "_" and name not in NO_FLAGS)
"""Flags of Python that a fork has of the warm process."""
LIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")


def start_warm() -> None:
    """Become the process that waits for the program, if a warm process takes it; else return.

    Ends this process with the exit code or the signal of the program.
    """
    name = _socket()
    if name is None or not _has_plain_files():
        return
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.path.join(os.environ[FOLDER], name))
        except OSError:  # the session of tests is over
            return
        _send(connection, request())
        if connection.recv(1) != b"w":
            return
        try:
            _wait(connection)
        finally:  # never go on to start the program a second time
            os._exit(LOST)


def request() -> dict[str, Any]:
    """Return what the program has of this process; the files follow beside it."""
    return {
        "words": _words(),
        "options": sys.warnoptions,
        "is_safe": sys.flags.safe_path,
        "orig_argv": sys.orig_argv,
        "same": same(),
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "group": os.getpgrp(),
        "umask": _umask(),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "ignored": [
            number
            for number in signal.valid_signals()
            if signal.getsignal(number) is signal.SIG_IGN
        ],
    }


def same() -> dict[str, Any]:
    """Return what a fork of the warm process cannot change: there it must be the same."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name == AGENT or not (name in MAY_DIFFER or name.startswith(OF_OTHERS))
    }
    flags = {name: getattr(sys.flags, name) for name in FLAGS}
    return {
        "python": [sys.executable, sys.prefix, flags, sorted(sys._xoptions)],
        "session": os.getsid(0),
        "user": [os.getuid(), os.getgid()],
        # of memory the warm process has more than a program begins with
        "memory": [
            *resource.getrlimit(resource.RLIMIT_AS),
            *resource.getrlimit(resource.RLIMIT_DATA),
        ],
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES],
        "variables": variables,
    }


def _socket() -> str | None:
    """Return the name of the socket for this program; ``None`` for one that starts fresh."""
    words = _words()
    if FOLDER not in os.environ or sys.platform != "linux" or not words:
        return None
    if words[0] == "-m":
        return MODULES.get(words[1])
    file = Path(words[0])
    is_chosen = file.name in SCRIPTS or (file.suffix == ".py" and file.is_file())
    return WITH_ALL if is_chosen else None


def _words() -> list[str]:
    """Return the command line without Python and without those of its options that a fork can
    have.
    """
    words = sys.orig_argv[1:]
    while words[:1] in (["-P"], ["-W"]):
        words = words[1 if words[0] == "-P" else 2 :]
    return words


def _has_plain_files() -> bool:
    """Return True if the standard files are open, and none of the output is a terminal."""
    try:
        return not any(os.isatty(number) for number in (0, 1, 2) if os.fstat(number))
    except OSError:
        return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _open_files(but: int) -> list[int]:
    """Return the descriptors that this process was given, the standard ones among them."""
    others = {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, but}
    # Python's own files are closed where a program is started; what was given is not.
    return [0, 1, 2, *(number for number in sorted(others) if _is_given(number))]


def _is_given(number: int) -> bool:
    """Return True for an open file that a program started from here would have, too."""
    try:
        return os.get_inheritable(number)
    except OSError:  # the one with which the folder was listed
        return False


def _send(connection: socket.socket, asked: dict[str, Any]) -> None:
    """Send a request with the open files."""
    files = _open_files(but=connection.fileno())
    text = json.dumps({**asked, "files": files}).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([len(text).to_bytes(8, "big")], rights)
    connection.sendall(text)


def _wait(connection: socket.socket) -> None:
    """Pass signals on until the program has ended; end as it did, or return if that is unknown."""
    for name in PASSED_ON:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: connection.send(bytes([number])))
    # The program has them now: a reader of its output must see it end when the program closes it.
    for number in _open_files(but=connection.fileno()):
        os.close(number)
    answer = connection.recv(4)
    if not answer:
        return
    status = int.from_bytes(answer, "big")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:  # which has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
