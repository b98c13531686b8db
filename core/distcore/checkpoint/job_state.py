"""The contents of state.json: progress, learning rates, loss scale, and the config of the job.

There is no random state to save: the order of rows is a function of seed and epoch, and random
numbers are one of seed, step and row, or of seed, step, data shard and micro-batch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import LambdaLR

from distcore.checkpoint.provenance import environment
from distcore.config import RunConfig
from distcore.distributed.arithmetic import kind_of_arithmetic
from distcore.errors import CheckpointError, ConfigError, TaskError
from distcore.files import same_place
from distcore.hints import nearest
from distcore.model.dropout import has_dropout
from distcore.model.optim import learning_rates
from distcore.model.schedules import SCHEDULES
from distcore.plugin.batching.columns import Column, ConstantColumn, is_windowed
from distcore.plugin.batching.permutation import BLOCK, order_kind
from distcore.plugin.strategy.contract import BaseModelRef, Progress, Run
from distcore.plugin.task.datasets import content_of
from distcore.plugin.task.task import Dataset, OnResume

FIXED = (
    "task", "global_batch_size", "seed", "loader.length_grouping", "loader.window",
    "optimizer.name", "freeze", "lora.rank", "lora.targets", "exact",
)  # fmt: skip
"""Config keys that a resumed run must not change: the saved position in the data, or the saved
tensors, depend on them.
"""
CHANGEABLE = (
    "lr",
    "optimizer",
    "schedule",
    "clip",
    "precision",
    "tf32",
    "gradient_checkpointing",
    "lora.alpha",
    "lora.dropout",
    "ema",
    "deterministic",
)
"""Config keys that ``--resume-changed`` may change.

The result then differs from that of an uninterrupted run.
"""

FIXED_IF_EXACT = (
    "threads", "micro_batch_size", "micro_batch_tokens", "padding_free", "dropout_masks", "device",
    "precision", "eval_precision", "gradient_checkpointing",
)  # fmt: skip
"""Config keys that are part of the arithmetic of ``exact``: with others the bits are others."""

CHANGES_RATES = ("lr", "optimizer", "schedule", "epochs", "max_steps")
"""What ``--resume-changed`` takes that changes learning rates."""

EVALUATION_ROWS = "eval_data"
"""What ``--resume-changed`` calls the rows that judge a run, however its task finds them."""

MASKED_BY = (
    "nproc",
    "micro_batch_size",
    "micro_batch_tokens",
    "loader.forward_tokens",
    "compile",
    "strategy_options",
)
"""Config keys that a resumed run may change, and that masks of dropout by rank depend on."""


def fingerprint(dataset: Dataset) -> str:
    """Return a SHA-256, in hexadecimal, of the training rows, wherever their file is.

    It covers the length and items of every row, and the dataset's digest of its content, if any.
    Reads no row. With a digest of the content, columns that are long or no arrays are not read.
    Raises TaskError for columns that are no arrays in a dataset without a digest.
    """
    columns = (dataset.lengths, dataset.items)
    content = content_of(dataset)
    has_arrays = all(isinstance(column, np.ndarray | ConstantColumn) for column in columns)
    if content is None and not has_arrays:
        raise TaskError(
            "task: prepare() returned training data whose lengths or items are no numpy arrays:"
            " give the dataset an attribute 'content', a digest of its rows, so that a resume can"
            " tell them from others"
        )
    digest = hashlib.sha256()
    if content is None or not any(map(is_windowed, columns)):
        for block in chain.from_iterable(map(_blocks, columns)):
            digest.update(block)
    else:
        # A windowed column is read from its file: the digest of the content has to do.
        digest.update(f"{len(dataset)} rows: ".encode())
    digest.update((content or "").encode())
    return digest.hexdigest()


def _blocks(column: Column) -> Iterator[memoryview]:
    """Yield the values of a column as little-endian int64, some rows at a time."""
    for start in range(0, len(column), BLOCK):
        rows = np.arange(start, min(start + BLOCK, len(column)))
        yield np.ascontiguousarray(column[rows], dtype="<i8").data


def collect_job_state(run: Run, progress: Progress) -> dict[str, Any]:
    """Return the contents of state.json, as JSON values."""
    job_state = {
        "progress": asdict(progress),
        "learning_rates": learning_rates(run.optimizer) if run.optimizer else [],
        "scaler": run.loss_scale.state_dict() if run.loss_scale else {},
        "total_steps": run.total_steps,
        "order": order_kind(run.rows),
        # Who trains by this config again must not set a run aside unasked.
        "config": run.config.model_dump(mode="json", exclude={"overwrite"}),
        "environment": environment(run.config.strategy, run.config.task),
    }
    if run.config.exact is not None:
        job_state["arithmetic"] = kind_of_arithmetic()
    if run.capabilities.own_values:
        job_state["own_values"] = dict(run.capabilities.own_values)
    if run.base:
        job_state["base"] = _named(run.base)
    if run.frozen:
        job_state["frozen"] = {name: _named(base) for name, base in run.frozen.items()}
    return job_state


def _named(base: BaseModelRef) -> dict[str, str]:
    """Return what ``check_base`` and ``check_frozen`` compare, and the name for the user."""
    return {"sha256": base.digest, "what": base.what}


def saved_config(job_state: dict[str, Any], path: Path) -> RunConfig:
    """Return the config of the run that wrote the checkpoint at ``path``; raises CheckpointError if
    it is not valid.
    """
    invalid = f"{path / 'state.json'}: not valid in this version of distcore"
    try:
        return RunConfig.model_validate(
            job_state.get("config"), context={"source": invalid, "changes": ()}
        )
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def job_values(config: RunConfig, total_steps: object) -> dict[str, Any]:
    """Return the values that a resume compares with the interrupted run, by key."""
    tree = config.model_dump(mode="json")
    of_arithmetic = FIXED_IF_EXACT if config.exact is not None else ()
    values = {key: _lookup(tree, key) for key in (*FIXED, *CHANGEABLE, *of_arithmetic)}
    # The name is among the fixed keys already, and may be a file that has been moved.
    optimizer = values["optimizer"]
    values["optimizer"] = {key: value for key, value in optimizer.items() if key != "name"}
    options = {f"task_options.{name}": value for name, value in config.task_options.items()}
    return values | options | {"total_steps": total_steps}


def steps_key(config: RunConfig) -> str:
    """Return the key that sets how many steps a run has."""
    return "max_steps" if config.max_steps else "epochs"


def _steps_flag(config: RunConfig) -> str:
    """Return the flag that sets how many steps a run has, with its value."""
    key = steps_key(config)
    return f"--{key.replace('_', '-')} {getattr(config, key)}"


def check_job(
    run: Run,
    job_state: dict[str, Any],
    path: Path,
    data: str | None,
    on_resume: Mapping[str, OnResume],
) -> None:
    """Raise CheckpointError if ``run`` differs from the job that wrote the checkpoint at ``path``.

    The message names the first difference.

    Differences that the user accepted with ``--resume-changed`` are allowed. ``data`` is the
    fingerprint of the run's training rows, ``None`` if unknown; ``on_resume`` has the task's rules
    for its options.
    """
    saved = job_values(saved_config(job_state, path), job_state.get("total_steps"))
    rules = {f"task_options.{name}": rule for name, rule in on_resume.items()}
    current = {
        key: value
        for key, value in job_values(run.config, run.total_steps).items()
        if rules.get(key) != "free" and not _is_base(run.base, key, value)
    }
    options = [key for key in current if key.startswith("task_options.")]
    fixed = {*FIXED, *(key for key in options if key not in rules)}
    if run.config.exact is not None:
        fixed.update(FIXED_IF_EXACT)
    accepted = _accepted(run.config, current, fixed)
    for key, value in current.items():
        # An option that the task did not have when the checkpoint was written cannot be compared.
        if key not in saved or key in accepted or same_place(saved[key], value):
            continue
        name = steps_key(run.config) if key == "total_steps" else key
        difference = f"{name} was {saved[key]!r} and is {value!r}"
        if key in fixed:
            remedy = "resume with the same"
        else:
            remedy = f"accept that with --resume-changed {name}"
        if key == "total_steps":
            before, now = _steps_flag(saved_config(job_state, path)), _steps_flag(run.config)
            if before == now:  # of as many epochs the steps differ by the rows
                raise other_data(path)
            remedy = f"resume with {before}, or {remedy}"
            difference = f"the run was {before} and is {now} ({saved[key]} and {value} steps)"
        raise CheckpointError(
            f"resume = {str(path)!r}: {difference}: the resumed run would differ from an"
            f" uninterrupted one; {remedy}"
        )
    _check_own_values(run, job_state, path, accepted)
    if run.config.exact is not None:
        _check_arithmetic(job_state, path)
    # Before this entry existed, there was one kind of order only.
    order_before = job_state.get("order", "permutation")
    order_now = order_kind(run.rows)
    if order_before != order_now:
        raise CheckpointError(
            f"resume = {str(path)!r}: the order of its rows was {order_before!r} and is"
            f" {order_now!r}: the resumed run would see other rows; resume with the version of"
            " distcore that saved it, or start a new run"
        )
    is_same_data = data is None or job_state.get("data") in (data, None)
    if not is_same_data and keeps_rows(run.config, on_resume):
        raise other_data(path)


def _check_arithmetic(job_state: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if this machine's arithmetic is not that of an exact checkpoint."""
    with _report_malformed(path):
        saved = dict(job_state["arithmetic"])
    for name, value in kind_of_arithmetic().items():
        if saved.get(name) != value:
            raise CheckpointError(
                f"resume = {str(path)!r}: exact: {name} was {saved.get(name)!r} and is {value!r}"
                " here: the resumed run would have other bits than an uninterrupted one; resume on"
                " such a machine, with the same version of torch"
            )


def _accepted(config: RunConfig, current: Mapping[str, Any], fixed: Collection[str]) -> set[str]:
    """Return the keys of ``current`` that may differ, by ``--resume-changed``.

    Raises CheckpointError for a key that a resumed run may not change.
    """
    # What the user sets is the key without its table, or a number of epochs or steps.
    options = [key for key in current if key.startswith("task_options.")]
    key_of = {key.removeprefix("task_options."): key for key in options}
    key_of |= dict.fromkeys(("epochs", "max_steps"), "total_steps")
    accepted = {key_of.get(key, key) for key in config.resume_changed or ()}
    possible = [*(key for key in current if key not in fixed), EVALUATION_ROWS]
    # A task may have an option of that name, which must stay: its rows may change in place.
    refused = accepted.difference(possible, [f"task_options.{EVALUATION_ROWS}"])
    for key in sorted(refused):
        hint = f"{nearest(key, possible)} (these are: {', '.join(possible)})"
        raise CheckpointError(
            f"--resume-changed {key}: not a key that a resumed run may change{hint}"
        )
    return accepted


def _check_own_values(
    run: Run, job_state: dict[str, Any], path: Path, accepted: Collection[str]
) -> None:
    """Raise CheckpointError if the schedule or optimizer of a strategy is another one now.

    Compared are the values that strategies set themselves, past the config. ``accepted`` has the
    keys that the user lets differ.
    """
    with _report_malformed(path):
        saved = dict(job_state.get("own_values", {}))
    now = run.capabilities.own_values
    config_before = saved_config(job_state, path)

    def describe(key: str, values: Mapping[str, object], config: RunConfig) -> str:
        if key not in values:
            return "that of the config"
        return f"{json.dumps(values[key])} of strategy {config.strategy!r}"

    for key in sorted(saved.keys() | now.keys()):
        if saved.get(key) == now.get(key) or key in accepted:
            continue
        was, is_now = describe(key, saved, config_before), describe(key, now, run.config)
        raise CheckpointError(
            f"resume = {str(path)!r}: {key} was {was} and is {is_now}: the resumed run would differ"
            " from an uninterrupted one; resume with the strategy and its options that saved it,"
            f" or accept that with --resume-changed {key}"
        )


def keeps_rows(config: RunConfig, on_resume: Mapping[str, OnResume]) -> bool:
    """Return False if the user changes an option with which a resumed run has other rows."""
    changed = [key.removeprefix("task_options.") for key in config.resume_changed or ()]
    return all(on_resume.get(name) != "other rows" for name in changed)


def other_data(path: Path) -> CheckpointError:
    """Return the error for a resume on other training rows than those of the checkpoint."""
    return CheckpointError(
        f"resume = {str(path)!r}: it was saved with other training data; resume with the same"
    )


def changed_masks(run: Run, job_state: dict[str, Any], path: Path) -> str:
    """Return why ``run`` has other dropout masks than the run of the checkpoint at ``path``.

    Empty if it has the same.
    """
    config_before = saved_config(job_state, path)
    saved = config_before.model_dump(mode="json")
    now = run.config.model_dump(mode="json")
    # A change of the masks' kind is reported where it is chosen.
    are_by_rank = saved["dropout_masks"] == now["dropout_masks"] == "rank"
    if not are_by_rank or not has_dropout(run.module):
        return ""
    # The options of two strategies cannot be compared.
    keys = MASKED_BY if saved["strategy"] == now["strategy"] else MASKED_BY[:-1]
    values = {key: (_lookup(saved, key), _lookup(now, key)) for key in keys}
    values["padding of rows"] = (config_before.pads_rows, run.config.pads_rows)
    changes = [
        f"{key} was {before!r} and is {after!r}"
        for key, (before, after) in values.items()
        if before != after
    ]
    return ", ".join(changes)


def _is_base(base: BaseModelRef | None, key: str, value: object) -> bool:
    """Return True for the option with the base's folder.

    The folder may have moved: ``check_base`` compares its content.
    """
    if base is None or base.folder is None:
        return False
    if not key.startswith("task_options.") or not isinstance(value, str):
        return False
    return Path(value).expanduser().resolve() == base.folder.resolve()


def check_base(base: BaseModelRef | None, job_state: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if the checkpoint has an adapter of another base than ``base``."""
    saved = job_state.get("base")
    if saved is None or base is None:
        return
    with _report_malformed(path):
        digest = str(saved["sha256"])
        what = str(saved["what"])
    if digest != base.digest:
        raise CheckpointError(
            f"{path}: is an adapter of {what} (SHA-256 {digest[:12]}…), not of {base.what} "
            f"({base.digest[:12]}…); give it the model that it was trained on"
        )


def check_frozen(frozen: Mapping[str, BaseModelRef], job_state: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if a frozen model of the checkpoint has other weights in ``frozen``."""
    with _report_malformed(path):
        saved = {
            name: (str(model["sha256"]), str(model["what"]))
            for name, model in job_state.get("frozen", {}).items()
        }
    for name in saved.keys() & frozen.keys():
        digest, what = saved[name]
        base = frozen[name]
        if digest != base.digest:
            raise CheckpointError(
                f"{path}: was trained beside {what} as its frozen model {name!r} (SHA-256"
                f" {digest[:12]}…), not beside {base.what} ({base.digest[:12]}…); give it the model"
                " that it was trained with"
            )


def saved_progress(job_state: dict[str, Any], path: Path) -> Progress:
    """Return the progress of the run that wrote the checkpoint at ``path``.

    Raises CheckpointError if it is damaged.
    """
    with _report_malformed(path):
        saved = {"skipped": 0} | job_state["progress"]  # checkpoints of 0.1 lack that count
        counts = {field.name: _count(saved[field.name]) for field in fields(Progress)}
        return Progress(**counts)


def saved_judgment(job_state: dict[str, Any], path: Path) -> tuple[int, str, float] | None:
    """Return step, metric and value of the best evaluation, as the checkpoint at ``path`` names it.

    ``None`` if it names none. Raises CheckpointError if it is damaged.
    """
    best = job_state.get("best")
    with _report_malformed(path):
        if best is None:
            return None
        _count(best.get("waited", 0))
        if not isinstance(best["metric"], str) or not math.isfinite(best["value"]):
            raise ValueError(f"the best evaluation cannot be {best!r}")
        return _count(best["step"]), best["metric"], float(best["value"])


def saved_unlogged(job_state: Mapping[str, Any], path: Path) -> tuple[float, int]:
    """Return the sum of the loss since the last log line before the checkpoint, and its items.

    Raises CheckpointError if it is damaged.
    """
    unlogged = job_state.get("unlogged")
    if unlogged is None:
        return 0.0, 0
    with _report_malformed(path):
        return float(unlogged["loss"]), _count(unlogged["items"])


def check_progress(run: Run, job_state: dict[str, Any], progress: Progress, path: Path) -> None:
    """Raise CheckpointError for a position that training cannot have.

    Such a position is beyond its epoch, before its step, or before the best step.
    """
    state_file = path / "state.json"
    if (best := saved_judgment(job_state, path)) and best[0] > progress.step:
        raise CheckpointError(
            f"{state_file}: damaged: its best step is {best[0]}, after step {progress.step}"
        )
    done = progress.epoch * run.steps_per_epoch + progress.step_in_epoch
    if progress.step_in_epoch >= run.steps_per_epoch or progress.step < done:
        raise CheckpointError(
            f"{state_file}: damaged: step {progress.step} cannot be step"
            f" {progress.step_in_epoch} of epoch {progress.epoch}, whose epochs have"
            f" {run.steps_per_epoch} steps"
        )


def restore(run: Run, job_state: dict[str, Any], progress: Progress, path: Path) -> None:
    """Restore learning rates, schedule and loss scale; raises CheckpointError for damage.

    The parameter groups may differ from the saved ones, because each strategy makes its own.
    """
    changed = {"lr", "optimizer"} & set(run.config.resume_changed or ())
    with _report_malformed(path):
        rates = [float(rate) for rate in job_state["learning_rates"]]
        _restore_loss_scale(run, job_state["scaler"])
        _check_rates(run, rates, has_same_groups=not changed)
    if isinstance(run.scheduler, LambdaLR):
        saved_rates = rates
        rates = set_schedule_step(run.scheduler, progress.step - progress.skipped)
        _check_code_of_schedule(run, saved_rates, rates, path)
    # Constant rates that the user changed for this run stay; a schedule was already set from
    # the config above.
    stays = run.scheduler is None and changed
    if run.optimizer is None or stays or "schedule" in run.capabilities.owns:
        return
    if rates:
        for index, group in enumerate(run.optimizer.param_groups):
            group["lr"] = rates[min(index, len(rates) - 1)]


def _check_code_of_schedule(
    run: Run, saved_rates: list[float], rates: list[float], path: Path
) -> None:
    """Raise CheckpointError if a user's schedule gives another rate than in the run that saved.

    Only its name is in the config, so nothing else tells that its code was edited.
    """
    accepted = set(run.config.resume_changed or ())
    is_own = run.config.schedule.name not in SCHEDULES
    if not is_own or not saved_rates or accepted & {*CHANGES_RATES}:
        return
    # All groups follow one factor, and each strategy makes groups of its own: one rate will do.
    before, now = max(saved_rates), max(rates)
    if not math.isclose(before, now, rel_tol=1e-6):
        raise CheckpointError(
            f"resume = {str(path)!r}: the learning rate was {before:g}, and"
            f" {run.config.schedule.name!r} now gives {now:g} there: resume with the schedule's"
            " code of then, or accept that with --resume-changed schedule"
        )


def _restore_loss_scale(run: Run, saved: Mapping[str, Any]) -> None:
    """Restore the loss scale; ``saved`` is empty if the run that saved did not use fp16."""
    if run.loss_scale is None or not saved:
        return
    state = run.loss_scale.state_dict()
    # Another kind of scaler may have saved other keys, and values of other types.
    restored = {key: type(state[key])(saved[key]) for key in state if key in saved}
    run.loss_scale.load_state_dict(restored)


def _check_rates(run: Run, rates: list[float], has_same_groups: bool) -> None:
    """Raise ValueError for learning rates that no run of this model can have had."""
    groups = len(run.optimizer.param_groups) if run.optimizer else 0
    # No strategy makes more groups than parameters.
    max_groups = max(groups, len([*run.module.parameters()]))
    is_split = has_same_groups and len(set(rates)) > groups
    if groups and (len(rates) > max_groups or is_split):
        raise ValueError(f"{len(rates)} learning rates for {groups} parameter groups")
    if not all(0 <= rate < math.inf for rate in rates):
        raise ValueError("a learning rate is negative or not a number")


@contextmanager
def _report_malformed(path: Path) -> Iterator[None]:
    """Turn the errors that a malformed state.json causes into a CheckpointError with its name."""
    try:
        yield
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path / 'state.json'}: damaged: {type(error).__name__}: {error}"
        ) from None


def set_schedule_step(scheduler: LambdaLR, step: int) -> list[float]:
    """Set a schedule to ``step`` at once, without the steps before it; return the rates there."""
    rates = [
        float(base) * factor(step)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    position = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
    scheduler.load_state_dict(scheduler.state_dict() | position)
    return rates


def _lookup(tree: dict[str, Any], dotted: str) -> Any:
    for key in dotted.split("."):
        tree = tree[key]
    return tree


def _count(value: object) -> int:
    """Return ``value`` if it is a count; raises ValueError for anything else."""
    # True is an int, too.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise ValueError(f"expected a count, found {value!r}")
    return value
