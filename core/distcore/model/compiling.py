"""``torch.compile`` for a run's model: the whole of it, or each of its repeated blocks.

The ``forward`` of a module is compiled, and the module is not wrapped. Parameters keep their names,
and a backend's module hooks, for example to gather weights, stay outside of the compiled code.
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
"""The compiler for the code of torch.compile: environment variable, usual name, and kind."""


def compile_mode(config: RunConfig, declared: Capabilities) -> str:
    """Return the mode of compilation: ``config.compile``, as far as the strategy supports it.

    A strategy that works between the blocks compiles each block instead of the whole model. Raises
    ConfigError if the strategy cannot compile, or if the compiler is missing.
    """
    if config.compile == "off":
        return config.compile
    if not declared.compiles:
        why = declared.why_not_compiled or "does not declare that it can be compiled"
        raise ConfigError(
            f"compile = {config.compile!r}: strategy {config.strategy!r} {why}; use --compile off"
        )
    if missing := missing_compiler(config.device):
        raise ConfigError(f"compile = {config.compile!r}: {missing}, or use --compile off")
    return config.compile if config.compile in declared.compiles else "regions"


def missing_compiler(device: str) -> str:
    """Return the missing compiler for a type of device, with a remedy; empty if it is installed."""
    variable, usual, kind = ON_CPU if device == "cpu" else ON_ACCELERATOR
    name = os.environ.get(variable) or usual
    if shutil.which(name.split()[0]) is None:
        return (
            f"needs {kind} compiler, and there is no {name} here: install one or name it by"
            f" {variable}"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "needs the header files of Python (Python.h): install python3-dev"
    if device != "cpu" and find_spec("triton") is None:
        return f"needs triton on the device {device}: pip install triton"
    return ""


def compile_model(config: RunConfig, module: nn.Module) -> Compilations:
    """Set ``module``, or its blocks, to compile on the first call, as ``config.compile`` says.

    Returns the counts of compilations.

    Lengths may change from batch to batch without recompilation: all input sizes are dynamic,
    except 0 and 1. Random numbers, such as dropout, are the same as without compilation. Raises
    ConfigError if there are no repeated blocks.
    """
    counts = Compilations()
    if config.compile == "off":
        return counts
    parts = [module] if config.compile == "on" else outermost(module, repeated_classes(module))
    if not parts:
        raise ConfigError(
            f"compile = 'regions': {type(module).__name__} has no repeated blocks; use --compile on"
        )
    _count(counts)
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=True, options={"fallback_random": True})
    return counts


def _count(counts: Compilations) -> None:
    """Count torch's compilations in this process in ``counts``, as long as that object lives."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler  # slow to import

    alive = weakref.ref(counts)
    started = 0.0

    def begin(compilation: Any) -> None:
        nonlocal started
        started = time.perf_counter()
        current = alive()
        if current is None or compilation.callback_trigger is not CallbackTrigger.DYNAMO:
            return
        current.compilations += 1
        # An id is FRAME/NUMBER: the first compilation of a frame has the number 0.
        current.recompilations += not str(compilation.compile_id).endswith("/0")

    def end(_: Any) -> None:
        if (current := alive()) is not None:
            current.seconds += time.perf_counter() - started

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
