"""A task as the core calls it: optional methods are looked up once, here, and their results are checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from distcore.config import RunConfig
from distcore.errors import TaskError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.task.datasets import check_indexed, mean_loss
from distcore.plugin.task.frozen import INITIAL, FrozenModel, Initial
from distcore.plugin.task.lines import objects, row_lines, tested_lines
from distcore.plugin.task.outputs import Collected, checked_losses, checked_metrics, checked_outputs
from distcore.plugin.task.phases import Phase
from distcore.plugin.task.ragged import Ragged
from distcore.plugin.task.spec import TaskSpec
from distcore.plugin.task.step import Step
from distcore.plugin.task.task import Batch, Dataset, Datasets, Direction, FileRows, Losses, OnResume, Outputs, Task
from distcore.plugin.task.task import declared_metrics as metrics_of

METHODS = frozenset(name for name, value in vars(TaskSpec).items() if callable(value) and not name.startswith("_"))
"""Names of all methods that a task may have."""
TRIED = 3
"""Lines of predictions that are tried before the first step."""
Loss = Callable[[nn.Module, Batch], Losses]
Log = Callable[..., None]
"""``log(name, value, weight)``, as ``Run.log``."""
T = TypeVar("T")
Evaluated = tuple[dict[str, Tensor | Ragged], Mapping[str, object]]
"""Outputs and sums of one micro-batch."""
Evaluate = Callable[[Batch, int], Evaluated]
"""Evaluates a micro-batch with this number of rows."""


def _unlogged(name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
    """Log nothing."""


class BoundTask:
    """A task's typed face, as ``Hooks`` is a strategy's; implements ``distcore.Task``."""

    def __init__(self, task: Task) -> None:
        """Find out which methods of ``TaskSpec`` the task has; raises TaskError for a class or a plain value."""
        if isinstance(task, type) or type(task).__module__ == "builtins":
            how = f"a name; set task={task!r}" if isinstance(task, str) else type(task).__name__
            how = f"the class; give {task.__name__}()" if isinstance(task, type) else how
            raise TaskError(f"task: expected an object with prepare() and build_model(), and was given {how}")
        self.task = task
        """The task itself, for its options."""
        self.name = type(task).__name__
        """Name of its class, for messages."""
        self._own: dict[str, Any] = {name: method for name in METHODS if callable(method := getattr(task, name, None))}

    @classmethod
    def of(cls, task: Task) -> Self:
        """Return the face of a task; ``task`` itself if it is one."""
        return task if isinstance(task, cls) else cls(task)

    def has(self, *names: str) -> bool:
        """Return True if the task has all of these methods."""
        return self._own.keys() >= {*names}

    # Declarations, and methods that are called before the model exists

    @property
    def declared_metrics(self) -> Mapping[str, Direction]:
        """The task's declared metrics, with their better direction; raises TaskError for another direction."""
        return metrics_of(self.task)

    @property
    def on_resume(self) -> Mapping[str, OnResume]:
        """Rules of a resume for the task's options; default: none may change."""
        declared: Mapping[str, OnResume] = getattr(self.task, "on_resume", {})
        return declared

    @property
    def from_scratch(self) -> bool:
        """True if the task declares, by an attribute of this name, that its model starts from random weights."""
        return bool(getattr(self.task, "from_scratch", False))

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases of the laws that the task does not satisfy, with the reason; default: none."""
        declared: Mapping[str, str] = getattr(self.task, "exempt", {})
        return declared

    @property
    def logs(self) -> tuple[str, ...]:
        """Names of the task's logged values, further loss terms included; default: none."""
        return tuple(getattr(self.task, "logs", ()))

    @property
    def whole_batch(self) -> bool:
        """True if the loss is over the global batch. A task switches this off by ``whole_batch = False``."""
        return self.has("embed", "batch_loss") and bool(getattr(self.task, "whole_batch", True))

    def listener(self) -> dict[str, object]:
        """Return the task as an extension, by name, if it hears events or has a state; otherwise nothing."""
        names = [name for name in dir(type(self.task)) if name in ("state", "load_state") or name.startswith("on_")]
        methods = {name: method for name in names if callable(method := getattr(self.task, name))}
        return {"task": SimpleNamespace(**methods)} if methods else {}

    def suggest(self, config: RunConfig) -> Mapping[str, object]:
        """Return values for keys that the user left at 'auto'; empty if the task has no suggestions."""
        return self._call("suggest", {}, config)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the datasets; raises TaskError if the task lacks a method or a dataset is only an iterator."""
        _ = self.loss
        if self.has("train_step") and (self.has("phases") or self.whole_batch):
            other = "phases" if self.has("phases") else "batch_loss"
            raise TaskError(f"task {self.name}: has both train_step() and {other}(); make the steps in one of them")
        self._check_evaluates()
        data = self.task.prepare(config)
        if not isinstance(data, Datasets):
            raise TaskError(f"task: prepare() returned {type(data).__name__}; expected distcore.Datasets")
        for name in ("train", "evaluation", "test"):
            check_indexed(name, getattr(data, name))
        return data

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return the folder with the model's weights; ``None`` if the task has no such folder."""
        return self._call("weights_folder", None, config)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model in fp32 on torch's default device; raises TaskError for anything else."""
        model: object = self.task.build_model(config, data)
        if not isinstance(model, nn.Module):
            method, kind = "model" if hasattr(self.task, "model") else "build_model", type(model).__name__
            given = f"the class {model.__name__}, not {model.__name__}()" if isinstance(model, type) else kind
            raise TaskError(f"task {self.name}: {method}() returned {given}; expected a torch.nn.Module")
        return model

    # Frozen models

    def frozen(self, config: RunConfig, data: Datasets) -> Mapping[str, FrozenModel | Initial]:
        """Return the frozen models by name, possibly none. Raises TaskError for another type."""
        models: Mapping[str, FrozenModel | Initial] = self._call("frozen", {}, config, data)
        for name, model in models.items():
            if model != INITIAL and not isinstance(model, FrozenModel):
                kind = type(model).__name__
                raise TaskError(f"task: frozen() returned {kind} as {name!r}; expected a FrozenModel or INITIAL")
        if models and not self.has("consult"):
            raise TaskError(f"task {self.name}: has frozen() but no consult(), which asks the frozen models")
        return models

    def consult(self, models: Mapping[str, Callable[..., Any]], batch: Batch) -> Batch:
        """Return ``batch`` with the outputs of the frozen models."""
        return self._own["consult"](models, batch)

    # Phases of a step

    @cached_property
    def phases(self) -> Mapping[str, Phase]:
        """The phases of a step by name, possibly none. Raises TaskError for another type."""
        phases: Mapping[str, Phase] = self._call("phases", {})
        if not isinstance(phases, Mapping) or not all(isinstance(phase, Phase) for phase in phases.values()):
            raise TaskError(f"task: phases() returned {phases!r:.80}; expected a dict of distcore.Phase")
        if self.has("phases") and (not phases or self.whole_batch):
            why = "has both phases() and batch_loss()" if phases else "phases() returned none"
            raise TaskError(f"task {self.name}: {why}; a step needs one kind of loss")
        return phases

    def losses_of_phases(self, log: Log) -> dict[str, Loss]:
        """Return the loss of each phase, which logs by ``log`` if it has an argument of this name."""
        return {name: _logging(phase.loss, log) for name, phase in self.phases.items()}

    def _sum_of_phases(self, model: nn.Module, batch: Batch) -> Losses:
        each = [terms(loss(model, batch)) for loss in self.losses_of_phases(_unlogged).values()]
        return sum((loss for loss, _ in each), torch.zeros(())), {k: v for _, more in each for k, v in more.items()}

    def train_step(self, step: Step) -> object:
        """Have the task make a step."""
        return self._own["train_step"](step)

    # Padding-free computation

    @property
    def computes_padding_free(self) -> bool:
        """True if the task has models that can compute rows without padding."""
        return self.has("why_not_padding_free", "enable_padding_free")

    def why_not_padding_free(self) -> str | None:
        """Return why the model cannot compute rows without padding; ``None`` if it can."""
        if not self.computes_padding_free:
            return "it has no form without padding"
        if self.has("frozen"):
            return "its frozen models compute padded rows"
        reason: str | None = self._own["why_not_padding_free"]()
        return reason

    def skipped_fraction(self) -> float:
        """Return the fraction of per-token compute that the padding-free model skips, from 0 to 1."""
        return self._call("skipped_fraction", 0.0)

    def enable_padding_free(self, module: nn.Module) -> Callable[[], None]:
        """Have ``module`` skip padding; return a function that undoes it."""
        undo: Callable[[], None] = self._call("enable_padding_free", lambda: None, module)
        return undo

    def select_logits(self, module: nn.Module, data: Datasets) -> Datasets:
        """Have ``module`` compute logits at target positions only, if the task can; return datasets to go with it."""
        return self._call("select_logits", data, module, data)

    # Files of a run

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Have the task write its files, if it has any."""
        self._call("save", None, folder, config, data)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows from the files of ``save`` in ``folder``; ``None`` if it wrote nothing.

        Raises TaskError if the task returns anything else.
        """
        data: object = self._call("reopen", None, folder, config)
        if data is not None and not isinstance(data, Datasets):
            raise TaskError(f"task: reopen() returned {type(data).__name__}; expected distcore.Datasets or None")
        return data

    def data_of(self, checkpoint: Path, config: RunConfig) -> Datasets:
        """Return datasets for building the model of a checkpoint.

        They have no rows and come from the task's files in the run folder. For a checkpoint outside of its run folder,
        the data of ``config`` are prepared.
        """
        return self.reopen(checkpoint.resolve().parent.parent, config) or self.prepare(config)

    # Training and evaluation

    @cached_property
    def loss(self) -> Loss:
        """The task's ``loss``, or the sum of its ``row_loss``, without logging; raises TaskError if it has neither.

        A loss over the global batch is computed for one micro-batch alone; losses of phases are added.
        """
        return self.loss_that_logs(_unlogged)

    def loss_that_logs(self, log: Log) -> Loss:
        """Return ``loss``, which logs by ``log`` if it has an argument of this name."""
        if self.whole_batch:
            return self._loss_of_micro_batch
        if self.has("phases"):
            return self._sum_of_phases
        if self.has("loss"):
            own: Loss = _logging(self._own["loss"], log)
            return own
        if not self.has("row_loss"):
            raise TaskError(f"task {self.name}: has neither loss() nor row_loss(); it needs one of them")
        row_loss = _logging(self._own["row_loss"], log)
        checked = partial(checked_losses, row_loss=self._own["row_loss"])

        def summed(model: nn.Module, batch: Batch) -> Losses:
            losses, others = terms(row_loss(model, batch))
            return checked(losses).sum(), {name: checked(term).sum() for name, term in others.items()}

        return summed

    def embed(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the embeddings of each row for the loss, fp32, ``(n, …)`` by name; raises TaskError for others."""
        embeddings = self._own["embed"](model, batch)
        if not isinstance(embeddings, Mapping) or not embeddings:
            raise TaskError(f"task: embed() returned {type(embeddings).__name__}; expected a dict of tensors (n, …)")
        sizes = {len(value) if isinstance(value, Tensor) and value.dim() else 0 for value in embeddings.values()}
        if len(sizes) > 1 or 0 in sizes:
            raise TaskError(f"task: embed() returned {sorted(embeddings)} of unlike rows; expected tensors (n, …)")
        return {name: value.float() for name, value in embeddings.items()}

    def _loss_of_micro_batch(self, model: nn.Module, batch: Batch) -> Tensor:
        embeddings = self.embed(model, batch)
        return self.batch_loss(embeddings, torch.arange(len(next(iter(embeddings.values())))))

    def batch_loss(self, embeddings: dict[str, Tensor], rows: Tensor, log: Log = _unlogged) -> Tensor:
        """Return the loss of all rows of a global batch, a scalar; raises TaskError for anything else."""
        loss = _logging(self._own["batch_loss"], log)(embeddings, rows)
        if not isinstance(loss, Tensor) or loss.dim():
            raise TaskError(f"task: batch_loss() returned {type(loss).__name__}; expected a tensor without dimensions")
        return loss

    def row_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each row, ``(n,)``, or the sum, ``(1,)``, if the task has only a summed loss."""
        if self.has("outputs"):
            losses = self._own["outputs"](model, batch).get("loss")
            if isinstance(losses, Tensor):
                return losses
        elif self.has("row_loss"):
            return self._row_loss(model, batch)
        return terms(self.loss(model, batch))[0][None]

    def evaluation(self, run: Run, labeled: bool = True) -> Evaluate:
        """Return the function that evaluates a micro-batch; it raises TaskError for outputs of a wrong shape.

        Rows that are not ``labeled`` have outputs alone, no sums.
        """
        self._check_evaluates()
        outputs, generate = self._outputs(), self._own.get("generate")
        sums = self._own.get("sums") if labeled and self._sums else None
        in_step = run.capabilities.shards_parameters and run.world.size > 1
        compiled = run.compiled is not None and run.config.compile != "off"

        def evaluate(batch: Batch, rows: int) -> Evaluated:
            given = checked_outputs(outputs[0], outputs[1](run.model, batch), rows) if outputs else {}
            if generate:
                # Not compiled: generated rows grow with each token, and each length would be compiled again.
                with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                    made = checked_outputs("generate", generate(run.module, batch, in_step), rows)
                if twice := sorted(given.keys() & made.keys()):
                    raise TaskError(f"task: generate() returned {twice[0]!r}, which outputs() has, too; choose another")
                given |= made
            return given, sums(run.model, batch) if sums else {}

        return evaluate

    def metrics(self, collected: Collected, dataset: Dataset, data: Datasets) -> dict[str, object]:
        """Return the metrics of ``dataset``; the outputs are in its order.

        Raises TaskError for a value that is not JSON, or for a missing declared metric.
        """
        metrics: dict[str, object] = {}
        if self.has("report") and self._gives_outputs:
            metrics = checked_metrics("report", self._own["report"](collected.outputs, data))
        elif self._evaluates_its_loss:
            metrics = {"loss": mean_loss(collected.outputs, dataset)}
        if self._sums:
            others = checked_metrics("report_sums", self._own["report_sums"](collected.sums, data))
            if twice := sorted(metrics.keys() & others.keys()):
                raise TaskError(f"task: report_sums() returned {twice[0]!r}, which report() has, too; choose another")
            metrics |= others
        declared = getattr(self.task, "metrics", None)
        if isinstance(declared, Mapping) and (missing := sorted(declared.keys() - metrics.keys())):
            raise TaskError(
                f"task: the report lacks {missing[0]!r}, which `metrics` declares; it has {sorted(metrics)}"
            )
        return metrics

    # Predictions

    @property
    def predicts(self) -> bool:
        """True if the task writes a line for each row that was tested."""
        return self.has("predictions")

    def predictions(self, outputs: Outputs, data: Datasets) -> Iterator[str]:
        """Yield the lines of predictions.jsonl; raises TaskError for a line that is not a JSON object."""
        return tested_lines(objects(self._own["predictions"](outputs, data)))

    def try_predictions(self, outputs: Outputs, data: Datasets) -> None:
        """Make the first lines of predictions.jsonl and forget them; raises TaskError as ``predictions`` does."""
        for _ in islice(self.predictions(outputs, data), TRIED) if self.predicts else ():
            pass

    def check_predicts_rows(self, name: str = "") -> None:
        """Raise TaskError, with the missing method, unless the task can predict rows without labels.

        ``name`` is the task's name in the config: a user cannot add methods to an installed task.
        """
        needs = (("row_columns", "open_rows"), ("unlabeled",), ("predictions",), ("outputs", "generate"))
        missing = [f"{first}()" for first, *others in needs if not any(map(self.has, (first, *others)))]
        if not missing:
            return
        lacks = f"does not predict rows without labels, because it lacks {', '.join(missing)}"
        if name and ":" not in name:
            raise TaskError(f"task {name}: {lacks}; distcore eval measures it on rows that have labels")
        raise TaskError(f"task {self.name}: {lacks}: add them; docs/predictions.md has an example")

    def row_columns(self) -> Mapping[str, str]:
        """Return the columns of a file with rows to predict, by the option that names each."""
        return self._call("row_columns", {})

    def open_rows(self, source: Path, others: Mapping[str, str]) -> Iterator[tuple[object, ...]] | None:
        """Yield the records of a file or folder; ``None`` if the core is to read ``row_columns`` itself."""
        return self._call("open_rows", None, source, others)

    def unlabeled(self, rows: FileRows, data: Datasets) -> Datasets:
        """Return ``data`` with ``rows`` as its test rows; raises DataError for a row that the task refuses."""
        dataset = self._own["unlabeled"](rows, data)
        if not hasattr(type(dataset), "batch") or len(dataset) != len(rows.records):
            given = f"{len(dataset)} rows" if hasattr(dataset, "__len__") else type(dataset).__name__
            raise TaskError(f"task: unlabeled() returned {given}; expected a dataset of {len(rows.records)} rows")
        return replace(data, test=dataset)

    def unlabeled_lines(self, outputs: Outputs, data: Datasets, rows: FileRows) -> list[str]:
        """Return one line of predictions for each of ``rows``; ``data`` comes from ``unlabeled``.

        Raises TaskError for a line that is not a JSON object, or too many or too few of them.
        """
        return row_lines(objects(self._own["predictions"](outputs, data)), rows)

    def _call(self, name: str, default: T, *arguments: object) -> T:
        """Call an optional method; return ``default`` if the task does not have it."""
        if name not in self._own:
            return default
        result: T = self._own[name](*arguments)
        return result

    @property
    def _sums(self) -> bool:
        return self.has("sums", "report_sums")

    @property
    def _evaluates_its_loss(self) -> bool:
        return self.has("row_loss") and not self.has("outputs") and not self._sums

    @property
    def _gives_outputs(self) -> bool:
        return self.has("outputs") or self.has("generate") or self._evaluates_its_loss

    def _outputs(self) -> tuple[str, Callable[[nn.Module, Batch], object]] | None:
        """Return the method that gives outputs, and its name."""
        if self.has("outputs"):
            simple = hasattr(self.task, "row_metrics") and "outputs" not in vars(type(self.task))
            return "row_metrics" if simple else "outputs", self._own["outputs"]
        if not self._evaluates_its_loss:
            return None
        return "row_loss", lambda model, batch: {"loss": self._row_loss(model, batch)}

    def _row_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return ``row_loss`` alone, without additional terms and without logging."""
        return row_losses_alone(self._own["row_loss"], model, batch)

    def _check_evaluates(self) -> None:
        if not (self._gives_outputs or self._sums):
            raise TaskError(
                f"task {self.name}: has none of outputs(), sums() and row_loss(); an evaluation needs one of them"
            )
        if not (self.has("report") or self._sums or self._evaluates_its_loss):
            raise TaskError(f"task {self.name}: has outputs but no report(), which makes metrics of them")


def terms(losses: Losses) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return a loss, and its additional terms by name."""
    return losses if isinstance(losses, tuple) else (losses, {})


def row_losses_alone(row_loss: Callable[..., Losses], model: nn.Module, batch: Batch) -> Tensor:
    """Return ``row_loss`` of each row, without additional terms and without logging."""
    return checked_losses(terms(_logging(row_loss, _unlogged)(model, batch))[0], row_loss)


def _logging(loss: Callable[..., Any], log: Log) -> Callable[..., Any]:
    return partial(loss, log=log) if "log" in inspect.signature(loss).parameters else loss
