"""The model card of an exported model: what was trained, on what, how well it does, and how to train it again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distcore.config import RunConfig, dump_config
from distcore.plugin.report import Report

FILE = "README.md"
"""The file of a model folder that hubs show."""
KINDS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
}
"""How the name of a transformers class ends, to the pipeline of transformers that takes it."""
PACKAGES = ("distcore", "torch", "transformers", "tokenizers")
"""Packages whose versions a result depends on."""


def write_card(to: Path, model: str, config: RunConfig, job_state: dict[str, Any], run: Path) -> None:
    """Write ``FILE`` into the model folder ``to``.

    ``model`` is the name of the model's class; ``config`` and ``job_state``, with ``weights`` beside, are those of the
    checkpoint, and ``run`` is the run folder that it lies in, whose metrics and report are used if they are there.
    """
    from huggingface_hub import ModelCardData  # comes with transformers

    kind = next((kind for end, kind in KINDS.items() if model.endswith(end)), None)
    head = ModelCardData(library_name="transformers", pipeline_tag=kind, tags=["distcore"])
    lines = ["---", head.to_yaml(), "---", "", *_body(to.name, model, config, job_state, run)]
    (to / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _body(name: str, model: str, config: RunConfig, job_state: dict[str, Any], run: Path) -> Iterator[str]:
    step = job_state["progress"]["step"]
    yield f"# {name}"
    yield ""
    yield f"A {model} of the task {_without_folder(config.task)}, trained with distcore for {step} optimizer steps."
    if job_state["weights"] == "ema":
        yield f"Its weights are an exponential moving average of those that were trained, of decay {config.ema.decay}."
    if found := _evaluation(run, step):
        yield from ("", "## Evaluation", "", "| metric | value |", "|---|---|")
        yield from (f"| {metric} | {value:.4g} |" for metric, value in found.items())
    yield from ("", "## Data", "")
    yield f"- training: {_without_folder(config.task_options.get('data', 'of the task'))}, {_rows(run)}"
    yield f"- SHA-256 of the training rows: `{job_state.get('data')}`"
    yield from ("", "## Training", "")
    ranks = f"{config.nproc} rank{'s' * (config.nproc != 1)}"
    yield f"- strategy {config.strategy}, {ranks}, device {config.device}, precision {config.precision}"
    yield f"- {', '.join(f'{package} {found}' for package, found in _versions())}"
    yield from (
        "",
        "What differs from the defaults; as a file, `distcore train config.yaml` trains it again:",
        "",
        "```yaml",
    )
    yield _shareable(config).strip()
    yield "```"


def _evaluation(run: Path, step: int) -> dict[str, float]:
    """Return the metrics of the evaluation after ``step``, as metrics.jsonl has them; none if there was no such one."""
    file = run / "metrics.jsonl"
    found: dict[str, object] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        values = json.loads(line)
        if values.get("step") == step:
            found |= {key.removeprefix("eval/"): value for key, value in values.items() if key.startswith("eval/")}
    counts = ("unique", "dataset_size")  # the same as ``evaluated``
    return {name: value for name, value in found.items() if isinstance(value, float | int) and name not in counts}


def _rows(run: Path) -> str:
    """Return how many rows the report counts; a run that was interrupted has none."""
    try:
        report: Report = json.loads((run / "report.json").read_text(encoding="utf-8"))
        return f"{report['data']['train']['rows']} rows"
    except (OSError, ValueError, KeyError, TypeError):
        return "number of rows not reported"


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:  # run from its sources
            continue


def _without_folder(value: object) -> str:
    """Return a name, or a path's last part: where a file lies is nobody's business who reads the card."""
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else str(value)


def _shareable(config: RunConfig) -> str:
    """Return what differs from the defaults as YAML, every absolute path in it without its folder."""
    shared = json.loads(json.dumps(config.model_dump(mode="json")), object_hook=_without_folders)
    return dump_config(RunConfig.model_validate(shared), defaults=False)


def _without_folders(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        _without_folder(key): _without_folder(value) if isinstance(value, str) else value for key, value in tree.items()
    }
