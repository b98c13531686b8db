"""Names of the hub, downloaded for real by ``datasets`` and ``huggingface_hub``
from a hub on loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import hub_server
from transformers import BertConfig, BertForSequenceClassification

from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

pytestmark = pytest.mark.programs


def repositories(root: Path) -> None:
    """Write a dataset with two splits, and a small BERT."""
    data, model = root / "datasets/tiny/chats", root / "models/tiny/bert"
    data.mkdir(parents=True)
    for split, rows in (("train", 40), ("test", 7)):
        lines = [
            json.dumps({"text": f"{split} row {row}", "label": row % 2}) + "\n"
            for row in range(rows)
        ]
        (data / f"{split}.jsonl").write_text("".join(lines))
    tokenizer = as_transformers(train_wordpiece(["train test row 0123456789"], 64))
    tokenizer.save_pretrained(model)
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **shape)
    BertForSequenceClassification(config).save_pretrained(model)


def test_a_model_and_the_splits_of_a_dataset_are_downloaded_once_and_then_need_no_network(
    tmp_path: Path,
) -> None:
    repositories(tmp_path / "hub")
    names = ["--data", "tiny/chats@train", "--test-data", "tiny/chats@test", "--model", "tiny/bert"]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment.pop("HF_HUB_OFFLINE", None)

    def run(endpoint: str, out: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "distcore",
            "train",
            *names,
            "--max-steps",
            "2",
            "--max-seq-len",
            "32",
        ]
        given = environment | {"HF_ENDPOINT": endpoint, "DISTCORE_CACHE": str(tmp_path / "cache")}
        return subprocess.run(
            [*command, "--out", out, *options],
            env=given,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )

    with hub_server(tmp_path / "hub") as endpoint:
        first = run(endpoint, "first")
        assert first.returncode == 0, first.stderr
        wrong = run(endpoint, "wrong", "--data", "tiny/chats@tset")
    assert wrong.returncode == 2
    assert "dataset tiny/chats: has no split 'tset' (did you mean 'test'?)" in wrong.stderr
    report = json.loads((tmp_path / "first/report.json").read_text())
    assert report["evaluation"]["evaluated"] == 7
    again = run(endpoint, "again")  # by now nobody listens there
    assert again.returncode == 0, again.stderr
    one, other = (
        json.loads((tmp_path / out / "report.json").read_text()) for out in ("first", "again")
    )
    assert other["evaluation"] == one["evaluation"]
