"""The evaluation of a task: outputs and sums of each micro-batch, and metrics of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from distcore.errors import TaskError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.task.datasets import mean_loss
from distcore.plugin.task.losses import TaskLosses
from distcore.plugin.task.methods import TaskMethods
from distcore.plugin.task.outputs import Collected, checked_metrics, checked_outputs
from distcore.plugin.task.ragged import Ragged
from distcore.plugin.task.task import Batch, Dataset, Datasets

Evaluated = tuple[dict[str, Tensor | Ragged], Mapping[str, object]]
"""Outputs and sums of one micro-batch."""
Evaluate = Callable[[Batch, int], Evaluated]
"""Evaluates a micro-batch with this number of rows."""


class TaskEvaluation:
    """Outputs, sums and metrics of evaluated rows; results are checked."""

    def __init__(self, methods: TaskMethods, losses: TaskLosses) -> None:
        self._methods = methods
        self._losses = losses

    def of_run(self, run: Run, labeled: bool = True) -> Evaluate:
        """Return the function that evaluates a micro-batch; TaskError for a wrong shape.

        Rows that are not ``labeled`` have outputs alone, no sums.
        """
        self.check()
        outputs = self._outputs()
        generate = self._methods.find("generate")
        sums = self._methods.find("sums") if labeled and self._sums else None
        in_step = run.capabilities.shards_parameters and run.world.size > 1
        is_compiled = run.compiled is not None and run.config.compile != "off"

        def evaluate(batch: Batch, rows: int) -> Evaluated:
            results: dict[str, Tensor | Ragged] = {}
            if outputs:
                method, compute = outputs
                results = checked_outputs(method, compute(run.model, batch), rows)
            if generate:
                # Not compiled: generated rows grow with each token, and each length would
                # be compiled again.
                with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
                    generated = generate(run.module, batch, in_step)
                    more = checked_outputs("generate", generated, rows)
                if twice := sorted(results.keys() & more.keys()):
                    raise TaskError(
                        f"task: generate() returned {twice[0]!r}, which outputs() has, too; choose"
                        " another"
                    )
                results |= more
            return results, sums(run.model, batch) if sums else {}

        return evaluate

    def metrics(self, collected: Collected, dataset: Dataset, data: Datasets) -> dict[str, object]:
        """Return the metrics of ``dataset``; the outputs are in its order.

        Raises TaskError for a value that is not JSON, or for a missing declared metric.
        """
        metrics: dict[str, object] = {}
        if self._methods.has("report") and self._gives_outputs:
            metrics = checked_metrics("report", self._methods["report"](collected.outputs, data))
        elif self._evaluates_its_loss:
            metrics = {"loss": mean_loss(collected.outputs, dataset)}
        if self._sums:
            report = self._methods["report_sums"](collected.sums, data)
            others = checked_metrics("report_sums", report)
            if twice := sorted(metrics.keys() & others.keys()):
                raise TaskError(
                    f"task: report_sums() returned {twice[0]!r}, which report() has, too; choose"
                    " another"
                )
            metrics |= others
        if missing := self.missing_metrics(metrics):
            raise TaskError(
                f"task: the report lacks {missing[0]!r}, which `metrics` declares; it has"
                f" {sorted(metrics)}"
            )
        return metrics

    @property
    def _sums(self) -> bool:
        return self._methods.has("sums", "report_sums")

    @property
    def _evaluates_its_loss(self) -> bool:
        return self._methods.has("row_loss") and not self._methods.has("outputs") and not self._sums

    @property
    def _gives_outputs(self) -> bool:
        has_method = self._methods.has("outputs") or self._methods.has("generate")
        return has_method or self._evaluates_its_loss

    def _outputs(self) -> tuple[str, Callable[[nn.Module, Batch], object]] | None:
        """Return the method that gives outputs, and its name for messages; ``None`` without."""
        if self._methods.has("outputs"):
            name = self._methods.written_as("outputs", "row_metrics")
            if name == "row_metrics":
                name = "row_loss() or row_metrics"
            return name, self._methods["outputs"]
        if not self._evaluates_its_loss:
            return None
        return "row_loss", lambda model, batch: {"loss": self._losses.of_each_row(model, batch)}

    def check(self) -> None:
        """Raise TaskError unless the task has what an evaluation needs."""
        if not (self._gives_outputs or self._sums):
            raise TaskError(
                f"task {self._methods.name}: has none of outputs(), sums() and row_loss(); "
                "an evaluation needs one of them"
            )
        if not (self._methods.has("report") or self._sums or self._evaluates_its_loss):
            raise TaskError(
                f"task {self._methods.name}: has outputs but no report(), which makes metrics of"
                " them"
            )

    def missing_metrics(self, metrics: Mapping[str, object]) -> list[str]:
        """Return the declared metrics that ``metrics`` lacks; none if none are declared."""
        declared: object = self._methods.declared("metrics", None)
        if not isinstance(declared, Mapping):
            return []
        return sorted(declared.keys() - metrics.keys())
