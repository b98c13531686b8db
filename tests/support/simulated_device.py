"""A simulated accelerator, ``sim``, for tests: built once by torch's
extension loader, from ``simulated/device.cpp``.

A process whose PYTHONPATH has ``PATHS`` on it knows the device from ``import torch`` on, as it
would know one of a maker whose package torch finds by its entry point. Ranks connect over gloo, by
copies to main memory and back.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

KIND = "sim"
SOURCE = Path(__file__).parent / "simulated/device.cpp"
PATHS = os.pathsep.join(map(str, (SOURCE.parents[1], SOURCE.parent)))
"""The folders of this module, and of the entry point ``torch.backends``."""
TOOLS = os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)))
"""Paths to search for a compiler and for ninja, which may be installed next to Python."""


def missing() -> str | None:
    """Return what this machine lacks to build the device."""
    lacking = [tool for tool in ("c++", "ninja") if shutil.which(tool, path=TOOLS) is None]
    return f"there is no {' and no '.join(lacking)} here" if lacking else None


def make() -> None:
    """Build the device unless it was built before, and tell torch of it, for good; torch calls
    this at its import.
    """
    import torch
    import torch.distributed as dist
    from torch.utils.backend_registration import (
        generate_methods_for_privateuse1_backend,
        rename_privateuse1_backend,
    )

    native = build()
    rename_privateuse1_backend(KIND)
    native.start()
    torch._register_device_module(KIND, _module(native))  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("simgloo", _group, devices=[KIND])


def build() -> Any:
    """Return the compiled module, made for this source and this torch."""
    import torch
    from filelock import FileLock
    from torch.utils.cpp_extension import get_default_build_root, load

    digest = hashlib.sha256(
        SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()
    ).hexdigest()[:12]
    folder = Path(get_default_build_root(), f"distcore_sim_{digest}")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = TOOLS
    with FileLock(folder / "build.lock"):
        # torch's own, which outlives a build that was killed
        (folder / "lock").unlink(missing_ok=True)
        return load(
            folder.name, [str(SOURCE)], extra_cflags=["-O0", "-g0"], build_directory=str(folder)
        )


def _module(native: Any) -> ModuleType:
    """Return the device module, the counterpart of ``torch.cuda``."""
    import torch

    module: Any = ModuleType(f"torch.{KIND}")
    module.counts = native.counts
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module.synchronize = lambda device=None: None
    module.manual_seed = module.manual_seed_all = native.seed
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.is_bf16_supported = lambda: True
    module.max_memory_allocated = lambda device=None: native.counts()["peak"]
    module._is_in_bad_fork = lambda: False
    sys.modules[module.__name__] = module
    typed: ModuleType = module
    return typed


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a process group for tensors on the device; torch calls
    this in ``init_process_group``.
    """
    import torch
    import torch.distributed

    dist: Any = torch.distributed  # whose stubs have no words for a process group of one's own
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def done(result: Any) -> Any:
        future: Any = torch.futures.Future(devices=[torch.device(KIND, 0)])
        future.set_result(result)
        c10d: Any = torch._C._distributed_c10d
        return c10d._create_work_from_future(future)

    class Wrapped(dist.ProcessGroup):  # type: ignore[misc]
        """The collectives that strategies need, complete when the call returns."""

        supports_splitting = False

        def getBackendName(self) -> str:
            return "simgloo"

        def _get_backend(self, device: Any) -> Any:
            return self

        def allreduce(self, tensors: Any, options: Any = None) -> Any:
            sums = [tensor.cpu() for tensor in tensors]
            gloo.allreduce(sums, options or dist.AllreduceOptions()).wait()
            for tensor, total in zip(tensors, sums, strict=True):
                tensor.copy_(total)
            return done(tensors)

        def broadcast(self, tensors: Any, options: Any = None) -> Any:
            sent = [tensor.cpu() for tensor in tensors]
            gloo.broadcast(sent, options or dist.BroadcastOptions()).wait()
            for tensor, value in zip(tensors, sent, strict=True):
                tensor.copy_(value)
            return done(tensors)

        def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
            parts = [
                [torch.empty_like(tensor, device="cpu") for tensor in tensors]
                for tensors in outputs
            ]
            gloo.allgather(
                parts, [tensor.cpu() for tensor in inputs], options or dist.AllgatherOptions()
            ).wait()
            for tensors, values in zip(outputs, parts, strict=True):
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            return done(outputs)

        def barrier(self, options: Any = None, **_: Any) -> Any:
            gloo.barrier(dist.BarrierOptions()).wait()
            return done(None)

    return Wrapped(rank, size)
