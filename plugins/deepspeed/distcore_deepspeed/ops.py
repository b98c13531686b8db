"""DeepSpeed's compiled extensions: one process compiles each once, while the others wait."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from distcore_deepspeed.json_config import ZERO, Tree, get
from distcore_deepspeed.library import op_builder

log = logging.getLogger("distcore")


def adam(offload: str) -> Any:
    """Return the builder of DeepSpeed's Adam, for an optimizer in host memory or on the device."""
    return op_builder.CPUAdamBuilder() if offload != "none" else op_builder.FusedAdamBuilder()


def lamb() -> Any:
    """Return the builder of DeepSpeed's Lamb."""
    return op_builder.FusedLambBuilder()


def nvme() -> tuple[Any, Any]:
    """Return the builders of the NVMe extensions, in the order in which they must be loaded."""
    return op_builder.PinMemoryBuilder(), op_builder.AsyncIOBuilder()


def uses_torch_adam(device: str, offload: str, logs: bool) -> bool:
    """Return True if torch's Adam should replace DeepSpeed's.

    With ``logs``, a kernel of DeepSpeed's that cannot be compiled is logged.
    """
    # The kernel takes minutes to compile, and is no faster than torch's fused one.
    if device == "cpu" and offload == "none":
        return True
    builder = adam(offload)
    if can_load(builder):
        return False
    if logs:
        log.warning(
            "DeepSpeed's %s cannot be compiled here (no C++ compiler or ninja): torch's AdamW is"
            " used",
            builder.name,
        )
    return True


def can_load(builder: Any) -> bool:
    """Return True if an extension is installed compiled, or can be compiled here."""
    return _is_built(builder) or (_has_tools() and bool(builder.is_compatible(verbose=False)))


def missing_for_nvme() -> str:
    """Return the software that offload to NVMe lacks on this machine; empty if it has all."""
    _, builder = nvme()
    if _is_built(builder):
        return ""
    if not _has_tools():
        return "a C++ compiler and ninja"
    if not builder.is_compatible(verbose=False):
        return "libaio and its headers (libaio-dev, libaio-devel)"
    return ""


def build_for(tree: Tree) -> None:
    """Compile and load the extensions that an engine with the resolved config ``tree`` needs."""
    device_of_optimizer = get(tree, f"{ZERO}.offload_optimizer.device")
    device_of_parameters = get(tree, f"{ZERO}.offload_param.device")
    if "nvme" in (device_of_optimizer, device_of_parameters):
        for builder in nvme():
            build(builder)
    if get(tree, "optimizer.type") == "Lamb":
        build(lamb())
    elif get(tree, "optimizer.params.torch_adam") is False:
        build(adam(device_of_optimizer or "none"))


def build(builder: Any) -> None:
    """Compile and load one extension. Other processes wait for the one that compiles."""
    if _is_built(builder):
        return
    from torch.utils.cpp_extension import _get_build_directory

    folder = _get_build_directory(builder.name, verbose=False)
    # A lock of our own, which the kernel releases when its process dies; torch's is a file.
    lock = FileLock(f"{folder}.distcore-lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that compiles DeepSpeed's %s", builder.name)
        lock.acquire()
    try:
        _forget_killed_build(folder)
        log.info(
            "loading DeepSpeed's %s; the first time it is compiled, which takes minutes",
            builder.name,
        )
        builder.load(verbose=False)
    finally:
        lock.release()


def _forget_killed_build(folder: str) -> None:
    """Remove torch's lock file of a killed compilation, for which torch would wait for ever.

    Our own lock is held.
    """
    Path(folder, "lock").unlink(missing_ok=True)


def _is_built(builder: Any) -> bool:
    """Return True if DeepSpeed was installed with this extension compiled."""
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(builder.name, False))


def _has_tools() -> bool:
    """Return True if torch can compile an extension here."""
    return bool(shutil.which("c++") and shutil.which("ninja"))
