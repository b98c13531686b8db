"""DeepSpeed's engine in a run of distcore: prepare it for training, and run the hooks of a step."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from distcore import (
    Clip,
    DistcoreError,
    PreparedModel,
    Run,
    StepResult,
    StrategyError,
    defaults,
    hookimpl,
)
from distcore_deepspeed import checkpoint, flat_buffers, library, ops
from distcore_deepspeed.json_config import ZERO, Tree
from distcore_deepspeed.loss_scale import dynamic_scale

_NOTHING = nullcontext()


class LossScaleError(DistcoreError):
    """fp16 gradients overflow at the smallest loss scale."""

    exit_code = 3


def prepare(
    run: Run,
    model: nn.Module,
    tree: Tree,
    initialize: Callable[[], Any],
    exact: Mapping[str, Tensor] | None = None,
) -> PreparedModel:
    """Build the engine around ``model`` by ``initialize``; return it with the
    optimizer that it steps.

    ``tree`` is the resolved config that ``initialize`` gives DeepSpeed; the extensions for it are
    compiled first. Master weights start from the model's own fp32 weights in any precision. For a
    model that is already partitioned in 16 bits, ``exact`` has the fp32 values of this rank's
    partitions, by name. Raises StrategyError for a parameter without dimensions, which DeepSpeed
    can only broadcast in stage 3.
    """
    scalar = next(
        (name for name, parameter in model.named_parameters() if parameter.dim() == 0), None
    )
    if scalar and tree[ZERO]["stage"] < 3:
        raise StrategyError(
            f"parameter {scalar!r} has no dimension: give it the shape (1,), or use stage 3"
        )
    ops.build_for(tree)
    if exact is None:
        exact = (
            {name: p.data for name, p in model.named_parameters()}
            if run.config.precision != "fp32"
            else {}
        )
    with quiet():
        engine = initialize()
    library.refresh_release_order(engine)
    library.set_timeouts(run.config.timeout)
    scale = dynamic_scale(engine.optimizer)
    prepared = PreparedModel(
        model=engine, optimizer=engine.basic_optimizer, loss_scale=scale, state=engine
    )
    if exact:
        # DeepSpeed took its master weights from a model that was already rounded to 16 bits.
        flat_buffers.copy_weights(
            checkpoint.parts(replace(run, model=engine, optimizer=prepared.optimizer)), exact
        )
        defaults.results_in_fp32(engine, library.DTYPES[run.config.precision])
    if run.config.clip.value is not None and engine.zero_optimization_stage() > 0:
        clip_values_before_step(engine.basic_optimizer, run.config.clip.value)
    return prepared


def clip_values_before_step(optimizer: torch.optim.Optimizer, limit: float) -> None:
    """Have ``optimizer`` clip gradients to ``[-limit, limit]`` at the start of each of its steps.

    DeepSpeed averages and unscales gradients inside its step, where no one else can clip them.
    """

    def clip(stepped: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        nn.utils.clip_grad_value_(
            [p for group in stepped.param_groups for p in group["params"]], limit
        )

    optimizer.register_step_pre_hook(clip)


def accumulate(run: Run, last: bool) -> AbstractContextManager[object]:
    """Tell the engine whether the next backward pass is the step's last, after
    which gradients are reduced.
    """
    # DeepSpeed's own count of micro-batches would be wrong for the last step of an epoch, which
    # may have fewer.
    run.strategy_state.set_gradient_accumulation_boundary(last)
    return _NOTHING


def backward(run: Run, loss: Tensor) -> Tensor:
    """Accumulate gradients for ``loss``; return it detached."""
    # The loss is already scaled, so DeepSpeed must not divide it by the number of micro-batches.
    # DeepSpeed's mean over ranks is the one that Capabilities.gradients declares.
    run.strategy_state.backward(loss, scale_wrt_gas=False)
    return loss.detach()


def step(run: Run, clip: Clip) -> StepResult:
    """Clip and take the optimizer's step.

    Raises LossScaleError if fp16 overflows at the smallest loss scale.
    """
    if run.config.exact is not None:
        return step_on_whole_gradients(run, clip)
    engine = run.strategy_state
    # at stage 0 DeepSpeed clips, but does not report the norm
    if engine.zero_optimization_stage() == 0:
        assert run.optimizer is not None  # the loop only steps runs that train
        norm = defaults.clip_gradients(run.optimizer, clip)
        engine.step()
        return StepResult(grad_norm=norm)
    with explain_overflow():
        engine.step()
    norm = None if clip.norm is None else engine.get_global_grad_norm()
    return StepResult(grad_norm=norm, skipped=bool(getattr(engine.optimizer, "overflow", False)))


def step_on_whole_gradients(run: Run, clip: Clip) -> StepResult:
    """Give each partition its elements of the gradients in ``grad``, and step; at stages 1 and 2.

    The gradients are those of the global batch, on every rank: DeepSpeed adds and clips nothing.
    Raises StrategyError for a parameter without one, which it would step by zeros.
    """
    engine = run.strategy_state
    zero = engine.optimizer
    trained = {
        name: parameter
        for name, parameter in run.module.named_parameters()
        if parameter.requires_grad
    }
    for name, parameter in trained.items():
        if parameter.grad is None:
            raise StrategyError(
                f"exact = {run.config.exact}: parameter {name!r} has no gradient in this step, and"
                " DeepSpeed would step it by zeros; freeze it, or use another strategy, such as"
                " --strategy fsdp"
            )
    norm = defaults.clip_gradients_of(list(trained.values()), clip, exact=True)
    partitions = [torch.zeros_like(master) for master in zero.single_partition_of_fp32_groups]
    number_of = {id(each): at for at, each in enumerate(zero.single_partition_of_fp32_groups)}
    for part in checkpoint.parts(run):
        if part.count:
            whole = trained[part.name].grad
            assert whole is not None  # else it was refused above
            elements = whole.reshape(-1).narrow(0, part.start, part.count)
            part.slice_of(partitions[number_of[id(part.master)]]).copy_(elements)
    for parameter in trained.values():
        parameter.grad = None
    # Where its own backward pass leaves them.
    zero.averaged_gradients = {at: [partition] for at, partition in enumerate(partitions)}
    zero.clip_grad = 0.0
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    return StepResult(grad_norm=norm, skipped=bool(zero.overflow))


def gathering_modules(run: Run) -> dict[str, nn.Module]:
    """Return, by name, the modules at whose calls the engine gathers weights: none before stage 3.

    The model itself is among them: its call begins and ends a forward pass. None, too, where the
    user has named leaf modules: what ranks call inside of these, such as experts, may differ.
    """
    has_leaves = any(library.z3_leaf_module(module) for module in run.module.modules())
    if has_leaves or not run.capabilities.shards_parameters:
        return {}
    return {
        name: module
        for name, module in run.module.named_modules()
        if not name or next(module.parameters(recurse=False), None) is not None
    }


class StepHooks:
    """The hooks of a step for a strategy that trains with DeepSpeed's engine."""

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Tell the engine whether the next backward pass is the step's last, after
        which gradients are reduced.
        """
        return accumulate(run, last)

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Add gradients with the engine, which must not divide the loss again."""
        return backward(run, loss)

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip and step with the engine.

        Raises LossScaleError if fp16 overflows at the smallest loss scale.
        """
        return step(run, clip)


@contextmanager
def explain_overflow() -> Iterator[None]:
    """Turn DeepSpeed's error about the smallest loss scale into one line with a remedy."""
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise LossScaleError(
            "fp16: gradients overflow at the smallest loss scale; models that were trained in bf16"
            " (T5, Gemma, Llama and most newer ones) have values that fp16 cannot hold: use"
            " --precision bf16"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress DeepSpeed's output and warnings while it builds an engine.

    Errors are raised as usual.
    """
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
