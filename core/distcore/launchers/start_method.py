"""How ranks come to life on this machine, by fork or by spawn, and what cannot be given to those that are spawned."""

from __future__ import annotations

import contextlib
import os
import pickletools
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Literal

import torch

from distcore.errors import ConfigError


def start_method() -> Literal["fork", "spawn"]:
    """Return ``fork`` where that is safe: ranks import nothing again, and ``fn`` need not be importable.

    After a process has used the CUDA driver, its forked children find no GPU; even ``torch.cuda.is_available()`` uses
    the driver unless PYTORCH_NVML_BASED_CUDA_CHECK=1. On macOS some system libraries crash after a fork.
    """
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if sys.platform != "linux" or started or _driver_in_use():
        return "spawn"
    return "fork"


def _driver_in_use() -> bool:
    """Return True if cuInit was called in this process: it keeps this device file open, and NVML does not."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link) == "/dev/nvidia-uvm":
                return True
    return False


def check_spawnable(entry: Callable[[], object]) -> None:
    """Raise ConfigError if a process that is spawned could not be given ``entry``, what it is to run.

    It imports what it runs: nothing that was defined in a notebook or at a prompt, and no lambda or inner function.
    """
    why = "this process has used the GPU" if sys.platform == "linux" else "this system cannot fork them"
    try:
        names = {argument for _, argument, _ in pickletools.genops(bytes(ForkingPickler.dumps(entry)))}
    except Exception as error:  # pickle raises what an object's own methods raise, and three classes of its own
        raise ConfigError(
            f"ranks are spawned, because {why}, and what they run cannot be given to them: {error}; define it at the "
            "top of a file"
        ) from None
    if "__main__" in names and not hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(
            f"ranks are spawned, because {why}, and cannot import what a notebook or a prompt defines; move it to a "
            "file and import it, or start them before the GPU is used"
        )
