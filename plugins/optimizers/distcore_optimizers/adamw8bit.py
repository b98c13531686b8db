"""``adamw8bit``: AdamW with 2.1 bytes per parameter for moments, the same for any rank count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distcore import ParameterGroup
from distcore_optimizers.deferred import Deferred
from distcore_optimizers.eight_bits import (
    Encoded,
    Levels,
    is_encoded,
    root_levels,
    signed_levels,
    zeros,
)

DecayRate = Annotated[float, Field(ge=0, lt=1)]
"""Part of a running mean that a step keeps."""
AT_ONCE = 2**22
"""Elements of a parameter that are stepped at once. Only their moments are in fp32 meanwhile."""


@dataclass(frozen=True, kw_only=True)
class AdamW8bit:
    """AdamW with 8 bits for each moment of a matrix: 2.1 bytes per parameter instead of 8.

    Moments of vectors, and of matrices whose rows are shorter than 80, stay in fp32.
    Checkpoints hold AdamW's moments.
    """

    elementwise: ClassVar = False

    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Fraction of a weight that each step subtracts, per unit of learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of the step, against division by zero."""

    def build(self, module: nn.Module, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return EncodedAdamW(groups, betas=self.betas, eps=self.eps)


class EncodedAdamW(torch.optim.Optimizer):
    """AdamW on plain tensors and on DTensors with whole rows.

    Each rank keeps the state of its own rows.

    The second moment is kept as its root, which spans half as many decades. The state of a matrix
    is ``step``, ``codes``, ``scales``, ``root_codes`` and ``root_scales``; others have ``step``,
    ``exp_avg`` and ``exp_avg_sq``.
    """

    def __init__(
        self, params: list[ParameterGroup], betas: tuple[float, float], eps: float
    ) -> None:
        """Take groups that have their rates; ``betas`` and ``eps`` are for groups without them."""
        super().__init__(params, {"betas": betas, "eps": eps, "weight_decay": 0.0})
        # One table of levels for each device.
        self._signed = cache(signed_levels)
        self._roots = cache(root_levels)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the parameters that have a gradient; like torch, call ``closure`` first."""
        loss = closure and torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weight = _local_rows(parameter)
                gradient = _local_rows(parameter.grad)
                self._step(weight, gradient, self._state_of(parameter), group)
        return loss

    @torch.no_grad()
    def saved_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return AdamW's state of the parameter; a moment is decoded when it is read."""
        state = self.state.get(parameter)
        if not state:
            return {}
        mean, square = self._moments(parameter, state)
        return {
            "step": state["step"],
            "exp_avg": _like(parameter, mean),
            "exp_avg_sq": _like(parameter, square),
        }

    @torch.no_grad()
    def load_saved_state(self, parameter: Tensor, saved: dict[str, Tensor]) -> None:
        """Replace the state of the parameter by AdamW's."""
        self.state.pop(parameter, None)
        state = self._state_of(parameter)
        state["step"].copy_(saved["step"])
        mean = _local_rows(saved["exp_avg"])
        square = _local_rows(saved["exp_avg_sq"])
        if "codes" not in state:
            state["exp_avg"].copy_(mean)
            state["exp_avg_sq"].copy_(square)
            return
        device = state["codes"].device
        for rows in _pieces(mean):
            self._store(state, rows, mean[rows].to(device))
            # In double: torch's root in fp32 may be off by a digit, which would change the scale.
            root = square[rows].to(device).double().sqrt_().float()
            self._store(state, rows, root, "root_")

    def _moments(self, parameter: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return AdamW's two moments of this rank's rows, fp32; encoded ones are deferred."""
        if "codes" not in state:
            return state["exp_avg"], state["exp_avg_sq"]

        def decode_square() -> Tensor:
            return self._decode_all(state, "root_").square_()

        local = _local_rows(parameter)
        mean = Deferred(partial(self._decode_all, state, ""), local.shape, local.device)
        square = Deferred(decode_square, local.shape, local.device)
        return mean, square

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter, of this rank's rows; zeros before its first step."""
        state: dict[str, Tensor] = self.state[parameter]
        # Before the state is looked at, since a DTensor without whole rows is refused.
        local = _local_rows(parameter)
        if state:
            return state
        state["step"] = torch.tensor(0.0)
        if is_encoded(parameter.shape):
            state["codes"], state["scales"] = zeros(local.shape, local.device)
            state["root_codes"], state["root_scales"] = zeros(local.shape, local.device)
        else:
            state["exp_avg"] = torch.zeros_like(local, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(local, dtype=torch.float32)
        return state

    def _step(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: ParameterGroup
    ) -> None:
        """Step this rank's rows of a parameter; only a piece of the moments is decoded at once."""
        state["step"] += 1
        update = partial(_update, group=group, count=state["step"].double())
        if "codes" not in state:
            update(weight, gradient.float(), state["exp_avg"], state["exp_avg_sq"])
            return
        for rows in _pieces(weight):
            mean = self._decode(state, rows)
            square = self._decode(state, rows, "root_").square_()
            root = update(weight[rows], gradient[rows].float(), mean, square)
            self._store(state, rows, mean)
            self._store(state, rows, root, "root_")

    def _levels(self, kind: str, device: torch.device) -> Levels:
        """Return the levels of roots for ``kind`` "root_", of first moments for ""."""
        if kind == "root_":
            return self._roots(device)
        return self._signed(device)

    def _decode(self, state: dict[str, Tensor], rows: slice, kind: str = "") -> Tensor:
        """Return one moment's ``rows`` in fp32; ``kind``: see ``_levels``."""
        codes = state[f"{kind}codes"][rows]
        scales = state[f"{kind}scales"][rows]
        return self._levels(kind, codes.device).decode(Encoded(codes, scales))

    def _store(self, state: dict[str, Tensor], rows: slice, values: Tensor, kind: str = "") -> None:
        """Encode one moment's ``rows`` into the state; ``kind``: see ``_levels``."""
        encoded = self._levels(kind, values.device).encode(values)
        state[f"{kind}codes"][rows], state[f"{kind}scales"][rows] = encoded

    def _decode_all(self, state: dict[str, Tensor], kind: str) -> Tensor:
        """Return one moment in fp32, decoded piece by piece as in a step."""
        values = torch.empty_like(state[f"{kind}codes"], dtype=torch.float32)
        for rows in _pieces(values):
            values[rows] = self._decode(state, rows, kind)
        return values


def _update(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    group: ParameterGroup,
    count: Tensor,
) -> Tensor:
    """Step ``weight`` and its moments in place like AdamW; return the second moment's root."""
    beta_of_mean, beta_of_square = group["betas"]
    learning_rate = group["lr"]
    mean.lerp_(gradient, 1 - beta_of_mean)
    square.mul_(beta_of_square).addcmul_(gradient, gradient, value=1 - beta_of_square)
    root = square.sqrt()
    weight.mul_(1 - learning_rate * group["weight_decay"])
    # The moments begin at zero: without the corrections the first steps would be too small.
    corrected_rate = learning_rate / (1 - beta_of_mean**count)
    correction_of_root = (1 - beta_of_square**count).sqrt()
    denominator = (root / correction_of_root).add_(group["eps"])
    weight.sub_(mean / denominator * corrected_rate)
    return root


def _pieces(tensor: Tensor) -> Iterator[slice]:
    """Yield ranges of rows with about ``AT_ONCE`` elements."""
    # At least 1: a row may have no elements.
    row_length = max(1, tensor.shape[1:].numel())
    rows = max(1, AT_ONCE // row_length)
    for start in range(0, len(tensor), rows):
        yield slice(start, start + rows)


def _local_rows(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor; raises ValueError if ranks have parts of rows."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    shards = [placement for placement in tensor.placements if placement.is_shard()]
    if not all(shard.is_shard(0) for shard in shards):
        raise ValueError(
            f"a DTensor with placements {tensor.placements}: adamw8bit needs whole rows"
        )
    return tensor.to_local().detach()


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return this rank's part of a moment as a tensor that is sharded like its parameter."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
