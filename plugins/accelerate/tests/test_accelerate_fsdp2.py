"""Accelerate's FSDP2. It shards on GPUs only, so here it is told that it has some: its
code runs over gloo.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from distcore import ConfigError, World, load_config
from distcore.cli.main import main
from distcore.testing import STRATEGIES
from distcore.testing.subject import Subject
from distcore_accelerate import accelerator, checks, strategy
from distcore_accelerate.fsdp2 import plugin_arguments
from distcore_accelerate.settings import Settings
from distcore_accelerate.strategy import AccelerateStrategy

CASES = ("partitions", "ragged-tail", "parameter-groups", "bf16", "clip-by-norm", "every-size")
CHECKPOINTS = ("neutral-names", "round-trip", "into-single", "from-single", "bit-for-bit")


def on_supposed_gpus(settings: Settings, world: World, arguments: dict[str, Any]) -> Accelerator:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    return accelerator.new_accelerator(settings, world, {"cpu": False} | arguments)


@pytest.mark.ranks
def test_the_laws_hold_where_accelerate_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "new_accelerator", on_supposed_gpus)
    monkeypatch.setattr(
        PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU)
    )
    config = load_config(
        None, {"strategy": "accelerate", "nproc": 2, "strategy_options.backend": "fsdp2"}
    )
    cases = tuple(STRATEGIES.required[name] for name in (*CASES, *CHECKPOINTS))
    (findings,) = STRATEGIES.measure_all([Subject(config=config, cases=cases)], limit=60)
    assert not [str(finding) for finding in findings if not finding.held]


@pytest.mark.ranks
@pytest.mark.needs("distcore-tasks")
def test_a_model_with_a_layer_around_its_embedding_trains_as_in_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        {"text": f"row {number} " * (number % 5 + 1), "label": number % 2} for number in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = [
        "train",
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--model",
        "bert-tiny",
        "--max-steps",
        "3",
    ]
    assert main([*job, "--global-batch-size", "8", "--out", str(tmp_path / "single")]) == 0
    monkeypatch.setattr(strategy, "new_accelerator", on_supposed_gpus)
    monkeypatch.setattr(
        PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU)
    )
    monkeypatch.setattr(checks, "_check_device", lambda *_: None)
    sharded = ["--strategy", "accelerate:fsdp2", "--nproc", "2", "--out", str(tmp_path / "fsdp2")]
    assert main([*job, "--global-batch-size", "8", *sharded]) == 0
    reports = [
        json.loads((tmp_path / name / "report.json").read_text()) for name in ("single", "fsdp2")
    ]
    losses = [report["evaluation"]["loss"] for report in reports]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_section_of_an_accelerate_file_becomes_arguments() -> None:
    section = {
        "version": 2,
        "reshard_after_forward": False,
        "transformer_layer_cls_to_wrap": "BertLayer,BertPooler",
    }
    settings = Settings(backend="fsdp2", source="f.yaml", distributed_type="FSDP", fsdp=section)
    arguments = plugin_arguments(AccelerateStrategy(), settings)
    assert arguments["reshard_after_forward"] is False
    assert arguments["transformer_cls_names_to_wrap"] == ["BertLayer", "BertPooler"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"version": 1},
            r"f.yaml: fsdp_config.fsdp_version = 1: only FSDP2; convert.*accelerate to-fsdp2",
        ),
        ({}, r"fsdp_version = 1: only FSDP2"),
        ({"version": 2, "reshard": True}, r"unknown key 'fsdp_config.fsdp_reshard'"),
    ],
)
def test_a_section_that_cannot_be_followed_is_one_line(
    section: dict[str, Any], message: str
) -> None:
    settings = Settings(backend="fsdp2", source="f.yaml", distributed_type="FSDP", fsdp=section)
    with pytest.raises(ConfigError, match=message):
        plugin_arguments(AccelerateStrategy(), settings)
