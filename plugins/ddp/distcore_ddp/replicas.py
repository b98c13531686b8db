"""For strategies whose ranks hold the whole model in torch's data-parallel wrapper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcore import StrategyError

SENDABLE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)
"""Dtypes that each backend of torch can broadcast."""

MARKED_TWICE = re.compile(r"[Pp]arameter at index (\d+).* has been marked as ready twice")
"""torch's message for a parameter of which DDP gets a second gradient in a backward pass."""


def has_state_in_buffers(model: nn.Module) -> bool:
    """Return True if ``model`` has persistent buffers, such as running statistics,
    which ranks must synchronize.

    Other buffers, such as position numbers, are always the same on every rank: to send them in
    every step would waste a collective.
    """
    return not model.state_dict().keys().isdisjoint(dict(model.named_buffers()))


def spare_unsendable_buffers(model: nn.Module) -> None:
    """Keep DDP, which will wrap ``model``, from sending buffers of dtypes that not every
    backend of torch sends.

    Gloo refuses them, such as float8 and int16, before the first step. Ranks build them alike;
    those that forward updates reach the other ranks with each evaluation and checkpoint, where the
    core sends bytes.
    """
    odd = [name for name, buffer in model.named_buffers() if buffer.dtype not in SENDABLE]
    spare: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    spare(model, odd)


def rebuild_gradient_buckets(wrapped: nn.Module, module: nn.Module) -> None:
    """Run a dummy backward pass, so that gradient buckets are rebuilt before the first step.

    ``wrapped`` is ``module`` in torch's data-parallel wrapper. torch rebuilds its gradient buckets
    after a process's first backward. With more than two ranks, the order of summation depends on a
    gradient's place in its bucket. The first step of a resumed run would therefore round
    differently than in an uninterrupted run.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with_sparse_gradients = set()
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            with_sparse_gradients.add(layer.weight)
    own = vars(module).get("forward")  # some wrappers replace the method on the instance
    module.forward = lambda _: sum(
        _real_sum(parameter, parameter in with_sparse_gradients) for parameter in trained
    )
    try:
        # of an accelerator, where the wrapper cannot be called with no input
        wrapped(trained[0].detach()).backward()
    finally:
        del module.forward
        if own is not None:
            module.forward = own
    module.zero_grad()


def _real_sum(parameter: nn.Parameter, sparse: bool) -> torch.Tensor:
    """Return a real scalar whose gradient for ``parameter`` has the layout of those of training."""
    if sparse:  # torch has set a bucket apart for it, which takes no dense gradient
        first = torch.zeros(1, dtype=torch.long, device=parameter.device)
        return nn.functional.embedding(first, parameter, sparse=True).sum()
    return (torch.view_as_real(parameter) if parameter.is_complex() else parameter).sum()


def spare_evaluations(wrapped: Any) -> None:
    """Have no pass of an evaluation through ``wrapped``, a model in torch's
    data-parallel wrapper, send gradients.

    By default each pass with gradients does. One whose metric takes gradients itself would stay in
    wait for a backward
    pass: the first micro-batch of the next step would then be sent at once, and again in the last.
    """
    before: list[bool] = []

    def begin(module: Any, _inputs: object) -> None:
        before.append(module.require_backward_grad_sync)
        if not module.training:
            module.require_backward_grad_sync = False

    def end(module: Any, _inputs: object, _outputs: object) -> None:
        module.require_backward_grad_sync = before.pop()

    wrapped.register_forward_pre_hook(begin)
    wrapped.register_forward_hook(end, always_call=True)


def check_gradients_averaged(wrapped: Any, module: nn.Module, remedy: str) -> None:
    """Raise StrategyError if the backward pass that ends a step did not average all
    gradients over the ranks.

    ``wrapped`` is ``module`` in torch's data-parallel wrapper, whose own error comes only in the
    next forward pass, after ranks took different steps. ``remedy`` ends the message with advice to
    the user.
    """
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        without = next((repr(name) for name, p in trained if p.grad is None), None)
        when = (
            f"{without} got no gradient in this step"
            if without
            else "got no gradient in the last backward pass"
        )
        raise StrategyError(f"parameter {when}; {remedy}") from error


@contextmanager
def explain_second_gradients(module: nn.Module) -> Iterator[None]:
    """Turn DDP's error about a parameter that gets two gradients in a backward pass into one line.

    With ``find_unused`` DDP walks the graph before the pass, and does not see the parts that a
    reentrant checkpoint computes anew inside of it: it takes their parameters for unused.
    """
    try:
        yield
    except RuntimeError as error:
        marked = MARKED_TWICE.search(str(error))
        if marked is None:
            raise
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        raise StrategyError(
            f"parameter {trained[int(marked[1])]!r} got a second gradient in one backward pass, "
            "which find_unused cannot follow: where forward calls torch.utils.checkpoint, say "
            "use_reentrant=False, or --set strategy_options.find_unused=false"
        ) from error
