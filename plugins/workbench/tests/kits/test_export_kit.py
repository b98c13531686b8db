"""The suite of exporters: ours keep its laws, and each law is broken by an exporter
with one line changed.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from kit_cases import use_module

from distcore_workbench.kits.export import SUITE

SOURCE = (files("distcore_workbench") / "skeleton/export/export.py.txt").read_text(encoding="utf-8")
WEIGHTS = "torch.save(trained.module.state_dict(), "
BROKEN = {
    "half": ("has-the-weights", "state_dict(),", "half().state_dict(),"),
    "no-bias": ("has-the-weights", WEIGHTS, "del trained.module._parameters; " + WEIGHTS),
    "always-fp32": ("keeps-the-dtype", "trained.module.state", "trained.module.float().state"),
    "asks-for-no-folder": ("into-an-empty-folder", "exist_ok=True", ""),
    "no-tokenizer": ("has-the-task-files", "trained.save_task_files(to)", "return"),
    "no-card": ("says-where-it-is-from", "dict(trained.provenance)", "{}"),
    "says-the-folder": (
        "says-where-it-is-from",
        "dict(trained.provenance)",
        "str(trained.checkpoint)",
    ),
    "time-of-day": ("same-again", "dict(trained.provenance)", "__import__('time').time()"),
    "own-error": (
        "says-what-cannot-be-written",
        "    to.mkdir(",
        "    assert to.parent.is_dir()\n    to.mkdir(",
    ),
    "swallows": (
        "says-what-cannot-be-written",
        "    to.mkdir(",
        "    if not to.parent.is_dir(): return\n    to.mkdir(",
    ),
    "rounds-in-place": (
        "changes-no-model",
        "    to.mkdir(",
        "    trained.module.half()\n    to.mkdir(",
    ),
    "writes-beside": ("stays-in-its-folder", '(to / "card.json")', '(to.parent / "card.json")'),
    "marks-the-run": (
        "stays-in-its-folder",
        "    to.mkdir(",
        "    (trained.checkpoint / 'x').touch()\n    to.mkdir(",
    ),
    "draws": ("draws-nothing", "    to.mkdir(", "    torch.rand(1)\n    to.mkdir("),
}
"""By name: the case that must notice, a text of the skeleton, and what is there instead."""
TEXTS = {"task": "text-classification", "model": "bert-tiny"}
LANGUAGE = {"task": "causal-lm", "model": "llama-tiny", "max_seq_len": 32}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["rounds-in-place"])
def test_a_broken_exporter_breaks_its_law(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_broken(name, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_exporter_breaks_its_law(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_broken(name, tmp_path, monkeypatch)


def check_broken(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, old, new = BROKEN[name]
    assert old in SOURCE
    use_module(SOURCE.replace(old, new, 1), "exports", ":export", folder, monkeypatch)
    (finding,) = SUITE.measure("mine", only=[case])
    assert finding.held is False, finding
    assert finding.note


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["huggingface", "dcp", "gguf", "onnx", "torch-export"])
def test_our_exporters_keep_the_laws(name: str, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(
            json.dumps({"text": f"{'good' if n % 2 else 'bad'} {n}", "label": n % 2}) + "\n"
            for n in range(40)
        )
    )
    job = LANGUAGE if name == "gguf" else TEXTS
    assert [
        str(finding)
        for finding in SUITE.measure(name, {**job, "data": str(data)})
        if finding.held is False
    ] == []


def test_every_case_has_a_broken_exporter() -> None:
    assert {case for case, _, _ in BROKEN.values()} == set(SUITE.cases)
