"""DeepSpeed's compiled extensions: built once, one process at a time, or done without."""

from __future__ import annotations

import logging
import shutil
from typing import Any

from deepspeed.ops import op_builder

log = logging.getLogger("distcore")


def torch_adam(device: str, offload: str) -> bool:
    """True if DeepSpeed's Adam should be torch's: where its own kernel brings nothing or cannot be compiled.

    On a CPU without offload its kernel takes minutes to compile and is no faster than torch's fused one.
    """
    if device == "cpu" and offload == "none":
        return True
    builder = _builder(device, offload)
    if _is_built(builder) or _can_build(builder):
        return False
    log.warning(
        "DeepSpeed's %s cannot be compiled here (no C++ compiler or ninja): torch's AdamW is used", builder.name
    )
    return True


def build(device: str, offload: str) -> None:
    """Compile and load the Adam kernel before the engine wants it; other processes wait for the one that compiles."""
    builder = _builder(device, offload)
    if _is_built(builder):
        return
    from filelock import FileLock
    from torch.utils.cpp_extension import _get_build_directory

    folder = _get_build_directory(builder.name, verbose=False)
    lock = FileLock(f"{folder}.distcore-lock")
    if lock_is_taken(lock):
        log.info("waiting for another process that compiles DeepSpeed's %s", builder.name)
    with lock:
        _forget_killed_build(folder)
        log.info("loading DeepSpeed's %s; the first time it is compiled, which takes minutes", builder.name)
        builder.load(verbose=False)


def lock_is_taken(lock: Any) -> bool:
    """True if somebody else holds ``lock`` now."""
    from filelock import Timeout

    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True


def _forget_killed_build(folder: str) -> None:
    """Remove the mark of a compilation that was killed: torch would wait for it for ever. We hold the lock."""
    from pathlib import Path

    Path(folder, "lock").unlink(missing_ok=True)


def _builder(device: str, offload: str) -> Any:
    return op_builder.CPUAdamBuilder() if offload != "none" else op_builder.FusedAdamBuilder()


def _is_built(builder: Any) -> bool:
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(builder.name, False))


def _can_build(builder: Any) -> bool:
    tools = shutil.which("c++") and shutil.which("ninja")
    return bool(tools) and bool(builder.is_compatible(verbose=False))
