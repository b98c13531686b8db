"""A training in progress on this rank: whatever trains, evaluates, plans or checks uses it."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

from torch import nn

from distcore import checkpoint
from distcore.checkpoint.foreign import adopt
from distcore.checkpoint.job_state import fingerprint, saved_unlogged, steps_key
from distcore.checkpoint.row_content import RowContent
from distcore.checkpoint.saver import Saver
from distcore.checkpoint.surroundings import (
    SOURCES,
    save_task_files,
    source_digests,
    warn_of_changed_sources,
)
from distcore.config import RunConfig, dump_config
from distcore.distributed.agreement import check_world
from distcore.engine import padding_free_check
from distcore.engine.best import Best, fingerprint_of_judged, resumed_best
from distcore.engine.build import build_run
from distcore.engine.causality import check_causal
from distcore.engine.evaluation import evaluate_sets
from distcore.engine.loop import Step, steps
from distcore.engine.overview import overview
from distcore.engine.own_step import make_update, updated
from distcore.engine.proof import Proof
from distcore.engine.shared_folder import check_shared
from distcore.files import lock_shared
from distcore.model.model_source import model_source
from distcore.plugin.strategy.contract import Evaluation, Progress, RankInfo, Run, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Datasets, Task
from distcore.rank_environment.network import spans_machines
from distcore.resolve.complete import agree, complete
from distcore.resolve.resolve import Resolved
from distcore.resolve.run_folder import on_main, set_aside

log = logging.getLogger("distcore")


@dataclass(kw_only=True)
class Training:
    """A training in progress on this rank. Every rank makes the same calls."""

    run: Run
    """The model as the strategy has it, the optimizer and the schedule."""
    hooks: Hooks
    """The strategy, and the extensions that listen."""
    task: BoundTask
    """What is trained."""
    data: Datasets
    """The rows."""
    saver: Saver
    """Saves checkpoints in the run folder."""
    progress: Progress = field(default_factory=Progress)
    """What was done up to the last step."""
    best: Best | None = None
    """The best evaluation so far."""

    @classmethod
    def build(
        cls,
        config: RunConfig,
        hooks: Hooks,
        world: World,
        task: Task,
        data: Datasets,
        proof: Proof | None = None,
    ) -> Self:
        """Build the model for laboratories and tools.

        Neither agrees with other ranks nor writes a run folder.
        """
        run = build_run(config, hooks, world, task, data, proof=proof)
        return cls._of_run(run, hooks, task, data)

    @classmethod
    def to_evaluate(
        cls, config: RunConfig, hooks: Hooks, world: World, task: Task, data: Datasets
    ) -> Self:
        """Build a model that is evaluated and not trained, with rows padded or not
        as in its training.
        """
        run = build_run(config, hooks, world, task, data, training=False)
        run, data = padding_free_check.restore(run, task, data)
        return cls._of_run(run, hooks, task, data)

    @classmethod
    def _of_run(cls, run: Run, hooks: Hooks, task: Task, data: Datasets) -> Self:
        """Return a training whose checkpoints have no facts but the job's own."""
        bound = BoundTask.wrap(task)
        return cls(run=run, hooks=hooks, task=bound, data=data, saver=Saver(run, hooks, {}))

    @classmethod
    def begin(
        cls,
        world: World,
        resolved: Resolved,
        hooks: Hooks,
        rank_info: RankInfo,
        proof: Proof | None = None,
    ) -> Self:
        """Prepare data and model, agree with the other ranks, and start the run or resume it.

        ``proof`` copies the model before the strategy touches it.
        """
        task = resolved.task
        data = task.prepare(resolved.config)
        if world.is_main:
            for warning in data.warnings:
                log.warning("%s", warning)
        completed = complete(resolved, data)
        run = build_run(completed.config, hooks, world, task, data, proof=proof)
        check_world(run, hooks, rank_info)
        rows = fingerprint(data.train)
        content = RowContent(data.train)
        judged = fingerprint_of_judged(completed.config, task, data)
        run = agree(run, hooks, completed, rows, content)
        check_causal(run, hooks, task, data.train)
        if spans_machines(rank_info):
            check_shared(run, hooks)
        run, data = padding_free_check.verify(run, hooks, completed, data)
        for line in overview(run, data) if world.is_main else ():
            log.info("%s", line)
        progress, best = resume_or_start(run, hooks, task, data, rows, content, judged)
        if world.is_main:
            content.continue_in_background()
        digests, held = start_folder(run, hooks, task, data, progress)
        sources = source_digests(completed.config)
        facts = {"data": rows, "evaluation_data": judged, "task_files": digests, SOURCES: sources}
        saver = Saver(run, hooks, facts, content=content, held=held)
        return cls(
            run=run, hooks=hooks, task=task, data=data, saver=saver, progress=progress, best=best
        )

    def steps(self) -> Iterator[Step]:
        """Train to the end; yield each step when it is done, updated by the task if it says how."""
        update = make_update(self.run, self.hooks, self.task)
        loop = updated(self._loop(by_caller=True), update) if update else self._loop()
        for step in loop:
            self.progress = step.progress
            yield step

    def steps_by_caller(self) -> Generator[Step, None, None]:
        """Yield each step twice: ready, for the caller to set its result, and when it is done."""
        return self._loop(by_caller=True)

    def _loop(self, by_caller: bool = False) -> Generator[Step, None, None]:
        return steps(self.run, self.hooks, self.task, self.data.train, self.progress, by_caller)

    def evaluate(self) -> Evaluation:
        """Evaluate the evaluation rows, or each of several sets of them."""
        return evaluate_sets(self.run, self.hooks, self.task, self.data)

    def save(self, unlogged: tuple[float, int] = (0.0, 0)) -> None:
        """Commit a checkpoint; ``unlogged`` is the loss since the last log line, and its items."""
        self.saver.save(self.progress, best_entry(self.best), unlogged)


def best_entry(best: Best | None) -> dict[str, Any] | None:
    """Return the best evaluation as a checkpoint's state.json has it."""
    return asdict(best) if best else None


def resume_or_start(
    run: Run,
    hooks: Hooks,
    task: BoundTask,
    data: Datasets,
    rows: str,
    content: RowContent,
    judged: str | None,
) -> tuple[Progress, Best | None]:
    """Load the checkpoint of ``--resume``, if any; return progress and best evaluation so far.

    ``rows`` is the fingerprint of the training rows, ``content`` the digest of all of them,
    ``judged`` the fingerprint of the evaluation rows that judge the run.
    """

    def meta_model() -> nn.Module:
        return model_source(run.config, task, data).meta_model()

    wanted = adopt(run, hooks, meta_model)
    resumed = checkpoint.resume(run, hooks, wanted, rows, task.on_resume, content)
    if not resumed:
        return Progress(), None
    path, progress, job_state = resumed
    best = resumed_best(run.config, task, data, judged, job_state, path)
    run.tally.unlogged = saved_unlogged(job_state, path)
    hooks.load_states(job_state.get("states", {}))
    log.info("resumed from %s at step %d", path, progress.step)
    if run.world.is_main:
        warn_of_changed_sources(path, job_state, run.config)
    if progress.step >= run.total_steps and run.world.is_main:
        key = steps_key(run.config)
        flag = f"--{key.replace('_', '-')}"
        limit = getattr(run.config, key)
        log.warning(
            "the run is already at step %d, and %s %s is not beyond it: nothing is trained; to go"
            " on, raise %s and add --resume-changed %s",
            progress.step,
            flag,
            limit,
            flag,
            key,
        )
    return progress, best


def start_folder(
    run: Run, hooks: Hooks, task: BoundTask, data: Datasets, progress: Progress
) -> tuple[dict[str, str], list[TextIO | None]]:
    """Write the first files on the main rank.

    Returns the digests of the task's files, and config.yaml, which the run holds open.
    """
    digests: dict[str, str] = {}
    held: list[TextIO | None] = []

    hooks.states()  # raises now, and not at the first save, for a state that is not JSON

    def write_start_files(out: Path) -> None:
        set_aside(run.config)
        out.mkdir(parents=True, exist_ok=True)
        config = out / "config.yaml"
        # Otherwise nothing is trained, and the file says how it was.
        if progress.step < run.total_steps or not config.exists():
            # "x" fails if another run took the same folder after it was checked.
            with config.open("w" if run.config.resume else "x", encoding="utf-8") as file:
                file.write(dump_config(run.config))
        held.append(lock_shared(config))

        def save(folder: Path) -> None:
            task.save(folder, run.config, data)

        digests.update(save_task_files(out, save))
        task.reopen(out, run.config)  # fails now rather than when the trained model is exported

    on_main(run, hooks, write_start_files)
    return digests, held
