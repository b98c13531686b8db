"""The course of a training run: log, evaluate and save at the steps that ask for it, and end."""

from __future__ import annotations

import logging
import math
import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from distcore.checkpoint.rescue import Rescue, can_save_alone
from distcore.checkpoint.retention import checkpoints_in
from distcore.config import GIVEN, RunConfig
from distcore.engine.best import Best, out_of_patience, update_best
from distcore.engine.meter import Meter, agree_on_stop, agree_on_tally
from distcore.engine.module_checks import refuse_unfrozen, trained_names
from distcore.engine.proof import Proof
from distcore.engine.training import Training, best_entry
from distcore.errors import StoppedError, TrainingError
from distcore.launchers.processes.contexts import handle_stop_signals
from distcore.plugin.strategy.contract import Evaluation, Progress, RankInfo
from distcore.plugin.strategy.tally import Request
from distcore.rank_environment.environment import LAUNCHER_FLAGS_VARIABLE, join
from distcore.resolve.resolve import best_metric

log = logging.getLogger("distcore")


def fit(training: Training, meter: Meter, proof: Proof) -> Evaluation | None:
    """Train to the end; log, evaluate and save at the configured steps.

    Returns the evaluation of the final weights.

    A run ends early after ``patience`` evaluations without a better one, and a resume trains no
    further. It also ends if a listener requests a stop; a resume continues unless ``on_run_start``
    requests a stop again. After SIGTERM or Ctrl-C the run commits a checkpoint, at once if it is
    one process, and raises StoppedError. Raises TaskError if the ``proof`` finds that its first
    steps are not those of one plain process, or if a frozen parameter becomes trainable.
    """
    run, hooks, task, saver = training.run, training.hooks, training.task, training.saver
    config = run.config
    trained = trained_names(run.module)
    metric = best_metric(config, task, training.data)
    directions = training.data.metrics_of_sets(task.declared_metrics)
    requests: frozenset[Request] = frozenset()
    if training.progress.step:
        requests, *_ = agree_on_tally(run, hooks)
    ended = out_of_patience(config, training.best) or "stop" in requests
    can_rescue = can_save_alone(run, makes_own_steps=task.has("train_step"))

    def save_alone(progress: Progress) -> None:
        saver.rescue(progress, best_entry(training.best))

    rescue = Rescue(run, save_alone, can_rescue)
    last: Evaluation | None = None
    stopping = False
    with catch_stop_signals() as signals, rescue:
        for step in () if ended else training.steps():
            progress = step.progress
            done = progress.step == run.total_steps
            meter.add(step.loss, step.items)
            with meter.pause():
                proof.note(run, hooks, step)
            saver.check()
            # If nothing but the log is left to do, the step is complete already.
            if not any(due(config, progress, done, stopping, run.tally.requests)):
                rescue.is_whole(progress)
            logs = done or progress.step % config.log_every == 0
            if logs:
                record, stopping, requests = meter.record(run, hooks, step, bool(signals))
                hooks.on_log(run, record)
                refuse_unfrozen(run.module, trained, progress.step)
            else:
                # Several ranks agree to stop at a log line; a single one stops at once.
                stopping = bool(signals) and run.world.size == 1
                requests = frozenset()
            ended = "stop" in requests
            evaluating, saving = due(config, progress, done, stopping, requests)
            if not evaluating and not saving:
                continue
            if not logs:
                stopping = agree_on_stop(run, hooks, bool(signals))
                meter.find_lost(run, hooks, progress)
            if done:
                refuse_lost(meter, training)
            with meter.pause():
                improved = False
                if evaluating:
                    last = training.evaluate()
                    hooks.on_evaluation_end(run, progress, last)
                    training.best, improved = update_best(
                        progress, training.best, last, metric, directions
                    )
                    ended = ended or out_of_patience(config, training.best)
                if meter.lost_since is not None:
                    log.warning(
                        "step %d is not saved: %s", progress.step, lost_words(meter.lost_since)
                    )
                elif done and evaluating and not is_finite_loss(last):
                    saver.wait()  # the message names the newest checkpoint
                    raise TrainingError(
                        "the loss of the evaluation is not finite after the last step;"
                        f" {remedy(config, training.best)}"
                    )
                elif saving or improved or ended or stopping:
                    training.save(meter.unlogged(run, hooks))
            if stopping or ended:
                break
            rescue.is_whole(progress)
        saver.wait()
        if ended:
            refuse_lost(meter, training)
    ended_at = training.progress.step
    reason = ""
    if ended:
        reason = why_ended(training.best, "stop" in requests, ended_at < run.total_steps)
    if reason:
        log.info("%s: ended after step %d", reason, ended_at)
    elif stopping:
        line = f"stopped after step {ended_at} of {run.total_steps}; {resume_command(config)}"
        raise StoppedError(line, *(128 + number for number in signals[:1]))
    return last


def refuse_lost(meter: Meter, training: Training) -> None:
    """Raise TrainingError if the loss is not finite at the end of the run."""
    if meter.lost_since is not None:
        training.saver.wait()  # the message names the newest checkpoint
        raise TrainingError(
            f"{lost_words(meter.lost_since)}; {remedy(training.run.config, training.best)}"
        )


def lost_words(step: int) -> str:
    """Return since which step the loss is not finite."""
    return f"the loss is not finite since step {step}"


def is_finite_loss(evaluation: Evaluation | None) -> bool:
    """Return False if an evaluation of some rows has a loss that is no number."""
    loss = evaluation.metrics.get("loss") if evaluation and evaluation.evaluated else None
    return not isinstance(loss, float) or math.isfinite(loss)


def remedy(config: RunConfig, best: Best | None) -> str:
    """Return what to do about a loss that is not finite, and which weights are left."""
    saved = checkpoints_in(Path(str(config.out), "checkpoints"))
    left = "no checkpoint was saved before"
    if saved:
        left = f"{saved[0].name} is the last checkpoint with a finite loss"
    if best:
        left += f", step {best.step} the best by {best.metric}"
    return (
        f"{left}; try a lower --lr, a warm-up, --precision fp32, or the extension nan_guard, which"
        " ends at once"
    )


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """Yield the signals so far, to which SIGTERM is added instead of ending the process.

    It may reach one rank only, so ranks agree when to stop. The first Ctrl-C is added, too, but not
    in ranks: their launcher gets it as well, and distcore's then sends SIGTERM. Outside the main
    thread the list stays empty.
    """
    received: list[int] = []
    rank = join(os.environ)
    # Ranks of our launcher ignore Ctrl-C, and it speaks for them.
    is_ours = rank is None or rank.launcher == "local"
    says_so = rank is None or not (is_ours or rank.rank)
    with handle_stop_signals(received.append, is_ours, says_so):
        yield received


def due(
    config: RunConfig, progress: Progress, done: bool, stopping: bool, requests: Collection[str]
) -> tuple[bool, bool]:
    """Return whether the run evaluates, and whether it saves, after this step."""
    step = progress.step
    is_epoch_end = progress.step_in_epoch == 0 and config.eval_at_epoch_end
    is_requested = not {"stop", "evaluate"}.isdisjoint(requests)
    evaluating = done or is_requested or is_epoch_end or is_due(step, config.eval_every)
    saving = done or stopping or "save" in requests or is_due(step, config.save_every)
    return evaluating, saving


def why_ended(best: Best | None, is_requested: bool, is_early: bool) -> str:
    """Return why a run ended: a requested stop or lost patience; empty if it is complete."""
    if is_requested:
        return "an extension or the task requested a stop"
    if best and is_early:
        return f"no better {best.metric} in {best.waited} evaluations"
    return ""


def resume_command(config: RunConfig) -> str:
    """Return the command line that continues this run.

    A shorter hint if the task was given as an object, which no command line names.
    """
    if config.task.startswith(GIVEN):
        return "go on with resume='auto'"
    launcher = (join(os.environ) or RankInfo()).launcher
    flags = os.environ.get(LAUNCHER_FLAGS_VARIABLE, "")
    again = "" if launcher == "local" or flags else f", under {launcher} again,"
    out = shlex.quote(str(config.out))
    file = shlex.quote(str(Path(str(config.out), "config.yaml")))
    return f"go on{again} with: distcore train {file} --out {out} --resume auto {flags}".rstrip()


def is_due(step: int, every: int) -> bool:
    """Return True if ``step`` is a multiple of ``every``; ``every=0`` means never."""
    return every > 0 and step % every == 0
