"""Ranks of test_launch_local.py, as a script without a ``__main__``
guard: launch_cases.py MODE [ARGUMENT].
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from exits import exit_on_error

from distcore.errors import DataError, DistcoreError
from distcore.launchers import launch
from distcore.launchers.processes.failures import run_as_rank
from distcore.plugin.strategy.contract import RankInfo
from distcore.rank_environment import export, join


def meet() -> int:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def look_around(greeting: str) -> dict[str, object]:
    world = meet()
    parent = psutil.Process(os.getppid())
    sockets = [
        c for p in (parent, *parent.children()) for c in p.net_connections() if c.status == "LISTEN"
    ]
    dist.barrier()
    seen = {
        "greeting": greeting,
        "world": world,
        "place": str(join()),
        "environment": {
            name: os.environ.get(name)
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
        },
        "tokenizers": os.environ["TOKENIZERS_PARALLELISM"],
        "threads": torch.get_num_threads(),
        "listening": sorted({c.laddr.ip for c in sockets}),
    }
    dist.destroy_process_group()
    return seen


def fail(case: str) -> None:
    meet()
    if dist.get_rank() == 0:
        while case == "killed while another is busy":
            pass
        dist.all_reduce(torch.ones(1))
    match case:
        case "raises":
            raise ValueError("boom\nwith a second line")
        case "killed" | "killed while another is busy":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crashes":
            ctypes.string_at(0)
        case "exits":
            sys.exit(7)
        case "leaves":
            os._exit(0)
        case "raises, then tears down":
            try:
                raise ValueError("boom")
            finally:
                dist.destroy_process_group()
                time.sleep(0.5)
        case "bad data":
            raise DataError("rows.json, row 3: expected [text, label]")


def ends(case: str, errors: Path) -> dict[str, object]:
    started = time.monotonic()
    try:
        launch(fail, case, nproc=2, errors=errors, timeout=60)
    except DistcoreError as error:
        seconds = time.monotonic() - started
        files = {file.name: file.read_text() for file in errors.iterdir()}
        return {
            "class": type(error).__name__,
            "text": str(error),
            "seconds": seconds,
            "files": files,
        }
    return {}


def wait() -> None:
    meet()
    os.write(1, b"ready\n")
    time.sleep(60)


def joined(case: str) -> None:
    rank_info = join()
    assert isinstance(rank_info, RankInfo)
    export(rank_info)

    def work() -> None:
        if case == "works":
            os.write(1, f"joined {rank_info.rank} of {meet()}\n".encode())
            dist.destroy_process_group()
        else:
            fail(case)

    run_as_rank(work, Path(sys.argv[3]), rank_info.rank, rank_info.size)


mode, argument = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
with exit_on_error():
    if mode == "look":
        torch.set_num_threads(2)
        # OpenMP has its threads now, and forking must not mind
        torch.randn(512, 512) @ torch.randn(512, 512)
        print(json.dumps(launch(look_around, "hello", nproc=2, timeout=60)))
    elif mode == "failures":
        print(json.dumps({case: ends(case, Path(sys.argv[3])) for case in argument.split(";")}))
    elif mode == "fail":
        launch(fail, argument, nproc=2, timeout=60)
    elif mode == "wait":
        launch(wait, nproc=2)
    elif mode == "joined":
        joined(argument)
