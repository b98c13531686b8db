"""Explain torch's "different devices" error in one line: where it is raised, and who must move a tensor."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch

from distcore.distributed.devices import MIXED
from distcore.errors import StrategyError, TaskError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks

TORCH = str(Path(torch.__file__).parent)


@contextmanager
def explain_mixed_devices(run: Run, hooks: Hooks) -> Iterator[None]:
    """Turn torch's "different devices" error into a TaskError.

    It becomes a StrategyError if the strategy left part of the model on another device. On a CPU no error changes.
    """
    try:
        yield
    except RuntimeError as error:
        if run.world.device.type == "cpu" or not MIXED.search(str(error)):
            raise
        said = " ".join(str(error).split(". ")[0].split())
        values = chain(run.module.named_parameters(), run.module.named_buffers())
        elsewhere = [(name, value.device) for name, value in values if value.device != run.world.device]
        if elsewhere:
            (name, device), count = elsewhere[0], len(elsewhere)
            raise StrategyError(
                f"strategy {hooks.name!r}: left {count} of the model's parameters and buffers, {name!r} first, on "
                f"{device} instead of {run.world.device}; wrap_model() must move them ({said})"
            ) from error
        raise TaskError(
            f"{_place(error)}: {said}; make new tensors on the device of the batch or of a parameter: device=x.device"
        ) from error


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(TORCH)]
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}()"
