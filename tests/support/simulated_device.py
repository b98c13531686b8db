"""A simulated accelerator, ``sim``, for tests: built once by torch's extension loader, from ``simulated/device.cpp``.

``make`` changes the process for good, since torch has one such device per process: call it in a process of its own.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend
from torch.utils.cpp_extension import load

KIND = "sim"
SOURCE = Path(__file__).parent / "simulated/device.cpp"


def missing() -> str | None:
    """Say what this machine lacks to build it."""
    return next((f"there is no {tool} here" for tool in ("c++", "ninja") if shutil.which(tool) is None), None)


def make() -> dict[str, int]:
    """Build the device unless it was built before, and tell torch of it; return what it has counted so far."""
    native = load("distcore_sim", [str(SOURCE)], extra_cflags=["-O1", "-g0"])
    rename_privateuse1_backend(KIND)
    native.start()
    torch._register_device_module(KIND, _module(native))  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend()
    counted: dict[str, int] = native.counts()
    return counted


def _module(native: Any) -> ModuleType:
    """What torch has as ``torch.cuda`` for another kind."""
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
    found: ModuleType = module
    return found
