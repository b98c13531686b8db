"""Send the gradients of a module once in a step, also if a forward pass calls it several times.

A sharded module sends what it has at the end of each of its calls in the backward pass. After
micro-batches that were not sent, the first of these ends sends what they left, and a later one the
rest: twice the traffic, and a sum of two rounded sums. So only the end of a module's last call may
send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

SEND_REST = "send_rest"
"""Name of the method that a module gets to send gradients without computing anything."""


class RepeatedCalls:
    """Watches the sharded modules of a model: those with ``set_requires_gradient_sync``."""

    def __init__(
        self, model: nn.Module, register_forward: Callable[[nn.Module, str], None]
    ) -> None:
        """Watch the sharded modules inside ``model``, and ``model`` itself.

        ``register_forward(module, method)`` lets a method of a module gather and free parameters as
        ``forward`` does.
        """
        self._register_forward = register_forward
        self._is_last = False
        self._open: Counter[nn.Module] = Counter()
        self._unsent: dict[nn.Module, None] = {}  # in an order that all ranks have
        for module in model.modules():
            if hasattr(module, "set_requires_gradient_sync"):
                module.register_forward_hook(self._count_call)

    def begin(self, last: bool) -> None:
        """Begin a micro-batch, or a part of it; a ``last`` one sends what the others left."""
        self._is_last = last

    def finish(self) -> None:
        """End a backward pass: send what is unsent, where a forward call has no part in it."""
        unsent = list(self._unsent)
        self._unsent = {}
        self._open = Counter()
        for module in unsent:
            _set_sends(module, True)
        if not unsent:
            return
        # The end of any backward pass through a sharded module sends the gradients of all modules.
        module = unsent[0]
        if not hasattr(module, SEND_REST):
            setattr(module, SEND_REST, _unchanged)
            self._register_forward(module, SEND_REST)
        device = next(module.parameters()).device
        nothing = torch.zeros((), device=device, requires_grad=True)
        getattr(module, SEND_REST)(nothing).backward()

    def _count_call(self, module: nn.Module, _inputs: object, outputs: object) -> None:
        """Count a call in the forward pass, and notice where the backward pass comes to it."""
        # A recomputation runs inside of a backward pass, and is no call of its own.
        is_recomputation = torch._C._current_graph_task_id() != -1
        if not self._is_last or not torch.is_grad_enabled() or is_recomputation:
            return
        tensors = []
        for value in tree_leaves(outputs):
            if isinstance(value, Tensor) and value.requires_grad:
                tensors.append(value)
        if not tensors:
            return
        calls = self._open
        calls[module] += 1
        has_begun = False

        def begin_backward(_gradient: Tensor) -> None:
            nonlocal has_begun
            if has_begun:
                return
            has_begun = True
            calls[module] -= 1
            is_last_call = calls[module] <= 0
            if is_last_call and module not in self._unsent:
                return  # it was called once: nothing has changed
            if is_last_call:
                del self._unsent[module]
            else:
                self._unsent[module] = None
            _set_sends(module, is_last_call)

        for tensor in tensors:
            tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]


def _set_sends(module: Any, sends: bool) -> None:
    module.set_requires_gradient_sync(sends, recurse=False)


def _unchanged(value: Tensor) -> Tensor:
    return value
