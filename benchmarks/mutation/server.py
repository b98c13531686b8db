"""A process that runs commands in forks of itself: they need not import PyTorch and the like again.

It reads one JSON object a line: ``program`` (``pytest`` or ``distcore``), ``arguments``, ``log``,
the file for what is printed, ``limit`` in seconds, and ``stop_at``, words in the log that end the
command early. It answers with a line: ``code``, ``null`` after the limit or the words, and
``words``, true after the words. It imports nothing of ours.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

WARM = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "numpy",
    "pytest",
    "pydantic",
    "pluggy",
    "safetensors.torch",
)
"""Modules that nearly every command imports."""
POLL = 0.1


def main() -> None:
    """Serve until the end of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # modules print when they are imported
    for module in (*WARM, *sys.argv[1:]):
        with suppress(ImportError):
            importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), file=answers, flush=True)


def _serve(order: dict[str, Any]) -> dict[str, Any]:
    log = Path(order["log"])
    log.write_bytes(b"")
    child = os.fork()
    if not child:
        _run(order)
    deadline = time.monotonic() + order["limit"]
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return {"code": os.waitstatus_to_exitcode(status), "words": False}
        if order["stop_at"] and order["stop_at"] in log.read_text(errors="replace"):
            _kill(child)
            return {"code": None, "words": True}
        time.sleep(POLL)
    _kill(child)
    return {"code": None, "words": False}


def _kill(child: int) -> None:
    """Kill the command with all that it started."""
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(child).children(recursive=True)
        for process in (psutil.Process(child), *family):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    os.waitpid(child, 0)


def _run(order: dict[str, Any]) -> None:
    """Run the command in this fork, and end it."""
    code: Any = 70
    try:
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order.get("environment", {}))
        sys.argv = [order["program"], *order["arguments"]]
        if order["program"] == "pytest":
            import pytest

            code = pytest.main(order["arguments"])
        else:
            from distcore.cli.main import main as distcore

            code = distcore(order["arguments"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 70)


if __name__ == "__main__":
    main()
