"""A trained run that the jobs on its weights share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distcore.cli.main import main


@pytest.fixture(scope="package")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with checkpoints after 5 and 6 steps, trained on ``rows.jsonl`` beside it; not to be written to."""
    folder = tmp_path_factory.mktemp("trained")
    rows = [{"text": f"{word} {number}", "label": word} for number in range(60) for word in ("good", "bad")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--model bert-tiny --max-steps 6 --save-every 5 --keep-last 3 --set schedule.name=constant"
    assert main(f"train --data {folder}/rows.jsonl {flags} --out {folder}/run".split()) == 0
    return folder / "run"
