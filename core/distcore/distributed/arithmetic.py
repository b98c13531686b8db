"""The arithmetic of a run, apart from its precision: determinism, bf16 in attention, TF32."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from distcore.config import RunConfig
from distcore.errors import ConfigError
from distcore.plugin.batching.columns import Column, is_windowed, whole

WORKSPACE, REPEATABLE = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""A variable, and its values with which products of matrices are the same in every run."""


@contextmanager
def arithmetic_of(config: RunConfig) -> Iterator[None]:
    """Have torch compute as the config says inside the ``with`` block.

    Raises ConfigError, one line, for an operation without a repeatable algorithm on its device.
    """
    with ExitStack() as undo:
        if config.threads is not None:
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.threads)
        if config.deterministic:
            _force_determinism(undo)
        if "bf16" in (config.precision, config.eval_precision) and config.device == "cpu":
            _allow_bf16_attention(undo)
        if config.tf32:
            convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
            for backend in (torch.backends.cuda.matmul, convolutions):
                undo.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
                backend.fp32_precision = "tf32"
        try:
            yield
        except RuntimeError as error:
            text = " does not have a deterministic implementation"
            operation, is_determinism, _ = str(error).partition(text)
            if not (is_determinism and config.deterministic):
                raise
            raise ConfigError(
                f"deterministic: {operation} has no algorithm that repeats itself on"
                f" {config.device!r}; leave it off, or change the model"
            ) from None


@contextmanager
def attention_of(device: torch.device, lengths: Column) -> Iterator[None]:
    """Keep torch from cuDNN's attention inside the block, unless nearly all rows have one length.

    cuDNN's is the fastest on an H200, but plans for 1.5 s for each shape of a batch that it did not
    see before.
    """
    backend = torch.backends.cuda
    before = device.type == "cuda" and backend.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    with ExitStack() as undo:
        if before and not _is_steady(lengths):
            undo.callback(backend.enable_cudnn_sdp, True)
            backend.enable_cudnn_sdp(False)
        yield


def _is_steady(lengths: Column) -> bool:
    """Return True if 99 % of the rows have one length, as far as that is known without reading."""
    if is_windowed(lengths) or not len(lengths):
        return False
    _, counts = np.unique(whole(lengths), return_counts=True)
    return bool(counts.max() >= 0.99 * len(lengths))


def _force_determinism(undo: ExitStack) -> None:
    """Have torch use repeatable algorithms until ``undo`` is closed."""
    cudnn = torch.backends.cudnn
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    undo.callback(torch.use_deterministic_algorithms, was_on, warn_only=warned_only)
    undo.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
    if WORKSPACE not in os.environ:
        os.environ[WORKSPACE] = REPEATABLE[0]
        undo.callback(os.environ.pop, WORKSPACE, None)
    cudnn.benchmark = False  # it chooses between algorithms by their speed
    torch.use_deterministic_algorithms(True)


def _allow_bf16_attention(undo: ExitStack) -> None:
    """Let attention with dropout multiply in bf16 on a CPU.

    torch has no fused kernel for it there. Its unfused attention would cast bf16 inputs to fp32
    first. The softmax is summed in fp32 either way.
    """
    backend = torch.backends.cuda  # where torch keeps the setting of all devices
    before = backend.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    undo.callback(backend.allow_fp16_bf16_reduction_math_sdp, before)
    backend.allow_fp16_bf16_reduction_math_sdp(True)


def kind_of_arithmetic() -> dict[str, str]:
    """Return what decides how this machine rounds, apart from the config and the threads."""
    return {
        "torch": torch.__version__,
        "processor": platform.machine(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
    }


def check_arithmetic(config: RunConfig) -> None:
    """Raise ConfigError if an environment variable conflicts with ``deterministic``.

    Also for ``tf32`` on a device without this arithmetic.
    """
    if config.tf32 and config.device == "cpu":
        raise ConfigError("tf32: a CPU has no such arithmetic; leave it out")
    workspace = os.environ.get(WORKSPACE)
    if config.deterministic and config.device != "cpu" and workspace not in (None, *REPEATABLE):
        raise ConfigError(
            f"deterministic: {WORKSPACE}={workspace} in the environment: must be"
            f" {' or '.join(REPEATABLE)}; unset it"
        )
