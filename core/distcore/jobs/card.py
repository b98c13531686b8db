"""The model card of an exported model: what was trained, on what, how well it does, and how to train it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distcore.checkpoint.provenance import provenance, without_folder
from distcore.config import RunConfig, dump_config
from distcore.extensions.metrics import lines_up_to

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


def write_card(to: Path, model: str, config: RunConfig, job_state: dict[str, Any], run: Path) -> None:
    """Write ``FILE`` into the model folder ``to``.

    ``model`` is the name of the model's class; ``config`` and ``job_state`` are those of the checkpoint, and ``run`` is
    the run folder that it lies in, whose metrics and report are used if they are there.
    """
    from huggingface_hub import ModelCardData  # comes with transformers

    kind = next((kind for end, kind in KINDS.items() if model.endswith(end)), None)
    head = ModelCardData(library_name="transformers", pipeline_tag=kind, tags=["distcore"])
    lines = ["---", head.to_yaml(), "---", "", *_body(to.name, model, config, job_state, run)]
    (to / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _body(name: str, model: str, config: RunConfig, job_state: dict[str, Any], run: Path) -> Iterator[str]:
    known = provenance(model, job_state, config, run)
    yield f"# {name}"
    yield ""
    yield f"A {model} of the task {known.task}, trained with distcore for {known.steps} optimizer steps."
    if found := _evaluation(run, known.steps):
        yield from ("", "## Evaluation", "", "| metric | value |", "|---|---|")
        yield from (f"| {metric} | {value:.4g} |" for metric, value in found.items())
    yield from ("", "## Data", "")
    yield f"- training: {known.data}, {known.rows}"
    yield f"- SHA-256 of the training rows: `{known.data_sha256}`"
    yield from ("", "## Training", "")
    ranks = f"{known.ranks} rank{'s' * (known.ranks != 1)}"
    yield f"- strategy {known.strategy}, {ranks}, device {known.device}, precision {known.precision}"
    yield f"- {known.environment}"
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
    for line in lines_up_to(step, file) if file.is_file() else ():
        values = json.loads(line)
        if values.get("step") == step:
            found |= {key.removeprefix("eval/"): value for key, value in values.items() if key.startswith("eval/")}
    counts = ("unique", "dataset_size")  # the same as ``evaluated``
    return {name: value for name, value in found.items() if isinstance(value, float | int) and name not in counts}


def _shareable(config: RunConfig) -> str:
    """Return what differs from the defaults as YAML, every absolute path in it without its folder."""
    shared = json.loads(json.dumps(config.model_dump(mode="json")), object_hook=_without_folders)
    return dump_config(RunConfig.model_validate(shared), defaults=False)


def _without_folders(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        without_folder(key): without_folder(value) if isinstance(value, str) else value for key, value in tree.items()
    }
