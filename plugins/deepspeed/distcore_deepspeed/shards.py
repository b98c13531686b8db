"""Where DeepSpeed keeps the fp32 weights and the optimizer's state of each parameter, as pieces by neutral name.

Each stage has its own books: 0 keeps the parameters themselves, 1 and 2 flat buffers cut in as many partitions as
there are ranks, 3 partitions of each parameter. DeepSpeed's ``safe_get_full_*`` gather what they return, miss the
second parameter group's state and know no step count, so we read the books.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distcore import Piece, Run, SavedState, State, defaults

STEP = "step"


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank keeps of one trained parameter: ``count`` elements, maybe none, of a buffer that is optimized."""

    name: str
    master: Tensor
    """The fp32 tensor that the optimizer steps; its key in the optimizer's state."""
    offset: int
    """Index in ``master`` of the first element."""
    start: int
    """Index in the flattened parameter of the same element."""
    count: int
    shape: tuple[int, ...]
    whole: bool
    """True if every rank keeps all of it."""

    def of(self, buffer: Tensor) -> Tensor:
        """The part's elements of ``buffer``, which is laid out as ``master`` is; a view."""
        return buffer.detach().reshape(-1).narrow(0, self.offset, self.count)

    def held(self, buffer: Tensor) -> Tensor | Piece:
        """The same for a checkpoint."""
        values = self.of(buffer)
        return values.view(self.shape) if self.whole else Piece(values, self.start, self.shape)


def save(run: Run) -> State:
    """Master weights and optimizer state of this rank's parts; the rest of the model as it is."""
    state: State = dict(_rest(run))
    for part in parts(run):
        kept = _kept(run, part.master)
        if STEP in kept:
            state[f"optimizer/{part.name}/{STEP}"] = torch.as_tensor(float(kept.pop(STEP)))
        if part.count:
            state[f"model/{part.name}"] = part.held(part.master)
            state |= {f"optimizer/{part.name}/{key}": part.held(value) for key, value in kept.items()}
    return state


@torch.no_grad()
def load(run: Run, saved: SavedState) -> None:
    """Put the saved weights into the model and its master copies, and the saved state into the optimizer."""
    for name, tensor in defaults.model_state(run).items():
        _write(tensor, name, saved)
    for part in parts(run):
        if part.count:
            part.of(part.master).copy_(saved.piece(f"model/{part.name}", part.start, part.count))
    if run.optimizer is not None:
        _load_optimizer(run.optimizer, list(parts(run)), saved)


def steps_done(saved: SavedState) -> int:
    """Optimizer steps that a checkpoint's optimizer has taken."""
    return int(max((float(saved[name]) for name in saved if name.endswith(f"/{STEP}")), default=0))


@torch.no_grad()
def keep_exact(run: Run, weights: Mapping[str, Tensor]) -> None:
    """Give the master copies the fp32 ``weights``, which DeepSpeed took from a model already rounded to 16 bits."""
    for part in parts(run):
        part.of(part.master).copy_(weights[part.name].reshape(-1).narrow(0, part.start, part.count))


def parts(run: Run) -> Iterator[Part]:
    """This rank's parts, in the same order on every rank."""
    optimizer, names = getattr(run.model, "optimizer", None), {p: name for name, p in run.module.named_parameters()}
    for masters, groups, place in _books(run, optimizer):
        for master, group in zip(masters, groups, strict=True):
            for parameter in group:
                offset, start, count = place(parameter)
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                yield Part(names[parameter], master, offset, start, count, shape, whole=master is parameter)


Place = Callable[[nn.Parameter], tuple[int, int, int]]
"""Offset in the master buffer, start in the parameter, number of elements."""


def _books(run: Run, optimizer: Any) -> Iterator[tuple[list[Tensor], list[list[nn.Parameter]], Place]]:
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        yield optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, lambda p: _partition(optimizer, p)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2
        yield optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, _fragment
    elif hasattr(optimizer, "fp32_groups_flat_partition"):  # stage 1 in bf16
        yield optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, _fragment
    elif run.optimizer is not None:
        trained = [p for group in run.optimizer.param_groups for p in group["params"]]
        yield trained, [[p] for p in trained], lambda p: (0, 0, p.numel())


def _partition(optimizer: Any, parameter: Any) -> tuple[int, int, int]:
    """Stage 3 cuts each parameter in equal partitions; the last ones may be padded, or nothing but padding."""
    _, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = min(size * parameter.ds_process_group.rank(), parameter.ds_numel)
    return offset, start, min(size, parameter.ds_numel - start)


def _fragment(parameter: Any) -> tuple[int, int, int]:
    """Stages 1 and 2 cut the flat buffer of a group, wherever that falls in a parameter."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return 0, 0, 0
    return mapping.hp_fragment_address.start, mapping.lp_fragment_address.start, mapping.hp_fragment_address.numel


def _rest(run: Run) -> Iterator[tuple[str, Tensor | Piece]]:
    """Buffers, and parameters that are not trained."""
    trained = {f"model/{part.name}" for part in parts(run)}
    tensor: Any
    for name, tensor in defaults.model_state(run).items():
        if name in trained:
            continue
        if not hasattr(tensor, "ds_tensor"):
            yield name, tensor.detach()
        elif (local := _local(tensor)) is not None:
            values, start = local
            yield name, Piece(values, start, tuple(tensor.ds_shape))


def _local(parameter: Any) -> tuple[Tensor, int] | None:
    """This rank's partition of a parameter at stage 3, without padding, and its start; ``None`` if it has none."""
    partition = parameter.ds_tensor.detach().reshape(-1)
    start = partition.numel() * parameter.ds_process_group.rank()
    count = min(partition.numel(), parameter.ds_numel - start)
    return (partition.narrow(0, 0, count), start) if count > 0 else None


def _write(tensor: Any, name: str, saved: SavedState) -> None:
    """Write into what forward reads."""
    if not hasattr(tensor, "ds_tensor"):
        tensor.copy_(saved[name])
        return
    if (local := _local(tensor)) is not None:
        values, start = local
        values.copy_(saved.piece(name, start, len(values)))
    if tensor.numel() == tensor.ds_numel:  # small ones stay gathered between steps
        tensor.data.copy_(saved[name])


def _kept(run: Run, master: Tensor) -> dict[str, Any]:
    """The optimizer's state of one master buffer: tensors of its shape, and the step count."""
    assert run.optimizer is not None
    state = run.optimizer.state.get(master, {})
    return {key: value for key, value in state.items() if key == STEP or getattr(value, "shape", None) == master.shape}


def _load_optimizer(optimizer: torch.optim.Optimizer, held: list[Part], saved: SavedState) -> None:
    """Make the state of each master buffer from those of its parts; without any in ``saved``, leave it as it is."""
    by_master: dict[int, list[Part]] = {}
    for part in held:
        by_master.setdefault(id(part.master), []).append(part)
    names = {name for name in saved if name.startswith("optimizer/")}
    for group in by_master.values():
        master = group[0].master
        keys = {key for part in group for key in _keys(names, part.name)} - {STEP}
        if not keys:
            continue
        state: dict[str, Any] = {key: torch.zeros_like(master) for key in keys}
        for part in group:
            for key in keys:
                if part.count and (name := f"optimizer/{part.name}/{key}") in names:
                    part.of(state[key]).copy_(saved.piece(name, part.start, part.count))
        steps = [f"optimizer/{part.name}/{STEP}" for part in group]
        # One buffer has one count; a parameter that took no part in some steps has a smaller one of its own.
        count = max((float(saved[name]) for name in steps if name in names), default=0.0)
        optimizer.state[master] = state | {STEP: _step(optimizer, master, count)}


def _keys(names: set[str], parameter: str) -> Iterator[str]:
    prefix = f"optimizer/{parameter}/"
    return (name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _step(optimizer: torch.optim.Optimizer, master: Tensor, count: float) -> Tensor | int:
    """A step count as the optimizer keeps it: a tensor in torch's, an int in DeepSpeed's."""
    if not type(optimizer).__module__.startswith("torch."):
        return int(count)
    group = optimizer.param_groups[0]
    on_device = group.get("fused") or group.get("capturable")
    return torch.tensor(count, device=master.device if on_device else "cpu")
