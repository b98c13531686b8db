"""The end of a run: test the weights, write report.json and predictions.jsonl."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from distcore.distributed.devices import peak_memory
from distcore.engine.evaluation import evaluate_all
from distcore.engine.meter import Meter
from distcore.engine.proof import Proof
from distcore.engine.training import Training
from distcore.files import strict_json, unique_json
from distcore.plugin.report import BestEvaluation, Report, ReportKeys
from distcore.plugin.strategy.contract import Evaluation
from distcore.resolve.run_folder import on_main

log = logging.getLogger("distcore")
MEASURED = ("measured_since", "train_seconds", "samples_per_second", "peak_memory_bytes")
"""Figures of training in the report."""


def finish(training: Training, last: Evaluation | None, meter: Meter, proof: Proof) -> Report:
    """Test the final weights, write report.json and predictions.jsonl; return the report.

    Only a task that predicts has predictions.jsonl.
    """
    run, hooks, task, data = training.run, training.hooks, training.task, training.data
    progress = training.progress
    best = training.best
    speed = meter.samples_per_second(progress)
    tested = evaluate_all(run, hooks, task, data, last)
    device = run.world.device
    mine = {"peak": torch.tensor([peak_memory(device)], device=device)}
    peak = hooks.gather_outputs(run, mine)["peak"].max()
    best_evaluation = None
    if best:
        best_evaluation = BestEvaluation(step=best.step, metric=best.metric, value=best.value)
    keys: ReportKeys = {
        "strategy": hooks.name,
        "world_size": run.world.size,
        "device": run.world.device.type,
        "precision": run.config.precision,
        "weights": "raw" if run.ema is None else "ema",
        "compile": {"mode": run.config.compile, **(asdict(run.compiled) if run.compiled else {})},
        **run.facts,  # type: ignore[typeddict-item]  # the facts have keys of the report
        "proof": proof.facts,
        "steps": progress.step,
        "skipped_steps": progress.skipped,
        "samples": progress.samples,
        "measured_since": meter.began.step,
        "train_seconds": meter.seconds,
        "samples_per_second": speed,
        "peak_memory_bytes": int(peak),
        "best": best_evaluation,
        "data": data.facts,
        "evaluation": tested.summary(),
        "evaluations": {name: part.summary() for name, part in tested.sets.items()},
        "test_is_last_evaluation": last is not None and data.test is data.evaluation,
        "metrics": dict(task.declared_metrics),
        "out": str(run.config.out),
    }
    report = Report(keys)

    def write(out: Path) -> None:
        target = out / "report.json"
        # Nothing was trained now: the figures of the last training stay.
        former = {} if speed else _measured_before(target, report)
        target.write_text(strict_json({**report, **former}, indent=1), encoding="utf-8")
        if task.predictions.are_written:
            with (out / "predictions.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(task.predictions.lines(tested.outputs, data))

    on_main(run, hooks, write)
    if run.compiled and run.config.compile != "off":
        log.info(
            "compile = %r: %d compilations, %d of them again, %.0f s",
            run.config.compile,
            run.compiled.compilations,
            run.compiled.recompilations,
            run.compiled.seconds,
        )
    hooks.on_run_end(run, report)
    return report


def _measured_before(file: Path, report: Report) -> dict[str, Any]:
    """Return the figures of an earlier report of the same kind of run; empty without one."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # somebody may have edited it
        before = unique_json(file.read_text("utf-8"))
        if all(before[key] == report[key] for key in ("strategy", "world_size")):
            return {key: before[key] for key in MEASURED if key in before}
    return {}
