"""DeepSpeed through Accelerate: the engine that ``prepare`` makes, its own accumulation and division switched off."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, InitProcessGroupKwargs
from torch import Tensor, nn

from distcore import (
    Capabilities,
    Clip,
    OptimizerFactory,
    PreparedModel,
    Run,
    RunConfig,
    SavedState,
    State,
    StepResult,
    StrategyError,
    World,
    defaults,
    flat,
)
from distcore_accelerate import books, zero_config
from distcore_accelerate.loss_scale import dynamic_scale
from distcore_accelerate.precision import mixed_precision, results_in_fp32, whole
from distcore_accelerate.settings import Tree

if TYPE_CHECKING:
    from distcore_accelerate.strategy import AccelerateStrategy

_NOTHING = nullcontext()


class ZeRO:
    """Optimizer state, from stage 2 on gradients, and at stage 3 parameters spread over ranks by DeepSpeed."""

    def capabilities(self, options: AccelerateStrategy) -> Capabilities:
        tree = zero_config.given(options, options.settings)
        stage = zero_config.stage_of(tree)
        takes_part = "the buffer that holds an unused parameter is stepped as a whole: weight decay moves it"
        fp32_only = "deepspeed: stage 0 in fp32 only"
        return Capabilities(
            spec_version=2,
            shards_parameters=stage == 3,
            owns=frozenset({"precision", *(("schedule",) if zero_config.has_scheduler(tree) else ())}),
            limits=(fp32_only, "deepspeed: fp16 needs a GPU", f"deepspeed: {takes_part}"),
            exempt={"unused-parameters": takes_part} | ({"bf16": fp32_only} if stage == 0 else {}),
        )

    def plugins(
        self, options: AccelerateStrategy, config: RunConfig, world: World, total_steps: int | None
    ) -> dict[str, Any]:
        _import_deepspeed(world.device)
        tree = zero_config.given(options, options.settings)
        if total_steps is not None:
            where = zero_config.origin(options, options.settings)
            tree = zero_config.filled(tree, config, world.size, total_steps, where)
        return {
            "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=tree, zero3_init_flag=False),
            "mixed_precision": mixed_precision(config),
            # With cpu=True Accelerate drops DeepSpeed without a word, and without a backend it counts one process.
            "cpu": False,
            "kwargs_handlers": [InitProcessGroupKwargs(backend="gloo" if world.device.type == "cpu" else "nccl")],
        }

    def prepare(
        self, accelerator: Accelerator, run: Run, model: nn.Module, make_optimizer: OptimizerFactory
    ) -> PreparedModel:
        """The engine, and the optimizer that it steps on this rank's shards."""
        tree: Tree = accelerator.state.deepspeed_plugin.deepspeed_config
        exact = {name: p.data for name, p in model.named_parameters()} if run.config.precision != "fp32" else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = _engine_of(accelerator, model, _optimizer(tree, run, make_optimizer(model)))
        wrapped = PreparedModel(
            model=results_in_fp32(run, engine),
            optimizer=engine.basic_optimizer,
            loss_scale=dynamic_scale(engine.optimizer),
        )
        if exact:  # DeepSpeed took its master copies from a model that was already rounded to 16 bits
            flat.copy_weights(books.parts(replace(run, model=engine, optimizer=wrapped.optimizer)), exact)
        if run.config.clip.value is not None and zero_config.stage_of(tree) > 0:
            defaults.clip_values_before_step(engine.basic_optimizer, run.config.clip.value)
        return wrapped

    def for_evaluation(self, run: Run, model: nn.Module) -> nn.Module:
        return whole(run, model)

    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        # Not DeepSpeed's own count of micro-batches: a ragged last step has fewer of them.
        _engine(run).set_gradient_accumulation_boundary(last)
        return _NOTHING

    def backward(self, run: Run, loss: Tensor) -> Tensor:
        # Not Accelerator.backward: it steps, too, and DeepSpeed would divide by the number of micro-batches.
        _engine(run).backward(loss, scale_wrt_gas=False)
        return loss.detach()

    def step(self, run: Run, clip: Clip) -> StepResult:
        engine = _engine(run)
        if engine.zero_optimization_stage() == 0:  # where DeepSpeed clips but does not report the norm
            norm = defaults.clip_gradients(cast(Any, run.optimizer), clip)
            engine.step()
            return StepResult(grad_norm=norm)
        engine.step()
        return StepResult(grad_norm=None if clip.norm is None else engine.get_global_grad_norm())

    def save(self, run: Run) -> State:
        return books.save(run)

    def load(self, run: Run, state: SavedState) -> bool:
        return books.load(run, state)

    def leave(self) -> None:
        """Forget DeepSpeed's process groups, so that another run in this process makes its own."""
        import deepspeed

        for name in ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP"):
            setattr(deepspeed.utils.groups, name, None)
        deepspeed.comm.comm.cdb = None


def _import_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed on the accelerator that is there, with nothing compiled or said behind one's back."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # An optional collective that DeepSpeed would compile (20 s and more) when the ranks meet.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=None, verbose=False)


def _engine_of(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Any:
    try:
        engine, _ = accelerator.prepare(model, optimizer)
    except ValueError as error:
        raise StrategyError(f"accelerate, deepspeed: {' '.join(str(error).split())}") from error
    return engine


def _optimizer(tree: Tree, run: Run, optimizer: torch.optim.Optimizer) -> Any:
    """What Accelerate wants to see: its dummy where DeepSpeed's config has an optimizer, else ours."""
    if "optimizer" in tree:
        groups = [{key: group[key] for key in ("params", "weight_decay")} for group in optimizer.param_groups]
        return DummyOptim(groups, lr=run.config.lr, weight_decay=run.config.optimizer.weight_decay)
    if zero_config.offloads(tree):  # else Accelerate puts DeepSpeed's Adam in the place of ours
        tree["zero_force_ds_cpu_optimizer"] = False
    return optimizer


def _engine(run: Run) -> Any:
    return cast(Any, run.model)
