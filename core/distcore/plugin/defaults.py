"""What each operation does in one process: the reference, and what a strategy gets for a hook it leaves out.

A strategy may also call these from its own hooks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from distcore.config import Clip
from distcore.errors import CheckpointError
from distcore.plugin.contract import (
    ModelSource,
    OptimizerFactory,
    PreparedModel,
    Run,
    Sampler,
    SavedState,
    State,
    StepResult,
    World,
)
from distcore.plugin.hookspecs import hookimpl
from distcore.plugin.sampling import BatchPlan, rank_sampler

_NOTHING = nullcontext()


@hookimpl
def build_model(source: ModelSource) -> nn.Module:
    return source.build()


@hookimpl
def wrap_model(run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
    model = model.to(run.world.device)
    return PreparedModel(model=model, optimizer=make_optimizer(model) if make_optimizer else None)


@hookimpl
def build_sampler(run: Run, plan: BatchPlan) -> Sampler:
    return rank_sampler(plan, run.world.shard, run.world.shards)


@hookimpl
def accumulate(run: Run, last: bool) -> AbstractContextManager[object]:
    return _NOTHING


@hookimpl
def backward(run: Run, loss: Tensor) -> Tensor:
    (run.scaler.scale(loss) if run.scaler else loss).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@hookimpl
def step(run: Run, clip: Clip) -> StepResult:
    """Norm first, on the gradient as it is, then value. A step that fp16 overflowed is skipped by the scaler."""
    assert run.optimizer is not None  # the loop only steps runs that train
    if run.scaler:
        run.scaler.unscale_(run.optimizer)
    norm = clip_gradients(run.optimizer, clip)
    if run.scaler:
        run.scaler.step(run.optimizer)
        run.scaler.update()
    else:
        run.optimizer.step()
    run.optimizer.zero_grad()
    return StepResult(grad_norm=norm)


def clip_gradients(optimizer: torch.optim.Optimizer, clip: Clip) -> Tensor | None:
    """Clip in place the gradients of everything that ``optimizer`` steps; return the norm before, if clipped by it.

    Works on plain tensors and on DTensors, whose norm is that of the whole gradient.
    """
    if clip.norm is None and clip.value is None:
        return None
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = None
    if clip.norm is not None:
        norm = nn.utils.clip_grad_norm_(parameters, clip.norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if clip.value is not None:
        nn.utils.clip_grad_value_(parameters, clip.value)
    return norm


def clip_values_before_step(optimizer: torch.optim.Optimizer, limit: float) -> None:
    """Have ``optimizer`` clip by value what it is about to use: where a backend averages and unscales as it steps."""

    def clip(stepped: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        nn.utils.clip_grad_value_([p for group in stepped.param_groups for p in group["params"]], limit)

    optimizer.register_step_pre_hook(clip)


def results_in_fp32(model: nn.Module) -> None:
    """Have a model whose parameters are in 16 bits answer in fp32, as under autocast: loss and metrics need it."""
    model.register_forward_hook(lambda _module, _inputs, outputs: tree_map(_widened, outputs))


def _widened(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


@hookimpl
def reduce_loss(run: Run, values: Tensor) -> Tensor:
    return values


@hookimpl
def gather_outputs(run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return outputs


@hookimpl
def save_checkpoint(run: Run) -> State:
    """Whole tensors; right wherever every rank holds the whole model."""
    return {name: tensor.detach() for name, tensor in (model_state(run) | optimizer_state(run)).items()}


def model_state(run: Run) -> dict[str, Tensor]:
    """Parameters and persistent buffers of ``run.module`` by neutral name; a tied weight under its first name."""
    parameters = dict(run.module.named_parameters())
    every = {name for name, _ in run.module.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in run.module.state_dict().items() if name not in every}
    return {f"model/{name}": value for name, value in (parameters | buffers).items()}


def optimizer_state(run: Run) -> dict[str, Tensor]:
    """Tensors that the optimizer keeps for each parameter, by neutral name; empty before the first step."""
    if run.optimizer is None:
        return {}
    return {
        f"optimizer/{name}/{key}": value
        for name, parameter in run.module.named_parameters()
        for key, value in run.optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


@hookimpl
def load_checkpoint(run: Run, state: SavedState) -> bool:
    with torch.no_grad():
        for name, tensor in model_state(run).items():
            saved = state[name]
            if saved.shape != tensor.shape:  # copy_ would stretch it
                raise CheckpointError(f"{name!r} is {list(saved.shape)} in the checkpoint, {list(tensor.shape)} here")
            tensor.copy_(saved)
    if run.optimizer is not None:
        load_optimizer(run, state)
    return True


def load_optimizer(run: Run, state: SavedState) -> None:
    """Give the optimizer the tensors of ``state``, and each to the parameter whose name it carries."""
    assert run.optimizer is not None
    kept: dict[str, dict[str, Tensor]] = {}
    for name in state:
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition("/")
            kept.setdefault(parameter, {})[key] = state[name]
    names = {parameter: name for name, parameter in run.module.named_parameters()}
    order = [names[p] for group in run.optimizer.param_groups for p in group["params"]]
    tensors = {index: kept[name] for index, name in enumerate(order) if name in kept}
    run.optimizer.load_state_dict(run.optimizer.state_dict() | {"state": tensors})


@hookimpl
def teardown(world: World) -> bool:
    return True
