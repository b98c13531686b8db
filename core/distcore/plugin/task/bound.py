"""A task as the core calls it: optional methods are looked up once, here, and their results are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distcore.config import RunConfig
from distcore.errors import TaskError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.task.datasets import check_indexed, mean_loss
from distcore.plugin.task.frozen import INITIAL, FrozenModel, Initial
from distcore.plugin.task.losses import TaskLosses
from distcore.plugin.task.outputs import Collected, checked_metrics, checked_outputs, row_lines, tested_lines
from distcore.plugin.task.ragged import Ragged
from distcore.plugin.task.step import Step
from distcore.plugin.task.task import Batch, Dataset, Datasets, FileRows, Outputs

TRIED = 3
"""Lines of predictions that are tried before the first step."""
Evaluated = tuple[dict[str, Tensor | Ragged], Mapping[str, object]]
"""Outputs and sums of one micro-batch."""
Evaluate = Callable[[Batch, int], Evaluated]
"""Evaluates a micro-batch with this number of rows."""


class BoundTask(TaskLosses):
    """A task's typed face, as ``Hooks`` is a strategy's; implements ``distcore.Task``."""

    # Before and for the model

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
        here = Path.cwd()
        data = self.task.prepare(config)
        if (there := Path.cwd()) != here:
            raise TaskError(f"task {self.name}: its code changed the folder to {there} (os.chdir); paths are of {here}")
        if not isinstance(data, Datasets):
            raise TaskError(f"task: prepare() returned {type(data).__name__}; expected distcore.Datasets")
        for name in ("train", "evaluation", "test"):
            check_indexed(name, getattr(data, name))
        for name, rows in data.evaluations.items():
            check_indexed(f"evaluations[{name!r}]", rows)
        if data.evaluation is not next(iter(data.evaluations.values()), data.evaluation):
            raise TaskError(
                f"task {self.name}: prepare() returned as 'evaluation' other rows than the first of its sets"
            )
        return data

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return the folder with the model's weights; ``None`` if the task has no such folder."""
        return self._call("weights_folder", None, config)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model in fp32 on torch's default device; raises TaskError for anything else."""
        model: object = self.task.build_model(config, data)
        if not isinstance(model, nn.Module):
            method, kind = self.written_as("build_model", "model"), type(model).__name__
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

    # A step of its own

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

    # Evaluation

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
        if missing := self.missing_metrics(metrics):
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
        return tested_lines(self._own["predictions"](outputs, data))

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
        return row_lines(self._own["predictions"](outputs, data), rows)

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
        if self.has("outputs"):
            written = self.written_as("outputs", "row_metrics")
            return "row_loss() or row_metrics" if written == "row_metrics" else written, self._own["outputs"]
        if not self._evaluates_its_loss:
            return None
        return "row_loss", lambda model, batch: {"loss": self._row_loss(model, batch)}

    def _check_evaluates(self) -> None:
        if not (self._gives_outputs or self._sums):
            raise TaskError(
                f"task {self.name}: has none of outputs(), sums() and row_loss(); an evaluation needs one of them"
            )
        if not (self.has("report") or self._sums or self._evaluates_its_loss):
            raise TaskError(f"task {self.name}: has outputs but no report(), which makes metrics of them")
