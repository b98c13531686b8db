"""The report of a run, returned by ``train`` and written to report.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from distcore import registry
from distcore.errors import ConfigError


class BestEvaluation(TypedDict):
    """The best evaluation of a run, by the metric of ``checkpoints.best``."""

    step: int
    """Optimizer step after which it was done; its checkpoint is kept."""
    metric: str
    """Name of the metric that was compared."""
    value: float
    """Its value."""


class ReportKeys(TypedDict):
    """The keys of a report, with JSON values."""

    strategy: str
    """Name of the strategy."""
    world_size: int
    """Number of ranks."""
    device: str
    """Kind of their devices, by torch's name: ``cpu`` or an accelerator."""
    precision: str
    """Of the forward pass: ``fp32``, ``bf16`` or ``fp16``."""
    weights: str
    """The evaluated weights: ``raw``, or ``ema``, their moving average."""
    compile: dict[str, Any]
    """Rank 0's ``mode`` of ``--compile``, ``compilations``, ``recompilations``
    among them, and ``seconds``.
    """
    model: dict[str, int]
    """``parameters``, and those ``trained``, by their elements."""
    micro_batches: dict[str, int | None]
    """Most ``rows`` and ``tokens`` of one, and the cost of one more,
    ``forward_tokens``; null: no bound.
    """
    padding_free: dict[str, Any]
    """``on``: true without padding, and ``why``; ``difference`` of losses from
    padded ones, if compared.
    """
    proof: dict[str, Any]
    """First ``steps`` proved equal to one plain process, with differences by kind;
    or 0, and ``why``.
    """
    steps: int
    """Optimizer steps from the start of the training, those before a resume included."""
    skipped_steps: int
    """Of these steps, those that changed no weight, since fp16 gradients overflowed."""
    samples: int
    """Rows of these steps, over all ranks."""
    measured_since: int
    """Optimizer step from which this process went on, 0 for a new run: times, speed and
    peak are since then.
    """
    train_seconds: float
    """Seconds of the steps of this process, without evaluations and checkpoints."""
    samples_per_second: float
    """Rows per second of these steps, over all ranks."""
    peak_memory_bytes: int
    """Peak of all ranks: memory of tensors on a GPU, or the resident set of the
    process on a CPU.
    """
    best: BestEvaluation | None
    """The best evaluation; ``None`` without one, or with ``checkpoints.best: null``."""
    data: dict[str, Any]
    """Facts of the task about its data: ``Datasets.facts``."""
    evaluation: dict[str, Any]
    """Of the test rows: each metric of the task by name, and ``evaluated``, ``unique``
    and ``dataset_size`` in rows.
    """
    evaluations: dict[str, dict[str, Any]]
    """Of several evaluation sets the last evaluation, by name; each has
    the entries of ``evaluation``.
    """
    test_is_last_evaluation: bool
    """Whether ``evaluation`` is the last one of the training, as it is where the test rows
    are the evaluation rows.
    """
    metrics: dict[str, str]
    """The task's declared metrics, each with its better direction, ``min`` or ``max``."""
    out: str
    """The run folder."""


class Report(dict[str, Any]):
    """The report of a run, a dict of JSON values: ``report["evaluation"]["loss"]``.

    Its keys are those of ``ReportKeys``.
    """

    def plot(self) -> Any:
        """Return the curves and tables of the run: a notebook shows them as a page below the cell,
        a prompt as text.

        Raises ConfigError without the command ``report``, which draws them.
        """
        if "report" not in registry.offers("commands"):
            raise ConfigError("plot: the command report draws a run, and is not installed")
        return registry.load("commands", "report").plots(Path(self["out"]))
