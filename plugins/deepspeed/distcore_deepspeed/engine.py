"""DeepSpeed's engine in a run of distcore: made ready for training, and what the hooks of a step do with it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from distcore import Clip, DistcoreError, PreparedModel, Run, StepResult, defaults, flat_buffers, hookimpl
from distcore_deepspeed import library, ops, partitions
from distcore_deepspeed.json_config import Tree
from distcore_deepspeed.loss_scale import dynamic_scale

_NOTHING = nullcontext()


class LossScaleError(DistcoreError):
    """fp16 gradients overflow at the smallest loss scale."""

    exit_code = 3


def prepare(
    run: Run, model: nn.Module, tree: Tree, initialize: Callable[[], Any], exact: Mapping[str, Tensor] | None = None
) -> PreparedModel:
    """Return the engine that ``initialize`` builds around ``model``, and the optimizer that it steps on its partitions.

    ``tree``: the resolved config that ``initialize`` gives DeepSpeed; the extensions that it needs are compiled first.
    Master weights start from the model's own fp32 weights in any precision. ``exact`` has those of this rank's
    partitions, by name, where the model is already partitioned in 16 bits.
    """
    ops.build_for(tree)
    if exact is None:
        exact = {name: p.data for name, p in model.named_parameters()} if run.config.precision != "fp32" else {}
    with quiet():
        engine = initialize()
    library.follow_order(engine)
    library.limit_waiting(run.config.timeout)
    scale = dynamic_scale(engine.optimizer)
    prepared = PreparedModel(model=engine, optimizer=engine.basic_optimizer, loss_scale=scale, state=engine)
    if exact:
        # DeepSpeed took its master weights from a model that was already rounded to 16 bits.
        flat_buffers.copy_weights(partitions.parts(replace(run, model=engine, optimizer=prepared.optimizer)), exact)
        defaults.results_in_fp32(engine)
    if run.config.clip.value is not None and engine.zero_optimization_stage() > 0:
        defaults.clip_values_before_step(engine.basic_optimizer, run.config.clip.value)
    return prepared


def accumulate(run: Run, last: bool) -> AbstractContextManager[object]:
    """Tell the engine whether the next backward pass is the step's last, after which gradients are reduced."""
    # Not DeepSpeed's own count of micro-batches: the last step of an epoch may have fewer of them.
    run.strategy_state.set_gradient_accumulation_boundary(last)
    return _NOTHING


def backward(run: Run, loss: Tensor) -> Tensor:
    """Accumulate gradients for ``loss``; return it detached."""
    # The loss is scaled already: DeepSpeed must not divide it by the number of micro-batches. Its mean over
    # ranks is the one that Capabilities.gradients declares.
    run.strategy_state.backward(loss, scale_wrt_gas=False)
    return loss.detach()


def step(run: Run, clip: Clip) -> StepResult:
    """Clip and take the optimizer's step; raises LossScaleError if fp16 overflows at the smallest loss scale."""
    engine = run.strategy_state
    if engine.zero_optimization_stage() == 0:  # where DeepSpeed clips but does not report the norm
        assert run.optimizer is not None  # the loop only steps runs that train
        norm = defaults.clip_gradients(run.optimizer, clip)
        engine.step()
        return StepResult(grad_norm=norm)
    with explained():
        engine.step()
    return StepResult(grad_norm=None if clip.norm is None else engine.get_global_grad_norm())


class StepHooks:
    """The hooks of a step, for a strategy whose model is DeepSpeed's engine."""

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Tell the engine whether the next backward pass is the step's last, after which gradients are reduced."""
        return accumulate(run, last)

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Add gradients with the engine, which must not divide the loss again."""
        return backward(run, loss)

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip and step with the engine; raises LossScaleError if fp16 overflows at the smallest loss scale."""
        return step(run, clip)


@contextmanager
def explained() -> Iterator[None]:
    """Turn DeepSpeed's error about a loss scale at its minimum into one line that says what to do."""
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise LossScaleError(
            "fp16: gradients overflow at the smallest loss scale; models that were trained in bf16 (T5, Gemma, Llama "
            "and most newer ones) have values that fp16 cannot hold: use --precision bf16"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what DeepSpeed prints about itself while it builds an engine; errors are raised all the same."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
