"""Refuse gradients that a loss or a metric takes itself where the strategy cannot compute them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distcore.errors import TaskError
from distcore.plugin.strategy.hooks import Hooks

ARGUMENTS = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
"""The first arguments of ``torch.autograd.grad``, which may come without their names."""

OUTSIDE = ("torch", "distcore")
"""Packages whose calls pass: torch's compiler, and a loss over the whole batch, whose leaves no backend has seen."""


@contextmanager
def refuse_inner_gradients(hooks: Hooks) -> Iterator[None]:
    """Raise TaskError inside the ``with`` block for ``torch.autograd.grad`` beyond what the strategy declares.

    Its backend may compute other gradients afterwards, without an error. Calls of torch itself and of the core pass.
    """
    allowed = hooks.capabilities.inner_gradients
    if allowed == "all":
        yield
        return
    original = torch.autograd.grad

    def refused(*arguments: Any, **named: Any) -> Any:
        given = dict(zip(ARGUMENTS, arguments, strict=False)) | named
        create_graph = bool(given.get("create_graph"))
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] not in OUTSIDE and (allowed == "none" or create_graph):
            what = "torch.autograd.grad" + ("(create_graph=True)" if create_graph else "")
            raise TaskError(
                f"task: a loss or a metric calls {what}, and strategy {hooks.name!r} with these options cannot compute "
                "such gradients; take one that can, such as --strategy single"
            )
        return original(*arguments, **named)

    torch.autograd.grad = refused
    try:
        yield
    finally:
        torch.autograd.grad = original
