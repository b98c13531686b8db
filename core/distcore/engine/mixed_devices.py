"""Explain torch's errors about mixed devices and kinds of tensors in one line, with a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from distcore.distributed.devices import MIXED
from distcore.errors import StrategyError, TaskError, raised_at
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks

SHARDED = re.compile(
    r"got mixed torch\.Tensor and DTensor|returned an invalid gradient at index \d+ - got \[0\]"
)
"""torch's messages for a shard next to a whole tensor.

And for the gradient of a weight that is not gathered.
"""
UNREAL = "FakeTensor"
"""Part of torch's message for a tensor without values, of a model that is built for its shapes."""

DTYPES = re.compile(
    r"same dtype|dtypes (to )?match|expected scalar type|expect parameter to have scalar type|"
    r"type \(.+\) and \w+ type \(.+\) should be the same"
)
"""How torch says that an operation has tensors of two dtypes."""


@contextmanager
def explain_mixed_devices(run: Run, hooks: Hooks) -> Iterator[None]:
    """Turn torch's "different devices" error into a TaskError, as those of other mixtures.

    Others are a parameter used outside of a sharded model, and a tensor next to weights that an
    engine holds in another dtype. A StrategyError if the strategy left part of the model on another
    device.
    """
    try:
        yield
    except AssertionError as error:
        if UNREAL not in str(error):
            raise
        raise TaskError(
            "task: the loss uses a model that was built to find out its shapes, not the one that"
            f" strategy {hooks.name!r} trains: compute inside of the model's forward, which"
            f" model(...) calls{raised_at(error)}"
        ) from error
    except RuntimeError as error:
        if SHARDED.search(str(error)):
            raise TaskError(
                f"task: strategy {hooks.name!r} shards parameters, and the loss uses one outside of"
                f" model(...): compute with it inside of the model's forward{raised_at(error)}"
            ) from error
        precision = run.config.precision
        if "precision" in run.capabilities.owns and DTYPES.search(str(error)):
            raise TaskError(
                f"task: strategy {hooks.name!r} computes with weights in {precision}, and an"
                " operation has a tensor of another dtype beside one of them"
                f" ({_first_sentence(error)}): have the module make its tensors in the weights'"
                " dtype, such as t.to(self.layer.weight.dtype), or take a strategy that computes"
                f" under autocast, such as --strategy single{raised_at(error)}"
            ) from error
        if run.world.device.type == "cpu" or not MIXED.search(str(error)):
            raise
        message = _first_sentence(error)
        values = chain(run.module.named_parameters(), run.module.named_buffers())
        elsewhere = [
            (name, value.device) for name, value in values if value.device != run.world.device
        ]
        if elsewhere:
            name, device = elsewhere[0]
            raise StrategyError(
                f"strategy {hooks.name!r}: left {len(elsewhere)} of the model's parameters and"
                f" buffers, {name!r} first, on {device} instead of {run.world.device};"
                f" wrap_model() must move them ({message})"
            ) from error
        remedy = "make new tensors on the device of the batch or of a parameter: device=x.device"
        raise TaskError(f"task: {message}; {remedy}{raised_at(error)}") from error


def _first_sentence(error: RuntimeError) -> str:
    return " ".join(str(error).split(". ")[0].split())
