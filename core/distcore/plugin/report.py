"""The report of a run: what ``train`` returns, and the content of report.json."""

from __future__ import annotations

from typing import Any, TypedDict


class BestEvaluation(TypedDict):
    """The best evaluation of a run, by the metric of ``checkpoints.best``."""

    step: int
    """Optimizer step after which it was done; its checkpoint is kept."""
    metric: str
    """Name of the metric that was compared."""
    value: float
    """Its value."""


class Report(TypedDict):
    """What a run has done; a dict of JSON values: ``report["evaluation"]["loss"]``."""

    strategy: str
    """Name of the strategy."""
    world_size: int
    """Number of ranks."""
    device: str
    """Kind of their devices, by torch's name: ``cpu`` or an accelerator."""
    precision: str
    """Of the forward pass: ``fp32``, ``bf16`` or ``fp16``."""
    weights: str
    """Which weights were evaluated: ``raw``, or ``ema``, the moving average of them."""
    compile: dict[str, Any]
    """``mode`` of ``--compile``, ``compilations``, those that were ``recompilations``, and ``seconds``; of rank 0."""
    padding_free: dict[str, Any]
    """``on``: whether rows had no padding; ``difference`` of some rows' losses from padded ones, if compared."""
    steps: int
    """Optimizer steps from the start of the training, those before a resume included."""
    samples: int
    """Rows of these steps, over all ranks."""
    train_seconds: float
    """Seconds of the steps of this process, without evaluations and checkpoints."""
    samples_per_second: float
    """Rows per second of these steps, over all ranks."""
    peak_memory_bytes: int
    """The largest of all ranks: what tensors took on a GPU, on a CPU the resident set of the process."""
    best: BestEvaluation | None
    """The best evaluation; ``None`` without one, or with ``checkpoints.best: null``."""
    data: dict[str, Any]
    """What the task says of its data: ``Datasets.facts``."""
    evaluation: dict[str, Any]
    """Of the test rows: each metric of the task by name, and ``evaluated``, ``unique`` and ``dataset_size`` in rows."""
    metrics: dict[str, str]
    """The metrics that the task declares, each with ``min`` or ``max``: what is better."""
    out: str
    """The run folder."""
