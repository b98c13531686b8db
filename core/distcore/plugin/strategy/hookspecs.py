"""The hooks, in the order in which a run calls them. A strategy implements operations;
anybody may hear events.

Operations have exactly one answer, never ``None``: pluggy reads ``None`` as "not mine", so the core
turns it into an error that names strategy and hook. An operation that a strategy leaves out is done
as in one process (``distcore.plugin.strategy.defaults``). An implementation names only the
arguments it wants. An extension may wrap any operation with ``@hookimpl(wrapper=True)``.
docs/laws.md has the laws.

Each example is a method of a strategy's class (operations) or of an extension's (events). The
operations' examples together are a strategy that replicates the model; a test runs all of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from distcore.config import Clip, RunConfig
    from distcore.plugin.batching.sampling import BatchPlan
    from distcore.plugin.report import Report
    from distcore.plugin.strategy.contract import (
        BuiltModel,
        Evaluation,
        MicroBatch,
        ModelSource,
        OptimizerFactory,
        PreparedModel,
        Progress,
        RankInfo,
        Run,
        Sampler,
        StepLoss,
        StepResult,
        World,
    )
    from distcore.plugin.strategy.state import SavedState, State
    from distcore.plugin.strategy.tally import Answer
    from distcore.plugin.task.task import Batch, Datasets, Task

hookspec = pluggy.HookspecMarker("distcore")
hookimpl = pluggy.HookimplMarker("distcore")


class Operations:
    """Called on every rank, in the same order, the same number of times."""

    @hookspec(firstresult=True)
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Join the other ranks; once, first of all. Return the world *as the backend sees it*.

        With several ranks, RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
        MASTER_PORT are set in the environment. A backend that cannot give ``rank_info.size`` ranks
        must say so by its answer: the core compares and ends the run. Touch no device but your own.
        Serves law 8.

        Example::

            @hookimpl
            def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
                # torch.distributed, by torch's backend for the device
                world = join_process_group(config, rank_info)
                logging.info("rank %d of %d computes on %s", world.rank, world.size, world.device)
                return world
        """

    @hookspec(firstresult=True)
    def build_model(
        self, config: RunConfig, world: World, source: ModelSource
    ) -> nn.Module | BuiltModel:
        """Return the model before it is wrapped; once per model, after ``setup``.

        The default is ``source.build()``: the whole model on the CPU in fp32, the same weights on
        every rank. A sharding strategy takes ``source.replay()``: a model without storage, and a
        stream of its values, of which ``wrap_model`` takes the rank's own part. If that raises
        MetaModelError, it builds the whole model. A ``BuiltModel`` hands state to ``wrap_model``,
        as ``run.strategy_state``. Serves law 2.

        Example::

            @hookimpl
            def build_model(
                self, config: RunConfig, world: World, source: ModelSource
            ) -> nn.Module:
                model = source.build()
                if world.is_main:
                    count = sum(parameter.numel() for parameter in model.parameters())
                    logging.info("%d parameters", count)
                return model
        """

    @hookspec(firstresult=True)
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Make ``model``, the answer of ``build_model``, ready on
        ``run.world.device``; once per model.

        ``make_optimizer(module)`` builds the configured optimizer. It is ``None`` if the run only
        evaluates; the answer's ``optimizer`` is then ``None``, too. Parameters keep their names.
        Later hooks find the answer's ``state`` in ``run.strategy_state``. Serves law 2.

        Example::

            @hookimpl
            def wrap_model(
                self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
            ) -> PreparedModel:
                model = model.to(run.world.device)
                for tensor in model.state_dict().values():
                    dist.broadcast(tensor, src=0)  # rank 0's weights, should another's differ
                optimizer = make_optimizer(model) if make_optimizer else None
                return PreparedModel(model=model, optimizer=optimizer)
        """

    @hookspec(firstresult=True)
    def build_sampler(self, run: Run, plan: BatchPlan) -> Sampler:
        """Say which rows of each global batch this rank takes; once for
        training, once per evaluation.

        Most strategies need no sampler of their own: the default calls ``plan.split(epoch, step,
        shard, shards)``. Exactly one data shard takes each row of ``plan.rows(epoch, step)``; all
        ranks of a shard take the same rows. Serves laws 1 and 4.

        Example::

            @hookimpl
            def build_sampler(self, run: Run, plan: BatchPlan) -> Sampler:
                def sampler(epoch: int, step: int) -> list[MicroBatch]:
                    return plan.split(epoch, step, run.world.rank, run.world.size)

                return sampler
        """

    @hookspec(firstresult=True)
    def train_step(
        self, run: Run, micros: list[tuple[MicroBatch, Batch]], loss: StepLoss
    ) -> Tensor:
        """Run the forward and backward passes of one optimizer step; once per step.

        ``micros`` are this rank's micro-batches: at least one, the same number on every rank,
        tensors on the CPU or already on the device. Return the sum of ``loss(model, micro, batch)``
        over them, detached, a scalar on the device. The default calls ``backward(loss(run.model,
        micro, batch))`` inside ``accumulate`` for each micro-batch. A strategy that implements this
        hook, such as a pipeline, does not call ``accumulate`` and ``backward``; a warning names
        extensions that wrap these. Serves laws 2 and 9.

        Example::

            @hookimpl
            def train_step(
                self, run: Run, micros: list[tuple[MicroBatch, Batch]], loss: StepLoss
            ) -> Tensor:
                losses = []
                for micro, batch in micros:
                    part = loss(run.model, micro, batch)  # on the device, scaled, under autocast
                    (run.scaler.scale(part) if run.scaler else part).backward()
                    losses.append(part.detach())
                return torch.stack(losses).sum()
        """

    @hookspec(firstresult=True)
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Return the context for forward and backward of one micro-batch; the
        ``last`` one synchronizes gradients.

        Called once per micro-batch; for a loss over the global batch, once more, because one
        micro-batch has forward and backward in separate contexts. Serves laws 2 and 9.

        Example::

            @hookimpl
            def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
                # Of a wrapper that averages gradients in backward.
                no_sync = getattr(run.model, "no_sync", nullcontext)
                return nullcontext() if last else no_sync()
        """

    @hookspec(firstresult=True)
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Add the gradients of one micro-batch and return ``loss`` detached, a
        scalar on the device.

        ``loss`` is already scaled: a plugin must not divide it again, by anything. After the last
        micro-batch, or at the start of ``step``, the strategy averages gradients over ranks, or
        sums them with ``Capabilities(gradients="sum")``. With fp16, ``run.scaler`` scales the loss.
        Serves law 2.

        Example::

            @hookimpl
            def backward(self, run: Run, loss: Tensor) -> Tensor:
                scaled = run.scaler.scale(loss) if run.scaler else loss
                scaled.backward()
                return loss.detach()
        """

    @hookspec(firstresult=True)
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip, step the optimizer and clear the gradients; once per step,
        after the last micro-batch.

        ``grad_norm`` is the norm of the whole gradient, over all shards, before clipping. No host
        synchronization that the backend does not need. Serves laws 3, 9 and 10.

        Under ``exact``, for a strategy that declares it, ``grad`` has the whole summed gradient of
        each parameter, and ``step`` may only clip it and step the optimizer.

        Example::

            @hookimpl
            def step(self, run: Run, clip: Clip) -> StepResult:
                for parameter in run.module.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= run.world.size
                return defaults.step(run, clip)
        """

    @hookspec(firstresult=True)
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        """Return the sum over ranks of ``values``, float64, ``(n,)``, on every rank; for log
        lines and a resume.

        Example::

            @hookimpl
            def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
                total = values.clone()
                dist.all_reduce(total)
                return total
        """

    @hookspec(firstresult=True)
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Join the rows of all ranks in rank order, on every rank.

        Each tensor is ``(n_r, …)`` with the rank's own ``n_r``, which may be 0 and differ from name
        to name; the answer is ``(sum of n_r, …)`` with dtypes kept. Called at the end of an
        evaluation, for agreement checks, and in a step by a task whose loss is over the global
        batch. Serves laws 4, 8 and 9.

        Example::

            @hookimpl
            def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
                from distcore.distributed import gather_rows

                # Over torch.distributed; pads to the longest rank on the way.
                return gather_rows(outputs)
        """

    @hookspec(firstresult=True)
    def save_checkpoint(self, run: Run) -> State:
        """Return this rank's part of the state, by neutral names; the core writes the
        files, ranks in parallel.

        ``model/NAME`` for every parameter and persistent buffer of ``run.module`` (fp32
        master weights where they exist), ``optimizer/NAME/KEY`` for every optimizer tensor. All
        ranks return a replicated tensor whole. Each rank returns its part of a sharded tensor as a
        ``Piece``. Nothing is gathered. The proof of the first steps, and ``ema`` after each step,
        ask for the weights alone: ``run.optimizer`` is then ``None``. Serves laws 5 and 6.

        Example::

            @hookimpl
            def save_checkpoint(self, run: Run) -> State:
                state: State = {}
                tensors = defaults.model_state(run) | defaults.optimizer_state(run)
                for name, tensor in tensors.items():
                    # As if each rank held its part only.
                    parts = tensor.detach().flatten().tensor_split(run.world.size)
                    start = sum(len(part) for part in parts[: run.world.rank])
                    state[name] = Piece(parts[run.world.rank], start, tuple(tensor.shape))
                return state
        """

    @hookspec(firstresult=True)
    def load_checkpoint(self, run: Run, state: SavedState, progress: Progress) -> bool:
        """Put a state saved by any strategy, at any world size, into model
        and optimizer; return True.

        A rank reads its part of a sharded tensor by ``state.piece``. A state without ``optimizer/``
        names, for an evaluation or a moving average, is for the model alone; ``run.optimizer`` is
        then ``None``. ``progress`` is that of the saved run: a strategy that owns ``schedule`` sets
        the schedule and the learning rate to ``progress.step``; for other strategies the core does
        so. Serves laws 5 and 7.

        Example::

            @hookimpl
            def load_checkpoint(self, run: Run, state: SavedState, progress: Progress) -> bool:
                for name, tensor in defaults.model_state(run).items():
                    # A rank that holds a part: state.piece(name, start, count).
                    tensor.detach().copy_(state[name])
                if run.optimizer is not None:
                    defaults.load_optimizer(run, state)
                return True
        """

    @hookspec(firstresult=True)
    def teardown(self, world: World) -> bool:
        """Leave the other ranks; once, last of all, not after a failure. Return True.

        Example::

            @hookimpl
            def teardown(self, world: World) -> bool:
                dist.barrier()  # no rank takes the group away while another one talks
                dist.destroy_process_group()
                return True
        """


class Events:
    """Events go to every plugin on every rank, and to a task that has methods of
    these names with ``@hookimpl``.

    A listener must not change the run. It may return ``"stop"``, ``"evaluate"``, ``"save"`` or
    several of them as a request; ranks combine requests at the next log line. Values from
    ``run.log`` with names in its ``logs`` are reduced there, too. Its methods ``state`` and
    ``load_state`` keep a JSON value in checkpoints.
    """

    @hookspec
    def on_run_start(self, run: Run, progress: Progress, task: Task, data: Datasets) -> Answer:
        """The model is wrapped, a checkpoint is loaded if there is one to resume; training
        is about to start.

        ``progress`` is the start: step 0, or the checkpoint's step. ``data`` are
        the rows of ``task``.

        Example::

            @hookimpl
            def on_run_start(self, run: Run, progress: Progress) -> None:
                if run.world.is_main:
                    ranks = run.world.size
                    print(f"from step {progress.step} to {run.total_steps} on {ranks} rank(s)")
        """

    @hookspec
    def on_epoch_start(self, run: Run, progress: Progress) -> Answer:
        """An epoch begins. A resume inside an epoch does not call it again.

        Example::

            @hookimpl
            def on_epoch_start(self, run: Run, progress: Progress) -> None:
                if run.world.is_main:
                    print(f"epoch {progress.epoch} begins at step {progress.step}")
        """

    @hookspec
    def on_step_end(self, run: Run, progress: Progress, result: StepResult) -> Answer:
        """An optimizer step is done. Called every step: be quick, and do not wait for the device.

        Example::

            @hookimpl
            def on_step_end(self, run: Run, progress: Progress, result: StepResult) -> None:
                if run.world.is_main and progress.step_in_epoch == 0:
                    step, rows = progress.step, progress.samples
                    print(f"epoch {progress.epoch} ends at step {step}: {rows} rows so far")
        """

    @hookspec
    def on_epoch_end(self, run: Run, progress: Progress) -> Answer:
        """An epoch is over; called after ``on_step_end`` of its last step. ``progress.epoch`` is
        already the next one.

        Example::

            @hookimpl
            def on_epoch_end(self, run: Run, progress: Progress) -> str:
                return "save"  # asks for a checkpoint: committed at the next log line
        """

    @hookspec
    def on_log(self, run: Run, record: dict[str, float]) -> Answer:
        """A log line is ready, every ``log_every`` steps and at the end.

        Means are over all ranks; ``grad_norm`` is that of the last step, and the peak
        memory is this rank's.

        Example::

            @hookimpl
            def on_log(self, run: Run, record: dict[str, float]) -> None:
                if run.world.is_main:
                    loss, rate = record["loss"], record["lr"]
                    print(f"step {record['step']}: loss {loss:.3f}, learning rate {rate:g}")
        """

    @hookspec
    def on_evaluation_end(self, run: Run, progress: Progress, evaluation: Evaluation) -> Answer:
        """An evaluation is done; its outputs are gathered, on every rank.

        Example::

            @hookimpl
            def on_evaluation_end(
                self, run: Run, progress: Progress, evaluation: Evaluation
            ) -> None:
                if run.world.is_main:
                    rows, size = evaluation.evaluated, evaluation.dataset_size
                    print(f"step {progress.step}: {rows} of {size} rows evaluated")
        """

    @hookspec
    def on_checkpoint(self, run: Run, progress: Progress, path: Path) -> Answer:
        """A checkpoint is committed at ``path``; no rank writes there any more. Told by the next
        save or the end.

        Example::

            @hookimpl
            def on_checkpoint(self, run: Run, progress: Progress, path: Path) -> None:
                if run.world.is_main:
                    newest = Path(run.config.out) / "newest.txt"
                    newest.write_text(f"{path.name} {progress.samples}")
        """

    @hookspec
    def on_run_end(self, run: Run, report: Report) -> None:
        """The run is over and ``report`` (report.json) is complete. Not called after a failure.

        Example::

            @hookimpl
            def on_run_end(self, run: Run, report: Report) -> None:
                if run.world.is_main:
                    accuracy = report["evaluation"]["accuracy"]
                    print(f"{report['steps']} steps, accuracy {accuracy:.2f}")
        """
