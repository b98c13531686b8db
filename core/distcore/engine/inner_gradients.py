"""Refuse gradients that a loss or a metric takes itself where the strategy cannot compute them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distcore.errors import TaskError
from distcore.plugin.strategy.hooks import Hooks

ARGUMENTS = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
"""The first arguments of ``torch.autograd.grad``, which may come without their names."""

OUTSIDE = ("torch", "distcore")
"""Packages whose calls pass: torch's compiler, and a loss over the whole batch.

No backend has seen the leaves of such a loss.
"""
LIKE_A_USERS = "distcore.testing."
"""Modules of the core whose calls do not pass: problems of the laws, in place of a user's tasks."""


@contextmanager
def refuse_inner_gradients(hooks: Hooks) -> Iterator[None]:
    """Raise TaskError in the block for ``torch.autograd.grad`` beyond what the strategy declares.

    Its backend may compute other gradients afterwards, without an error.
    """
    allowed = hooks.capabilities.inner_gradients
    if allowed == "all":
        yield
        return

    def refuse(create_graph: bool) -> None:
        if allowed != "none" and not create_graph:
            return
        call = "torch.autograd.grad" + ("(create_graph=True)" if create_graph else "")
        raise TaskError(
            f"task: a loss or a metric calls {call}, and strategy {hooks.name!r} with these options"
            " cannot compute such gradients; take one that can, such as --strategy single"
        )

    with hear_inner_gradients(refuse):
        yield


@contextmanager
def hear_inner_gradients(heard: Callable[[bool], None]) -> Iterator[None]:
    """Call ``heard(create_graph)`` before each call of ``torch.autograd.grad`` in the block.

    Calls of torch itself and of the core are not heard; those of the laws' problems are.
    """
    original = torch.autograd.grad

    def listening(*arguments: Any, **named: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        is_outside = caller.partition(".")[0] not in OUTSIDE
        if is_outside or caller.startswith(LIKE_A_USERS):
            by_name = dict(zip(ARGUMENTS, arguments, strict=False)) | named
            heard(bool(by_name.get("create_graph")))
        return original(*arguments, **named)

    torch.autograd.grad = listening
    try:
        yield
    finally:
        torch.autograd.grad = original
