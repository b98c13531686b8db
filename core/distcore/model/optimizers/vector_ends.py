"""Step the last elements of tensors as all others, so that shards step as the whole would.

On a CPU torch's fused Adam steps the elements after the last whole vector of a tensor by other
instructions, which round otherwise. So an element could get other bits in a shard than in the whole
tensor. These ends are stepped once more, each in a row of whole vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

WIDTH = 64
"""Elements of a row, a multiple of those of any vector: 16 of fp32, or 32 of 16 bits."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def step_ends_in_vectors(optimizer: torch.optim.Optimizer) -> None:
    """Have ``optimizer``, a fused Adam or AdamW, step the ends of its tensors in whole vectors."""
    ends = _Ends()
    optimizer.register_step_pre_hook(ends.keep)
    optimizer.register_step_post_hook(ends.step)


class _Ends:
    """Hooks around each step of an optimizer."""

    def __init__(self) -> None:
        self._rows_by_group: dict[int, _Rows] = {}
        self._stepped: list[tuple[dict[str, Any], _Rows]] = []

    @torch.no_grad()
    def keep(self, optimizer: torch.optim.Optimizer, _args: object, _named: object) -> None:
        """Copy the ends of weights and moments."""
        self._stepped = []
        for group in optimizer.param_groups:
            parameters = [each for each in group["params"] if _has_end(each)]
            if not parameters:
                continue
            # Not by its number: an engine may step one group after the other, each as the only one.
            first = id(parameters[0])
            rows = self._rows_by_group.get(first)
            if rows is None or rows.parameters != list(map(id, parameters)):
                rows = self._rows_by_group[first] = _Rows(parameters)
            rows.read(parameters, [optimizer.state.get(each, {}) for each in parameters])
            self._stepped.append((group, rows))

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, _args: object, _named: object) -> None:
        """Step the ends again, from before the step, and put them in the place of what it made."""
        stepped, self._stepped = self._stepped, []
        overflow: Tensor | None = getattr(optimizer, "found_inf", None)
        if overflow is not None and overflow.item():
            return  # nothing was stepped
        is_decoupled = isinstance(optimizer, torch.optim.AdamW)
        for group, rows in stepped:
            parameters = [each for each in group["params"] if _has_end(each)]
            states = [optimizer.state[each] for each in parameters]
            rows.step(group, parameters, states, is_decoupled)


class _Rows:
    """Rows with the ends of the parameters of a group; zeros fill up each row."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(map(id, parameters))
        shape = (4, len(parameters), WIDTH)
        self._rows = torch.zeros(shape, dtype=parameters[0].dtype)
        counts = [_local(each).numel() % WIDTH for each in parameters]
        # Views of what is in use of each row, made once: there may be hundreds.
        self._used = [
            [row[:count] for row, count in zip(rows, counts, strict=True)] for rows in self._rows
        ]
        self._ends: list[list[Tensor]] = [[], [], [], []]
        self._pointers: list[list[int]] = [[], [], [], []]

    def read(self, parameters: Sequence[Tensor], states: Sequence[dict[str, Tensor]]) -> None:
        """Copy weights and moments to their rows."""
        self._copy_in(0, parameters)
        for place, name in enumerate(MOMENTS, 2):
            if all(states):
                self._copy_in(place, [state[name] for state in states])
                continue
            self._rows[place].zero_()  # for those that have taken no step yet
            for used, state in zip(self._used[place], states, strict=True):
                if state:
                    used.copy_(_end(_local(state[name])))

    def step(
        self,
        group: dict[str, Any],
        parameters: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        is_decoupled: bool,
    ) -> None:
        """Step the rows, and copy them to the ends of weights and moments."""
        # No views are kept of gradients: these are freed after each step.
        gradients = [_end(_local(each.grad)) for each in parameters if each.grad is not None]
        torch._foreach_copy_(self._used[1], gradients)
        kernel = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
        steps = [state["step"] for state in states]
        # One tensor of all rows is faster, and all parameters mostly have taken as many steps.
        are_equal = bool((torch.stack(steps) == steps[0]).all())
        ends, slopes, means, squares = ([rows] if are_equal else list(rows) for rows in self._rows)
        beta1, beta2 = group["betas"]
        kernel(
            ends,
            slopes,
            means,
            squares,
            [],
            steps[:1] if are_equal else steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=group["maximize"],
        )
        self._copy_out(0, parameters)
        for place, name in enumerate(MOMENTS, 2):
            self._copy_out(place, [state[name] for state in states])

    def _copy_in(self, place: int, tensors: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self._used[place], self._ends_of(place, tensors))

    def _copy_out(self, place: int, tensors: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self._ends_of(place, tensors), self._used[place])

    def _ends_of(self, place: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the last elements of each tensor, in the order in which memory has them.

        Views of tensors that are where they were at the last call are taken again.
        """
        locals_ = [_local(tensor) for tensor in tensors]
        pointers = [local.data_ptr() for local in locals_]
        if pointers != self._pointers[place]:
            self._ends[place] = list(map(_end, locals_))
            self._pointers[place] = pointers
        return self._ends[place]


def _has_end(parameter: Tensor) -> bool:
    """Return True if a CPU steps ``parameter``, and its elements are not all in whole vectors."""
    if parameter.grad is None:
        return False
    local = _local(parameter)
    return local.numel() % WIDTH != 0 and local.device.type == "cpu"


def _local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of ``tensor``."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _end(tensor: Tensor) -> Tensor:
    """Return a view of the elements after the last whole row."""
    count = tensor.numel() % WIDTH
    start = tensor.storage_offset() + tensor.numel() - count
    return tensor.detach().as_strided((count,), (1,), start)
