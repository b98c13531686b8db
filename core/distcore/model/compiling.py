"""``torch.compile`` for a run's model: the whole of it, or each of its repeated blocks.

It is the ``forward`` of a module that is compiled, not the module that is wrapped. So parameters keep their names, and
what a backend hooks onto a module, to gather its weights say, stays outside of the compiled code.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distcore.config import RunConfig
from distcore.errors import ConfigError
from distcore.model.blocks import outermost, repeated_classes
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.plugin.strategy.contract import Compilations

ON_CPU, ON_ACCELERATOR = ("CXX", "g++", "a C++"), ("CC", "gcc", "a C")
"""What compiles the code that torch.compile writes: the variable that names it, its usual name, its kind."""


def compile_mode(config: RunConfig, declared: Capabilities) -> str:
    """Return what the strategy compiles of what ``config.compile`` asks for.

    That is each block, where the whole model is asked for and the strategy works between the blocks. Raises
    ConfigError if the strategy can compile nothing, or if the compiler is missing.
    """
    if config.compile == "off":
        return config.compile
    if not declared.compiles:
        why = declared.why_not_compiled or "does not declare that it can be compiled"
        raise ConfigError(f"compile = {config.compile!r}: strategy {config.strategy!r} {why}; use --compile off")
    if missing := missing_compiler(config.device):
        raise ConfigError(f"compile = {config.compile!r}: {missing}, or use --compile off")
    return config.compile if config.compile in declared.compiles else "regions"


def missing_compiler(device: str) -> str:
    """Return what is missing to compile for a type of device, and what to do about it; empty if nothing is."""
    variable, usual, kind = ON_CPU if device == "cpu" else ON_ACCELERATOR
    name = os.environ.get(variable) or usual
    if shutil.which(name.split()[0]) is None:
        return f"needs {kind} compiler, and there is no {name} here: install one or name it by {variable}"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "needs the header files of Python (Python.h): install python3-dev"
    if device != "cpu" and find_spec("triton") is None:
        return f"needs triton on the device {device}: pip install triton"
    return ""


def compile_model(config: RunConfig, module: nn.Module) -> Compilations:
    """Compile what ``config.compile`` says of ``module``, when it is first called; return what will count that.

    Lengths may change from batch to batch without another compilation: all sizes of inputs are variables, but for 0
    and 1. Random numbers, as those of dropout, are the same as without compilation. Raises ConfigError if there are no
    repeated blocks.
    """
    counts = Compilations()
    if config.compile == "off":
        return counts
    parts = [module] if config.compile == "on" else outermost(module, repeated_classes(module))
    if not parts:
        raise ConfigError(f"compile = 'regions': {type(module).__name__} has no repeated blocks; use --compile on")
    _count(counts)
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=True, options={"fallback_random": True})
    return counts


def _count(counts: Compilations) -> None:
    """Count in ``counts``, as long as it is there, what torch compiles in this process."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler  # slow to import

    alive, started = weakref.ref(counts), [0.0]

    def begin(compilation: Any) -> None:
        started[0] = time.perf_counter()
        if (current := alive()) is not None and compilation.callback_trigger is CallbackTrigger.DYNAMO:
            current.compilations += 1
            current.recompilations += not str(compilation.compile_id).endswith("/0")

    def end(_: Any) -> None:
        if (current := alive()) is not None:
            current.seconds += time.perf_counter() - started[0]

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
