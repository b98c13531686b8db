"""DeepSpeed's JSON as people bring it: it fills what the command leaves open, and what it
leaves out is DeepSpeed's.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from distcore import ConfigError, RunConfig, load_config
from distcore.cli.main import main
from distcore.config import flatten
from distcore.resolve.resolve import resolve
from distcore.testing import problem
from distcore.testing.problem import Problem

SEEDS = Path(__file__).parents[4] / "shared/seeds"
MICRO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-05}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 2e8},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    "wall_clock_breakdown": True,
}
"""A file that says rows of a rank and no weight decay."""


def resolved(tree: dict[str, Any], **given: Any) -> RunConfig:
    """The config of a command that names the file and two ranks, and leaves the rest open."""
    command = {"nproc": 2, "device": "cpu", "out": "unused"} | given
    config = load_config(
        None, {"strategy": "deepspeed", "strategy_options": {"config": tree}} | command
    )
    return resolve(config, task=Problem()).config


def values(config: RunConfig, *keys: str) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    return {key: (tree | flatten(tree)).get(key, "nothing") for key in keys}


def test_the_file_says_batch_rate_precision_decay_and_schedule() -> None:
    expected = {
        "micro_batch_size": 4, "global_batch_size": 8, "lr": 3e-5, "precision": "bf16",
        "optimizer.weight_decay": 0.0, "schedule.name": "constant",
    }  # fmt: skip
    assert values(resolved(MICRO), *expected) == expected


def test_the_keys_of_a_file_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "distcore"):
        resolved(MICRO)
    [line] = [
        record.message for record in caplog.records if "the file of strategy" in record.message
    ]
    assert "lr = 3e-05" in line
    assert "optimizer.weight_decay = 0.0" in line
    assert "schedule.name = constant" in line


BATCHES: list[tuple[dict[str, Any], dict[str, Any], tuple[int, Any]]] = [
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}, {}, (24, 3)),
    ({"train_batch_size": 24, "gradient_accumulation_steps": 4}, {}, (24, 3)),
    ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}, {}, (24, 3)),
    ({"train_batch_size": "24"}, {}, (24, "auto")),
    ({"train_micro_batch_size_per_gpu": 3.0}, {}, (6, 3)),
    (
        {"train_batch_size": "auto", "gradient_accumulation_steps": 4},
        {"global_batch_size": 40},
        (40, 5),
    ),
    ({"train_micro_batch_size_per_gpu": 5}, {"global_batch_size": 40}, (40, 5)),
    ({}, {}, (32, "auto")),
]
"""Of train_batch_size, rows of a rank and accumulation, DeepSpeed derives the
one that is missing.
"""


@pytest.mark.parametrize(("tree", "given", "expected"), BATCHES)
def test_the_batch_is_derived_as_deepspeed_does(
    tree: dict[str, Any], given: dict[str, Any], expected: tuple[int, Any]
) -> None:
    config = resolved(tree | {"zero_optimization": {"stage": 1}}, lr=0.01, **given)
    assert (config.global_batch_size, config.micro_batch_size) == expected


def test_a_flag_that_contradicts_the_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.params.lr = 3e-05 \(.*\) but lr = 0.5"):
        resolved(MICRO, lr=0.5)
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps = 1 \(.*\) but .* = 2"):
        resolved(MICRO, global_batch_size=16)


OPTIMIZERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "Adam"}, {"lr": 1e-3, "optimizer.weight_decay": 0.0}),
    (
        {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-4}},
        {"lr": 1e-4, "optimizer.weight_decay": 0.01},
    ),
    ({"type": "AdamW", "params": {"betas": [0.8, 0.99]}}, {"optimizer.betas": [0.8, 0.99]}),
    (
        {"type": "AdamW", "params": {"weight_decay": 0.1, "eps": "1e-6"}},
        {"optimizer.weight_decay": 0.1},
    ),
    (
        {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        {"lr": 0.3, "optimizer.weight_decay": 0.01},
    ),
]


@pytest.mark.parametrize(("section", "expected"), OPTIMIZERS)
def test_a_key_that_the_optimizer_leaves_out_has_deepspeeds_default(
    section: dict[str, Any], expected: dict[str, Any]
) -> None:
    given = {"lr": 0.3} if "auto" in str(section) else {}
    assert values(resolved({"optimizer": section}, **given), *expected) == expected


SCHEDULERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "WarmupLR"}, {"schedule.warmup_steps": 1000}),
    ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, {"schedule.warmup_steps": 1}),
    (
        {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.02, "total_num_steps": 90}},
        {"lr": 0.02},
    ),
]


@pytest.mark.parametrize(("section", "expected"), SCHEDULERS)
def test_a_scheduler_has_its_own_keys_and_deepspeeds_defaults(
    section: dict[str, Any], expected: dict[str, Any]
) -> None:
    tree = {"scheduler": section, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    assert values(resolved(tree), *expected) == expected


def test_a_truth_value_for_zero_is_stage_1_or_0() -> None:
    for given, stage in ((True, 1), (False, 0), ("true", 1)):
        config = resolved({"zero_optimization": given, "allgather_size": 1000}, lr=0.1)
        assert config.strategy_options["config"]["zero_optimization"] == given
        from distcore_deepspeed import read_config

        user = read_config({"zero_optimization": given, "allgather_size": 1000}, "x")
        assert user.stage == stage
        assert user.get("zero_optimization.allgather_bucket_size") == 1000


def test_a_file_without_a_stage_is_trained_at_stage_1() -> None:
    from distcore_deepspeed import read_config

    assert [read_config(tree, "x").stage for tree in ({"train_batch_size": 4}, None)] == [1, 2]
    assert (
        resolved({"communication_data_type": "fp32"}, lr=0.1, precision="bf16").precision == "bf16"
    )


def test_words_for_truth_are_read_as_deepspeed_reads_them() -> None:
    assert resolved({"bf16": {"enabled": "yes"}}, lr=0.1).precision == "bf16"
    assert resolved({"bf16": {"enabled": "off"}}, lr=0.1).precision == "fp32"


def test_a_key_that_deepspeed_ignores_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    # a run in this process may have set another
    with caplog.at_level("WARNING", logger="distcore"):
        resolved(MICRO | {"log_dist": False, "steps_per_prints": 3})
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "DeepSpeed ignores 'log_dist'" in warning
    assert "'steps_per_prints' (did you mean 'steps_per_print'?)" in warning


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"amp": {"enabled": "auto"}},
        r"DeepSpeed 0\.\S+ refuses it: NVIDIA Apex AMP integration has been removed\. Use",
    ),
    ({"elasticity": {"enabled": True}}, r"refuses it: Elastic training has been removed"),
    ({"sparse_gradients": True}, r"refuses it: Sparse compression .* has been removed"),
    (
        {"curriculum_learning": {}},
        r"refuses it: Legacy top-level 'curriculum_learning' has been removed",
    ),
    (
        {"compression_training": {}},
        r"refuses it: The DeepSpeed compression library has been removed",
    ),
    ({"compile": {"backend": "inductor"}}, r"refuses it: unknown key 'compile.backend'"),
    (
        {"tensorboard": {"enabled": "maybe"}},
        r"refuses it: tensorboard.enabled = 'maybe': input should be a valid bool",
    ),
    ({"checkpoint": {"tag_validation": "Q"}}, r"invalid tag_validation value of Q"),
    ({"train_batch_size": 1.5}, r"train_batch_size = 1.5: expected a whole number"),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": "high"}}},
        r"optimizer.params.lr = 'high': expected a number",
    ),
    (
        {"tensor_parallel": {"autotp_size": 2}},
        r"tensor_parallel.autotp_size = 2 .* \(mesh splits layers\) = 1",
    ),
]


@pytest.mark.parametrize(("tree", "message"), REFUSED)
def test_a_file_that_deepspeed_refuses_is_refused_before_ranks_start(
    tree: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(tree, lr=0.1)
    assert "\n" not in str(caught.value)


@pytest.mark.ranks
def test_the_weights_are_those_of_deepspeeds_adam_without_decay(tmp_path: Path) -> None:
    from distcore.checkpoint import Checkpoint

    (tmp_path / "ds.json").write_text(
        json.dumps({key: MICRO[key] for key in MICRO if key != "bf16"})
    )
    words = (
        f"--task {problem.__file__}:Problem --nproc 2 --set device=cpu --max-steps 4 --set"
        " extensions.progress=false"
    )
    job = [*words.split(), "--out"]
    file = ["--strategy", "deepspeed", "--set", f"strategy_options.config={tmp_path / 'ds.json'}"]
    assert main(["train", *job, str(tmp_path / "there"), *file]) == 0
    alike = "--strategy ddp --lr 3e-5 --set optimizer.weight_decay=0 --set schedule.name=constant"
    batch = "--global-batch-size 8 --micro-batch-size 4"
    assert main(["train", *job, str(tmp_path / "here"), *alike.split(), *batch.split()]) == 0
    there, here = (
        Checkpoint(next((tmp_path / name / "checkpoints").glob("step-*")))
        for name in ("there", "here")
    )
    weights = [name for name in there if name.startswith("model")]
    assert weights
    assert max((there[name] - here[name]).abs().max() for name in weights) < 1e-6


@pytest.mark.skipif(
    not SEEDS.is_dir(), reason=f"no {SEEDS}: the files of the documents are beside the repository"
)
@pytest.mark.parametrize("name", sorted(path.name for path in SEEDS.glob("S*.json")))
def test_the_files_of_the_documents(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each is taken as it is; one that apex needs ends in DeepSpeed's own line, and fp16 needs a
    device that has it.
    """
    monkeypatch.chdir(SEEDS)
    tree = json.loads((SEEDS / name).read_text())
    config = load_config(
        None,
        {
            "strategy": "deepspeed",
            "strategy_options": {"config": name},
            "nproc": 2,
            "device": "cpu",
            "out": os.fspath(tmp_path / "run"),
        }
        | ({} if "lr" in str(tree) and "'lr': 'auto'" not in str(tree) else {"lr": 1e-3}),
    )
    try:
        resolved = resolve(config, task=Problem()).config
    except ConfigError as error:
        reason = str(error)
        assert "Apex AMP integration has been removed" in reason or "no fp16 on a CPU" in reason
    else:
        rows = tree.get("train_batch_size", "auto")
        assert resolved.global_batch_size == (
            rows if rows != "auto" else resolved.global_batch_size
        )
