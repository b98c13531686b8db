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
"""Packages whose calls pass: torch's compiler, and a loss over the whole batch, whose
leaves no backend has seen.
"""
LIKE_A_USERS = "distcore.testing."
"""Modules of the core whose calls do not pass: problems of the laws, which stand
for a user's tasks.
"""


@contextmanager
def refuse_inner_gradients(hooks: Hooks) -> Iterator[None]:
    """Raise TaskError inside the ``with`` block for ``torch.autograd.grad`` beyond
    what the strategy declares.

    Its backend may compute other gradients afterwards, without an error.
    """
    allowed = hooks.capabilities.inner_gradients
    if allowed == "all":
        yield
        return

    def refuse(create_graph: bool) -> None:
        if allowed != "none" and not create_graph:
            return
        what = "torch.autograd.grad" + ("(create_graph=True)" if create_graph else "")
        raise TaskError(
            f"task: a loss or a metric calls {what}, and strategy {hooks.name!r} with these options"
            " cannot compute such gradients; take one that can, such as --strategy single"
        )

    with hear_inner_gradients(refuse):
        yield


@contextmanager
def hear_inner_gradients(heard: Callable[[bool], None]) -> Iterator[None]:
    """Call ``heard(create_graph)`` before each call of ``torch.autograd.grad``
    inside the ``with`` block.

    Calls of torch itself and of the core are not heard; those of the laws' problems are.
    """
    original = torch.autograd.grad

    def listening(*arguments: Any, **named: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] not in OUTSIDE or caller.startswith(LIKE_A_USERS):
            given = dict(zip(ARGUMENTS, arguments, strict=False)) | named
            heard(bool(given.get("create_graph")))
        return original(*arguments, **named)

    torch.autograd.grad = listening
    try:
        yield
    finally:
        torch.autograd.grad = original
