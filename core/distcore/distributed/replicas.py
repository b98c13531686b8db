"""For strategies whose ranks hold the whole model in torch's data-parallel wrapper."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distcore.errors import StrategyError


def has_state_in_buffers(model: nn.Module) -> bool:
    """Return True if ``model`` has persistent buffers, such as running statistics, which ranks must synchronise.

    Other buffers, such as position numbers, are always the same on every rank: to send them in every step would waste
    a collective.
    """
    return not model.state_dict().keys().isdisjoint(dict(model.named_buffers()))


def rebuild_gradient_buckets(wrapped: nn.Module, module: nn.Module) -> None:
    """Run a dummy backward pass, so that gradient buckets are rebuilt before the first step.

    ``wrapped`` is ``module`` in torch's data-parallel wrapper. torch assigns gradients to buckets anew after the first
    backward of a process. With more than two ranks the order in which a gradient is summed depends on its place in a
    bucket: a resumed run would round differently in its first step than a run that was never interrupted.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    own = vars(module).get("forward")  # some wrappers replace the method on the instance
    module.forward = lambda _: torch.stack([parameter.sum() for parameter in trained]).sum()
    try:
        wrapped(trained[0].detach()).backward()  # of an accelerator, where the wrapper cannot be called with no input
    finally:
        del module.forward
        if own is not None:
            module.forward = own
    module.zero_grad()


def check_gradients_averaged(wrapped: Any, module: nn.Module, remedy: str) -> None:
    """Raise StrategyError if the backward pass that ends a step did not average all gradients over the ranks.

    ``wrapped`` is ``module`` in torch's data-parallel wrapper, which by itself complains in the next forward pass, when
    the ranks have stepped apart. ``remedy``: what the user can do, the end of the message.
    """
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        without = next((repr(name) for name, p in trained if p.grad is None), None)
        when = f"{without} got no gradient in this step" if without else "got no gradient in the last backward pass"
        raise StrategyError(f"parameter {when}; {remedy}") from error
