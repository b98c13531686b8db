"""What a program does with a trained run: evaluate it, predict with it, load its model."""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import nn

from distcore.checkpoint.choice import choose
from distcore.checkpoint.job_state import saved_config
from distcore.checkpoint.reader import Checkpoint
from distcore.config import RunConfig, with_changes
from distcore.config.given_rows import is_rows, stored
from distcore.distributed.devices import resolve_device
from distcore.errors import ConfigError, print_uncaught_on_one_line
from distcore.jobs import evaluate as evaluation
from distcore.jobs import predict as prediction
from distcore.jobs.export import model_of, task_of
from distcore.jobs.logs import set_up_logging
from distcore.jobs.train import one_line, resolve_here
from distcore.launchers import launch
from distcore.plugin.strategy.contract import RankInfo
from distcore.plugin.task.task import Task
from distcore.rank_environment import join

log = logging.getLogger("distcore")
Run = str | Path
"""The folder of a run, or of a checkpoint."""


class LoadedModel(NamedTuple):
    """The model of a run, and what makes its inputs: ``model, tokenizer = load(run)``."""

    model: nn.Module
    """The model, in evaluation mode, in fp32, with the weights that are evaluated."""
    tokenizer: Any
    """The tokenizer of the task; ``None`` if it has none."""


def evaluate(
    run: Run,
    *,
    data: object = None,
    step: int | None = None,
    best: bool = False,
    strategy: str = "single",
    nproc: int = 1,
    task: Task | str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Evaluate a run, or one of its checkpoints; return what ``distcore eval --json`` prints.

    ``data`` are other rows than the run's test rows: a path, or rows in memory. ``step`` or
    ``best`` choose a checkpoint, by default the newest. ``task`` is for a run whose task was given
    to ``train`` as an object. ``changes`` are further keys of the config, such as ``device``. In
    ranks that a launcher started every rank calls, and gets the same report. Raises DistcoreError.
    """
    print_uncaught_on_one_line()
    rank_info = join(os.environ)
    with one_line(None, rank_info):
        path, _ = choose(Path(run), step, best)
        asked = _asked(strategy, task, changes)
        if data is not None:
            asked["test_data"] = _source(data)
        ranks = rank_info.size if rank_info else nproc
        config = evaluation.config_for(path, ranks, asked)
        task_object = _task_object(task)
        _set_up_logging(config, rank_info)
        if rank_info is not None or nproc == 1:
            return _evaluate_rank(config, path, task_object)
        # Errors in config and data come before ranks start.
        resolved = resolve_here(config, training=False, task=task_object)
        resolved.task.prepare(resolved.config)
        return launch(_evaluate_rank, config, path, task_object, nproc=nproc)[0]


def _evaluate_rank(config: RunConfig, path: Path, task: Task | None) -> dict[str, Any]:
    """Evaluate in one rank. At module level, so that it can be pickled for ranks."""
    resolved = resolve_here(config, training=False, task=task)
    return evaluation.evaluate_as_rank(resolved, join(os.environ) or RankInfo(), path)


def predict(
    run: Run,
    data: object,
    *,
    id_column: str | None = None,
    step: int | None = None,
    best: bool = False,
    strategy: str = "single",
    nproc: int = 1,
    task: Task | str | None = None,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Predict rows, which need no labels; return what ``distcore predict`` writes, a dict a row.

    ``data`` is a path, or rows in memory. The other arguments are those of ``evaluate``;
    ``id_column`` names each row in its answer. It starts ranks itself: in ranks that a launcher
    started it raises ConfigError. Raises DistcoreError.
    """
    print_uncaught_on_one_line()
    if join(os.environ) is not None:
        raise ConfigError(
            "predict() starts its own ranks, and this process is one; use distcore predict there"
        )
    with one_line(None), TemporaryDirectory(prefix="distcore-predict-") as folder:
        path, _ = choose(Path(run), step, best)
        config = evaluation.config_for(path, nproc, _asked(strategy, task, changes))
        _set_up_logging(config, None)
        task_object = _task_object(task)
        out = Path(folder, "predictions.jsonl")
        rows = Path(_source(data))
        checked = prediction.check(config, path, rows, out, task_object, id_column)
        predict_rank = partial(prediction.predict_rank, checked, task_object)
        if nproc == 1:
            predict_rank()
        else:
            launch(predict_rank, nproc=nproc)
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def load(
    run: Run,
    *,
    step: int | None = None,
    best: bool = False,
    device: str = "auto",
    task: Task | str | None = None,
) -> LoadedModel:
    """Return the model of a run on this device, and its tokenizer; the data are not needed.

    ``step`` or ``best`` choose a checkpoint, by default the newest. ``device`` is a type by torch's
    name; ``auto``: the accelerator, if any. A model with LoRA has its adapter as peft does.
    ``task`` is as for ``evaluate``. Raises DistcoreError.
    """
    print_uncaught_on_one_line()
    with one_line(None):
        path, _ = choose(Path(run), step, best)
        checkpoint = Checkpoint(path)
        checkpoint.verify()
        config = saved_config(checkpoint.job_state(), path)
        bound = task_of(config, _name_of(task), _task_object(task))
        kind = resolve_device(with_changes(config, {"device": device}))
        module, data = model_of(checkpoint, config, bound)
        return LoadedModel(module.to(kind).eval(), data.loaded_tokenizer)


def _asked(strategy: str, task: Task | str | None, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes to the config of the run, by key."""
    name = _name_of(task)
    return {"strategy": strategy, **changes, **({"task": name} if name else {})}


def _name_of(given: Task | str | None) -> str | None:
    """Return the name of a task; ``None`` for one that was given as an object, and for none."""
    return given if isinstance(given, str) else None


def _task_object(given: Task | str | None) -> Task | None:
    """Return the task that was given as an object; ``None`` for a name, and for none."""
    return None if isinstance(given, str) else given


def _source(data: object) -> str:
    """Return the path of rows, which are stored if they are in memory."""
    return stored(data) if is_rows(data) else str(data)


def _set_up_logging(config: RunConfig, rank_info: RankInfo | None) -> None:
    """Show warnings, unless the program has logging of its own."""
    if not log.hasHandlers():
        quiet = with_changes(config, {"log_level": "warning"})
        set_up_logging(quiet, rank_info.rank if rank_info else 0)
