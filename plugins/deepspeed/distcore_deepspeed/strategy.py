"""``deepspeed``: DeepSpeed's engine, ZeRO stages 0 to 3."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

from distcore import (
    Capabilities,
    Clip,
    OptimizerFactory,
    Place,
    Run,
    RunConfig,
    StepResult,
    World,
    Wrapped,
    defaults,
    gather_rows,
    hookimpl,
    join_process_group,
    leave_process_group,
    sum_over_ranks,
)
from torch import Tensor, nn

from distcore_deepspeed import backend

_NOTHING = nullcontext()


@dataclass(frozen=True, kw_only=True)
class DeepSpeedStrategy:
    """Shard optimizer state, gradients and parameters over ranks."""

    stage: Literal[0, 1, 2, 3] = 2
    """What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(shards_parameters=self.stage == 3, owns=frozenset({"precision"}))

    @hookimpl
    def setup(self, config: RunConfig, place: Place) -> World:
        os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
        world = join_process_group(config, place)
        backend.prepare(world.device, config.log_level == "debug")
        rank, size = backend.join_comm()
        return World(rank=rank, size=size, local_rank=place.local_rank, device=world.device)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> Wrapped:
        config = {
            "train_micro_batch_size_per_gpu": run.config.micro_batch_size,
            "gradient_accumulation_steps": run.accumulation,
            "gradient_clipping": 0.0 if self.stage == 0 else run.config.clip.norm or 0.0,
            "zero_optimization": {"stage": self.stage},
            "timers": {"throughput": {"enabled": False}},
        }
        engine = backend.initialize(model=model, optimizer=make_optimizer(model), config=config)
        return Wrapped(model=engine, optimizer=engine.basic_optimizer)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        _engine(run).set_gradient_accumulation_boundary(last)
        return _NOTHING

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        _engine(run).backward(loss, scale_wrt_gas=False)
        return loss.detach()

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        engine = _engine(run)
        norm = None
        if self.stage == 0:
            norm = defaults.clip_gradients(run.optimizer, clip)
        engine.step()
        if self.stage:
            norm = engine.get_global_grad_norm()
        return StepResult(grad_norm=norm)

    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        return sum_over_ranks(values)

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return gather_rows(outputs)

    @hookimpl
    def teardown(self, world: World) -> bool:
        backend.leave_comm()
        return leave_process_group(world)


def _engine(run: Run) -> Any:
    return cast(Any, run.model)
