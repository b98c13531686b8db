"""Measure the workspace that a kernel allocates while it computes, which
depends on the processor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from distcore.launchers.processes import close_stderr

MEASURED = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
"""Kernels whose workspace counts: oneDNN reorders the weights of a convolution, in backward
several times a thread.
"""
LARGEST = 2**30
"""Bytes of operands up to which a kernel is run to be measured."""


def workspace(kernel: Any, operands: Any, threads: int) -> int:
    """Return the bytes that one of ``MEASURED`` allocates besides its results, with ``threads``.

    Of ``operands``, any nesting, the tensors' values do not count; they may have none. Returns 0
    for other kernels, and
    for one that cannot be run here: its operands have more than ``LARGEST`` bytes, or there is
    no memory for it.
    """
    if kernel not in MEASURED:
        return 0
    leaves, structure = tree_flatten(operands)
    if sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)) > LARGEST:
        return 0
    return _measure(kernel, tuple(map(_Shape.of, leaves)), structure, threads)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor without its values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(operand: Any) -> Any:
        """Return the shape of a tensor, and anything else as it is."""
        if not isinstance(operand, Tensor):
            return operand
        return _Shape(operand.size(), operand.stride(), operand.dtype)

    def zeros(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype).zero_()


@cache
def _measure(kernel: Any, shapes: tuple[Any, ...], structure: TreeSpec, threads: int) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with unset_fake_temporarily():
            leaves = [shape.zeros() if isinstance(shape, _Shape) else shape for shape in shapes]
            return _beside_results(lambda: kernel(*tree_unflatten(leaves, structure)))
    except RuntimeError:  # torch's allocator has no type of its own for this
        return 0
    finally:
        torch.set_num_threads(before)


def _beside_results(compute: Callable[[], object]) -> int:
    """Return the peak bytes of torch's CPU allocator during ``compute``, without the
    bytes of its results.
    """
    with (
        close_stderr(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        results = compute()
    with TemporaryDirectory(prefix="distcore-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    del results  # until here it lived
    memory = sorted(
        (event for event in events if event.get("name") == "[memory]"),
        key=lambda event: event["ts"],
    )
    held = list(accumulate(event["args"]["Bytes"] for event in memory))
    return max(held) - held[-1] if held else 0
