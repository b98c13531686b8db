"""A program that starts as a fork of the warm process is the one that a user would start."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from warm_programs import BEGAN_WITH, FOLDER

STATE = """import json, os, resource, signal, sys, tempfile
is_warm = "torch._dynamo" in sys.modules

def is_ignored(number):
    return signal.getsignal(number) is signal.SIG_IGN

state = {
    "words": [sys.argv, sys.orig_argv, sys.path, sys.executable, sys.warnoptions],
    "main": [__name__, __file__, sys.modules["__main__"] is sys.modules[__name__]],
    "ours": sorted(name for name in sys.modules if name.startswith("distcore")),
    "folders": [os.getcwd(), tempfile.gettempdir()],
    "variables": dict(os.environ),
    "process": [os.getpgrp(), os.getsid(0), os.getuid(), sorted(os.sched_getaffinity(0))],
    "umask": os.umask(0),
    "has_a_hook": sys.excepthook is not sys.__excepthook__,
    "limits": [resource.getrlimit(each) for each in range(16)],
    "ignored": [each for each in signal.valid_signals() if is_ignored(each)],
    "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "files": sorted(os.listdir("/proc/self/fd"))[:-1],
    "buffers": [file.line_buffering for file in (sys.stdin, sys.stdout, sys.stderr)],
    "read": sys.stdin.read(),
    "given": os.read(int(sys.argv[1]), 5).decode(),
}
print(json.dumps([is_warm, state]))
"""
"""Prints whether the process was warm, and all that a program has of whom it was started by."""
FAILS = "def fails():\n    raise ValueError('too large')\n\nfails()\n"
ENDS = "import os, signal, sys\n{}\n"
WAITS = """import os, signal, sys, time
try:
    print("torch._dynamo" in sys.modules, os.getpid(), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(7)
"""

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all programs start fresh"),
]


def fresh() -> Mapping[str, str]:
    """The environment without the warm process."""
    return {name: value for name, value in BEGAN_WITH.items() if name != FOLDER}


def state(
    folder: Path, options: list[str], environ: Mapping[str, str]
) -> tuple[bool, dict[str, Any]]:
    """Return whether a program was warm, and what it sees of its start."""
    (folder / "state.py").write_text(STATE)
    reader, writer = os.pipe()
    os.write(writer, b"given")

    def limits() -> None:
        os.umask(0o027)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 30))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    done = subprocess.run(
        [sys.executable, *options, "state.py", str(reader), "--flag"],
        cwd=folder,
        env={**environ, "DISTCORE_TEST_RANKS": f"{folder}/told", "PWD": "here"},
        input="a line\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        pass_fds=[reader],
        preexec_fn=limits,
    )
    os.close(reader)
    os.close(writer)
    is_warm, seen = json.loads(done.stdout)
    seen["variables"].pop(FOLDER, None)
    return is_warm, seen


def run(program: str, folder: Path, environ: Mapping[str, str]) -> tuple[int, str, str]:
    """Return how a program ends, and what it has printed."""
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environ, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("options", [[], ["-W", "ignore", "-P"]], ids=["plain", "options"])
def test_a_warm_program_sees_what_a_fresh_one_does(options: list[str], tmp_path: Path) -> None:
    is_warm, seen = state(tmp_path, options, BEGAN_WITH)
    is_fresh, expected = state(tmp_path, options, fresh())
    assert (is_warm, is_fresh) == (True, False)
    for name, value in expected.items():
        assert seen[name] == value, name


@pytest.mark.parametrize(
    "program",
    [
        FAILS,
        ENDS.format("sys.exit(3)"),
        ENDS.format("sys.exit('a line')"),
        ENDS.format("print('kept'); os.kill(os.getpid(), signal.SIGKILL)"),
        ENDS.format("import atexit; atexit.register(print, 'late'); os.write(2, b'early')"),
    ],
    ids=["fails", "exit-code", "exit-message", "killed", "at-exit"],
)
def test_a_warm_program_ends_as_a_fresh_one_does(program: str, tmp_path: Path) -> None:
    assert run(program, tmp_path, BEGAN_WITH) == run(program, tmp_path, fresh())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_a_warm_program(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, str(tmp_path / "waits.py")]
    with subprocess.Popen(command, env=BEGAN_WITH, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("True ")
        process.send_signal(number)
        assert process.wait(30) == (7 if number == signal.SIGINT else -number)


def test_a_warm_program_is_killed_with_the_process_that_the_test_knows(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, str(tmp_path / "waits.py")]
    with subprocess.Popen(command, env=BEGAN_WITH, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        is_warm, identifier = process.stdout.readline().split()
        program = os.pidfd_open(int(identifier))
        process.kill()
        assert process.stdout.read() == "", "it holds its output open until it has ended"
        os.close(program)
        assert is_warm == "True"


@pytest.mark.parametrize(
    ("variable", "flags"),
    [("HF_HUB_OFFLINE", ()), ("OMP_NUM_THREADS", ()), ("RANK", ()), ("PWD", ("-O",))],
)
def test_what_a_fork_cannot_have_starts_fresh(
    variable: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """What libraries read when they are imported, ranks of another launcher, Python's own flags."""
    (tmp_path / "program.py").write_text("import sys\nprint('torch._dynamo' in sys.modules)\n")
    done = subprocess.run(
        [sys.executable, *flags, "program.py"],
        cwd=tmp_path,
        env={**BEGAN_WITH, variable: "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


@pytest.mark.fresh
def test_programs_of_a_test_with_the_mark_start_fresh(tmp_path: Path) -> None:
    program = "import sys\nprint('torch._dynamo' in sys.modules)\n"
    assert run(program, tmp_path, os.environ) == (0, "False\n", "")
