"""The arithmetic of a run beside its precision: repeatable algorithms, bf16 in attention, TF32."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from distcore.config import RunConfig
from distcore.errors import ConfigError

WORKSPACE, REPEATABLE = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""An environment variable, and the values with which products of matrices are the same in every run."""


@contextmanager
def arithmetic_of(config: RunConfig) -> Iterator[None]:
    """Have torch compute as the config says inside the ``with`` block.

    Raises ConfigError, one line, for an operation without a repeatable algorithm on its device.
    """
    with _force_determinism(config), _allow_bf16_attention(config), _allow_tf32(config):
        yield


@contextmanager
def _force_determinism(config: RunConfig) -> Iterator[None]:
    """Restrict torch to algorithms that repeat bit for bit inside the ``with`` block, if the config asks for it.

    Raises ConfigError, one line, for an operation of the model without such an algorithm on its device.
    """
    if not config.deterministic:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    chosen, set_here = torch.backends.cudnn.benchmark, WORKSPACE not in os.environ
    os.environ.setdefault(WORKSPACE, REPEATABLE[0])
    torch.backends.cudnn.benchmark = False  # it chooses between algorithms by their speed
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        operation, says, _ = str(error).partition(" does not have a deterministic implementation")
        if not says:
            raise
        raise ConfigError(
            f"deterministic: {operation} has no algorithm that repeats itself on {config.device!r}; leave it off, or "
            "change the model"
        ) from None
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = chosen
        if set_here:
            os.environ.pop(WORKSPACE, None)


@contextmanager
def _allow_bf16_attention(config: RunConfig) -> Iterator[None]:
    """Let attention with dropout multiply in bf16 inside the ``with`` block, for a bf16 run on a CPU.

    torch has no fused kernel for it there. Its unfused attention would cast bf16 inputs to fp32 first. The softmax is
    summed in fp32 either way.
    """
    backend = torch.backends.cuda  # where torch keeps the setting of all devices
    if "bf16" not in (config.precision, config.eval_precision) or config.device != "cpu":
        yield
        return
    before = backend.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    backend.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        backend.allow_fp16_bf16_reduction_math_sdp(before)


@contextmanager
def _allow_tf32(config: RunConfig) -> Iterator[None]:
    """Let a GPU multiply fp32 matrices in TF32, of 10 bits, inside the ``with`` block, if the config asks for it."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends] if config.tf32 else []
    for backend in backends if config.tf32 else ():
        backend.fp32_precision = "tf32"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=False):
            backend.fp32_precision = precision


def check_arithmetic(config: RunConfig) -> None:
    """Raise ConfigError if ``deterministic`` conflicts with an environment variable, or ``tf32`` with the device."""
    if config.tf32 and config.device == "cpu":
        raise ConfigError("tf32: a CPU has no such arithmetic; leave it out")
    workspace = os.environ.get(WORKSPACE)
    if config.deterministic and config.device != "cpu" and workspace not in (None, *REPEATABLE):
        raise ConfigError(
            f"deterministic: {WORKSPACE}={workspace} in the environment: must be {' or '.join(REPEATABLE)}; unset it"
        )
