"""DeepSpeed's compiled extensions: built once, one process at a time, or done without."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from deepspeed.ops import op_builder
from filelock import FileLock, Timeout

log = logging.getLogger("distcore")


def adam(offload: str) -> Any:
    """The builder of DeepSpeed's Adam for an optimizer in host memory, or on the device."""
    return op_builder.CPUAdamBuilder() if offload != "none" else op_builder.FusedAdamBuilder()


def lamb() -> Any:
    """The builder of DeepSpeed's Lamb."""
    return op_builder.FusedLambBuilder()


def nvme() -> tuple[Any, Any]:
    """The builders of what reads and writes on NVMe: the second cannot be loaded without the first."""
    return op_builder.PinMemoryBuilder(), op_builder.AsyncIOBuilder()


def torch_adam(device: str, offload: str, tell: bool) -> bool:
    """True if DeepSpeed's Adam should be torch's: where its own kernel brings nothing or cannot be compiled.

    On a CPU without offload its kernel takes minutes to compile and is no faster than torch's fused one. ``tell``: log
    that it cannot be compiled.
    """
    if device == "cpu" and offload == "none":
        return True
    builder = adam(offload)
    if can_load(builder):
        return False
    if tell:
        log.warning(
            "DeepSpeed's %s cannot be compiled here (no C++ compiler or ninja): torch's AdamW is used", builder.name
        )
    return True


def can_load(builder: Any) -> bool:
    """True if an extension is installed compiled, or can be compiled here."""
    return _is_built(builder) or (_has_tools() and bool(builder.is_compatible(verbose=False)))


def lacking_for_nvme() -> str:
    """Say what offload to NVMe lacks here; an empty string: nothing."""
    _, builder = nvme()
    if _is_built(builder):
        return ""
    if not _has_tools():
        return "a C++ compiler and ninja"
    return "" if builder.is_compatible(verbose=False) else "libaio and its headers (libaio-dev, libaio-devel)"


def build(builder: Any) -> None:
    """Compile and load an extension before the engine wants it; other processes wait for the one that compiles."""
    if _is_built(builder):
        return
    from torch.utils.cpp_extension import _get_build_directory

    folder = _get_build_directory(builder.name, verbose=False)
    lock = FileLock(f"{folder}.distcore-lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that compiles DeepSpeed's %s", builder.name)
        lock.acquire()
    try:
        _forget_killed_build(folder)
        log.info("loading DeepSpeed's %s; the first time it is compiled, which takes minutes", builder.name)
        builder.load(verbose=False)
    finally:
        lock.release()


def _forget_killed_build(folder: str) -> None:
    """Remove the mark of a compilation that was killed: torch would wait for it for ever. We hold the lock."""
    Path(folder, "lock").unlink(missing_ok=True)


def _is_built(builder: Any) -> bool:
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(builder.name, False))


def _has_tools() -> bool:
    return bool(shutil.which("c++") and shutil.which("ninja"))
