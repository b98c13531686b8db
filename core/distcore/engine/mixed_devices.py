"""Explain torch's "different devices" error in one line: where it is raised, and who must move a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from distcore.distributed.devices import MIXED
from distcore.errors import StrategyError, TaskError, raised_at
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks


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
        how = "make new tensors on the device of the batch or of a parameter: device=x.device"
        raise TaskError(f"task: {said}; {how}{raised_at(error)}") from error
