"""Default implementations of the hooks: of one process, with results joined by ``world.group``.

A strategy that joined torch's process group by ``join_process_group`` has such a group. The
defaults then sum losses, gather rows, save and load sharded tensors in parts, and leave the group
at the end. A strategy may also call them from its own hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from distcore.config import Clip
from distcore.errors import CheckpointError
from distcore.plugin.batching.sampling import BatchPlan, rank_sampler
from distcore.plugin.optimizer import HasSavedState
from distcore.plugin.strategy.contract import (
    ModelSource,
    OptimizerFactory,
    PreparedModel,
    Run,
    Sampler,
    StepResult,
    World,
)
from distcore.plugin.strategy.exact_norm import exact_squared_norm
from distcore.plugin.strategy.extra_state import tensors_of_state
from distcore.plugin.strategy.gradient_norm import scale, squared_norm
from distcore.plugin.strategy.hookspecs import hookimpl
from distcore.plugin.strategy.state import SavedState, State

Reader = Callable[[Tensor, str, SavedState], Tensor]
"""``reader(parameter, name, state)`` returns the optimizer's state ``name`` for ``parameter``."""
_NOTHING = nullcontext()
_OTHER = torch.device("meta")
"""Stands for the device of a gradient that is no plain tensor."""


@hookimpl
def build_model(source: ModelSource) -> nn.Module:
    """Build the whole model on the CPU, in fp32."""
    return source.build()


@hookimpl
def wrap_model(
    run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
) -> PreparedModel:
    """Move the model to the rank's device and build the optimizer over it.

    A run that evaluates has no optimizer.
    """
    model = model.to(run.world.device)
    optimizer = make_optimizer(model) if make_optimizer else None
    return PreparedModel(model=model, optimizer=optimizer)


@hookimpl
def build_sampler(run: Run, plan: BatchPlan) -> Sampler:
    """Return the sampler that gives every data shard its own part of each global batch."""
    return rank_sampler(plan, run.world.shard, run.world.shards)


@hookimpl
def accumulate(run: Run, last: bool) -> AbstractContextManager[object]:
    """Return a context that does nothing: in one process there is no synchronization to put off."""
    return _NOTHING


@hookimpl
def backward(run: Run, loss: Tensor) -> Tensor:
    """Add the gradients of the scalar ``loss``; return it detached.

    Under fp16 ``run.scaler`` scales the gradients; the result is not scaled.
    """
    scaled = run.scaler.scale(loss) if run.scaler else loss
    scaled.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@hookimpl
def step(run: Run, clip: Clip) -> StepResult:
    """Clip by norm, then by value; step the optimizer; set the gradients to ``None``.

    Under fp16 the gradients are unscaled first, and the scaler skips a
    step whose gradients overflowed.
    """
    assert run.optimizer is not None  # the loop only steps runs that train
    if run.scaler:
        run.scaler.unscale_(run.optimizer)
    parameters: list[Tensor] = []
    for group in run.optimizer.param_groups:
        parameters += group["params"]
    norm = clip_gradients_of(parameters, clip, exact=run.config.exact is not None)
    skipped = False
    if run.scaler:
        scale_before = run.scaler.get_scale()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        # The scale falls after an overflow, and then only.
        skipped = run.scaler.get_scale() < scale_before
    else:
        run.optimizer.step()
    run.optimizer.zero_grad()
    return StepResult(grad_norm=norm, skipped=skipped)


def clip_gradients(
    optimizer: torch.optim.Optimizer, clip: Clip, exact: bool = False
) -> Tensor | None:
    """Clip the gradients of all parameters of ``optimizer`` in place; return the norm before.

    ``None`` if they are not clipped by norm. Works on plain tensors and on DTensors; the norm is
    the whole gradient's. An ``exact`` one has the same bits for any shards.
    """
    if clip.norm is None and clip.value is None:
        return None
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return clip_gradients_of(parameters, clip, exact)


def clip_gradients_of(
    parameters: Sequence[Tensor], clip: Clip, exact: bool = False
) -> Tensor | None:
    """Clip the gradients of ``parameters`` as ``clip_gradients`` does."""
    if clip.norm is None and clip.value is None:
        return None
    gradients: list[Tensor] = []
    devices: set[torch.device] = set()
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            devices.add(parameter.grad.device if type(parameter.grad) is Tensor else _OTHER)
    norm = None
    if clip.norm is not None:
        squared = exact_squared_norm(gradients) if exact else squared_norm(gradients)
        norm = squared.sqrt().float()
        # torch adds the small term, too: it keeps the factor finite where all gradients are 0.
        factor = (clip.norm / (norm + 1e-6)).clamp(max=1.0)
        if devices == {norm.device}:
            torch._foreach_mul_(gradients, factor)
        else:
            scale(gradients, factor)
    if clip.value is not None:
        nn.utils.clip_grad_value_(parameters, clip.value)
    return norm


def results_in_fp32(model: nn.Module, inputs_in: torch.dtype | None = None) -> None:
    """Let a model with 16-bit parameters return its floating-point outputs in fp32.

    So it does under autocast: loss and metrics need the precision. With ``inputs_in`` it also takes
    fp32 inputs, as under autocast: they are cast to this dtype, which its parameters have.
    """
    if inputs_in is not None:
        cast_inputs = partial(_cast_inputs, inputs_in)
        model.register_forward_pre_hook(cast_inputs, prepend=True, with_kwargs=True)
    model.register_forward_hook(lambda _module, _inputs, outputs: tree_map(_widened, outputs))


def _cast_inputs(
    dtype: torch.dtype, _module: nn.Module, inputs: Any, named: Any
) -> tuple[Any, Any]:
    """Return a module's arguments with fp32 tensors in ``dtype``."""

    def cast(value: object) -> object:
        if isinstance(value, Tensor) and value.dtype == torch.float32:
            return value.to(dtype)
        return value

    cast_both: tuple[Any, Any] = tree_map(cast, (inputs, named))
    return cast_both


def _widened(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


@hookimpl
def reduce_loss(run: Run, values: Tensor) -> Tensor:
    """Return the sum of ``values`` over the world's group; without one, ``values`` as they are."""
    return run.world.group.sum(values) if run.world.group else values


@hookimpl
def gather_outputs(run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of all ranks of the world's group, in rank order.

    Without a group these are ``outputs``.
    """
    return run.world.group.gather(outputs) if run.world.group else outputs


@hookimpl
def save_checkpoint(run: Run) -> State:
    """Return whole tensors, and this rank's parts of those sharded over the world's group."""
    if run.world.group:
        return run.world.group.save(run)
    tensors = model_state(run) | optimizer_state(run)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def model_state(run: Run) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of ``run.module``, as ``model/NAME``.

    A tied weight has its first name.

    Without the parameters of ``run.base``, which checkpoints leave out, and without extra state,
    which the core saves. The tensors are the model's own, not copies.
    """
    left_out = run.base.parameters if run.base else frozenset()
    parameters = {
        name: value for name, value in run.module.named_parameters() if name not in left_out
    }
    all_names = {name for name, _ in run.module.named_parameters(remove_duplicate=False)}
    saved = tensors_of_state(run.module)
    buffers = {name: value for name, value in saved.items() if name not in all_names}
    return {f"model/{name}": value for name, value in (parameters | buffers).items()}


def optimizer_state(run: Run) -> dict[str, Tensor]:
    """Return the optimizer's tensors of each parameter, as ``optimizer/NAME/KEY``.

    Empty before the first step, and where the run has no optimizer. They are the optimizer's own,
    not copies, unless it ``HasSavedState``.
    """
    optimizer = run.optimizer
    if optimizer is None:
        return {}
    tensors = {}
    for name, parameter in run.module.named_parameters():
        if isinstance(optimizer, HasSavedState):
            state = optimizer.saved_state(parameter)
        else:
            state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
    return tensors


@hookimpl
def load_checkpoint(run: Run, state: SavedState) -> bool:
    """Load this rank's part of the model and, if the run trains, of the optimizer's state.

    Raises CheckpointError for a tensor of another shape than the model's.
    """
    if run.world.group:
        return run.world.group.load(run, state)
    for name, tensor in model_state(run).items():
        load_whole(tensor, name, state)
    if run.optimizer is not None:
        load_optimizer(run, state)
    return True


@torch.no_grad()
def load_whole(tensor: Tensor, name: str, state: SavedState) -> None:
    """Copy a whole tensor of ``state`` into ``tensor``; another shape raises CheckpointError."""
    saved = state[name]
    if saved.shape != tensor.shape:  # copy_ would stretch it
        raise CheckpointError(
            f"{name!r} is {list(saved.shape)} in the checkpoint, {list(tensor.shape)} here"
        )
    tensor.copy_(saved)


def load_optimizer(run: Run, state: SavedState, reader: Reader | None = None) -> None:
    """Load the ``optimizer/NAME/KEY`` tensors of ``state`` into the optimizer.

    Each is for the parameter of its name. ``reader`` reads one tensor, and may return a part of it;
    default: the whole tensor. Learning rates and other settings of the optimizer stay as they are.
    """
    assert run.optimizer is not None
    keys_of: dict[str, list[str]] = {}
    for entry in state:
        kind, _, rest = entry.partition("/")
        if kind == "optimizer":
            name, _, key = rest.rpartition("/")
            keys_of.setdefault(name, []).append(key)
    names = {parameter: name for name, parameter in run.module.named_parameters()}
    order = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    read = reader or (lambda _parameter, name, state: state[name])

    def tensors() -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield the number of each parameter in the optimizer, and its tensors by key."""
        for index, parameter in enumerate(order):
            name = names[parameter]
            if name in keys_of:
                prefix = f"optimizer/{name}"
                yield (
                    index,
                    {key: read(parameter, f"{prefix}/{key}", state) for key in keys_of[name]},
                )

    if isinstance(run.optimizer, HasSavedState):
        for index, saved in tensors():  # one parameter's at a time
            run.optimizer.load_saved_state(order[index], saved)
    else:
        groups_alone = run.optimizer.state_dict()
        run.optimizer.load_state_dict(groups_alone | {"state": dict(tensors())})


@hookimpl
def teardown(world: World) -> bool:
    """Leave the world's group; without one there is nothing to leave."""
    return world.group.leave(world) if world.group else True
