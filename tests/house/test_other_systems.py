"""The core on a system that lacks what only Unix, or only Linux, has: it imports,
and one process trains.

Nothing here was run on macOS or Windows: the modules and functions that these lack are hidden,
and torch's own stay.
"""

from __future__ import annotations

import json
import os
import pkgutil
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import distcore

MODULES = [
    "resource",
    "fcntl",
    "termios",
    "pwd",
    "grp",
    "tty",
    "pty",
    "curses",
    "readline",
    "syslog",
    "posix",
]
FUNCTIONS: dict[ModuleType, list[str]] = {
    os: [
        "fork",
        "getuid",
        "geteuid",
        "getloadavg",
        "waitid",
        "pwrite",
        "sched_getaffinity",
        "killpg",
        "setsid",
        "mkfifo",
        "statvfs",
    ],
    signal: ["SIGHUP", "SIGKILL", "SIGUSR1", "SIGALRM"],
    select: ["poll"],
}


def everything() -> Iterator[str]:
    """Import every module of the core, and yield the names."""
    for module in pkgutil.walk_packages(distcore.__path__, "distcore."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
            yield module.name


def without_what_only_linux_has(out: Path) -> dict[str, Any]:
    """Hide it from this process for good, import the core afresh, use what would
    miss it, and train.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "distcore"]:
        del sys.modules[name]
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails
    for module, names in FUNCTIONS.items():
        for name in names:
            vars(module).pop(name, None)
    imported = list(everything())
    fresh = import_module("distcore")
    import_module("distcore.jobs.train").errors_of_job()
    import_module("distcore.launchers.processes.cores").available_cores()
    with import_module("distcore.launchers.processes.contexts").raise_on_sigterm():
        pass
    config = {
        "device": "cpu",
        "lr": 0.01,
        "schedule": {"name": "constant"},
        "extensions": {"progress": False},
    }
    problem = import_module("distcore.testing.problem").Problem()
    report = fresh.train(fresh.RunConfig(max_steps=2, out=str(out), **config), problem)
    return {"imported": imported, "steps": report["steps"]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("systems")
    list(everything())  # the libraries keep what they have of Unix
    import_module("transformers.trainer_utils")
    child = os.fork()
    if not child:  # a process of its own, to which nothing is given back
        try:
            (folder / "answer.json").write_text(
                json.dumps(without_what_only_linux_has(folder / "run"))
            )
        except BaseException:
            (folder / "answer.json").write_text(json.dumps({"traceback": traceback.format_exc()}))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    assert "traceback" not in answer, answer["traceback"]
    return answer | {"run": folder / "run"}


def test_every_module_of_the_core_imports(results: dict[str, Any]) -> None:
    assert len(results["imported"]) > 150


def test_a_single_process_trains_and_commits_a_checkpoint(results: dict[str, Any]) -> None:
    assert results["steps"] == 2
    assert (results["run"] / "checkpoints/step-00000002/manifest.json").is_file()
