"""A changed job is refused in one line that names the difference, and the flag
where there is one.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from distcore import Capabilities, Run, World, load_config
from distcore.checkpoint import _check_names
from distcore.checkpoint.job_state import CHANGEABLE, FIXED, check_job, collect_job_state
from distcore.errors import CheckpointError
from distcore.plugin.strategy.contract import Progress
from distcore.plugin.task.task import OnResume
from distcore.strategies.single import SingleStrategy

OTHERS: dict[str, Any] = {
    "task": "another",
    "global_batch_size": 16,
    "seed": 1,
    "loader.length_grouping": "window",
    "loader.window": 9,
    "optimizer.name": "another",
    "lr": 0.1,
    "optimizer": {"eps": 0.1},
    "schedule": {"name": "cosine"},
    "clip": {"norm": 3.0},
    "precision": "bf16",
    "gradient_checkpointing": True,
    "total_steps": 16,
    "freeze": "head",
    "lora.rank": 8,
    "lora.targets": ["query"],
    "lora.alpha": 1.0,
    "lora.dropout": 0.5,
    "ema": {"decay": 0.9},
    "deterministic": True,
    "exact": 4,
    "tf32": True,
}
"""Another value for each key that a resumed run must share with the one that was interrupted."""


def run(**changes: Any) -> Run:
    steps = changes.pop("total_steps", 15)
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    model = nn.Identity()
    return Run(
        config=load_config(None, changes),
        world=world,
        capabilities=SingleStrategy.capabilities,
        module=model,
        model=model,
        total_steps=steps,
    )


SAVED = collect_job_state(run(), Progress(step=7)) | {"data": "rows"}
PATH = Path("runs/a/checkpoints/step-00000007")


def test_every_key_has_a_case() -> None:
    assert OTHERS.keys() == {*FIXED, *CHANGEABLE, "total_steps"}


@pytest.mark.parametrize("key", OTHERS)
def test_a_changed_value_is_refused_by_name(key: str) -> None:
    then = "resume with the same" if key in FIXED else f"accept that with --resume-changed {key}"
    reason = "the resumed run would differ from an uninterrupted one"
    differs = f"{re.escape(key)} was .+ and is .+"
    if key == "total_steps":  # users set epochs or steps
        differs = r"the run was --epochs 1 and is --epochs 2 \(15 and 16 steps\)"
        then = "resume with --epochs 1, or accept that with --resume-changed epochs"
    line = rf"^resume = '{PATH}': {differs}: {reason}; {then}$"
    changes = {key: OTHERS[key]} | ({"epochs": 2} if key == "total_steps" else {})
    with pytest.raises(CheckpointError, match=line):
        check_job(run(**changes), SAVED, PATH, "rows", {})


def test_as_many_epochs_of_other_steps_are_of_other_rows() -> None:
    with pytest.raises(
        CheckpointError, match="it was saved with other training data; resume with the same"
    ):
        check_job(run(total_steps=OTHERS["total_steps"]), SAVED, PATH, "other rows", {})


@pytest.mark.parametrize("key", [*CHANGEABLE, "total_steps"])
def test_a_change_that_can_be_accepted_is_accepted(key: str) -> None:
    check_job(run(**{key: OTHERS[key]}, resume_changed=key), SAVED, PATH, "rows", {})


def test_a_change_of_steps_is_accepted_by_the_flag_that_sets_them() -> None:
    check_job(
        run(total_steps=OTHERS["total_steps"], resume_changed="epochs"), SAVED, PATH, "rows", {}
    )


@pytest.mark.parametrize("key", [*FIXED, "lrr"])
def test_a_key_that_may_not_change_cannot_be_accepted(key: str) -> None:
    line = f"^--resume-changed {re.escape(key)}: not a key that a resumed run may change"
    with pytest.raises(CheckpointError, match=line):
        check_job(run(resume_changed=key), SAVED, PATH, "rows", {})


def test_changed_rows_are_refused_and_unknown_ones_are_not() -> None:
    with pytest.raises(
        CheckpointError, match=r"it was saved with other training data; resume with the same$"
    ):
        check_job(run(), SAVED, PATH, "other rows", {})
    check_job(run(), SAVED, PATH, None, {})


@pytest.mark.parametrize(
    "key", ["strategy", "nproc", "micro_batch_size", "save_every", "log_every"]
)
def test_strategy_and_ranks_may_change(key: str) -> None:
    check_job(run(**{key: "another" if key == "strategy" else 3}), SAVED, PATH, "rows", {})


OPTIONS = {"size": 3, "path": "a.json", "dropout": 0.1, "model": "small"}
RULES: dict[str, OnResume] = {"path": "free", "dropout": "ask", "model": "other rows"}
OTHER_OPTIONS: dict[str, Any] = {"size": 4, "path": "b.json", "dropout": 0.2, "model": "large"}
SAVED_OPTIONS = collect_job_state(run(task_options=OPTIONS), Progress(step=7)) | {"data": "rows"}


def with_other(option: str, **changes: Any) -> Run:
    return run(task_options=OPTIONS | {option: OTHER_OPTIONS[option]}, **changes)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_task_change_as_the_task_says(option: str) -> None:
    if option == "path":
        check_job(with_other(option), SAVED_OPTIONS, PATH, "rows", RULES)
        return
    key = f"task_options.{option}"
    then = (
        "resume with the same" if option == "size" else f"accept that with --resume-changed {key}"
    )
    with pytest.raises(CheckpointError, match=rf": {key} was .+ and is .+; {then}$"):
        check_job(with_other(option), SAVED_OPTIONS, PATH, "rows", RULES)
    with pytest.raises(CheckpointError, match=rf": {key} was .+; resume with the same$"):
        check_job(with_other(option), SAVED_OPTIONS, PATH, "rows", {})  # a task that says nothing


def test_options_that_were_accepted_may_change_and_only_some_of_them_change_the_rows() -> None:
    # the short key
    check_job(with_other("dropout", resume_changed="dropout"), SAVED_OPTIONS, PATH, "rows", RULES)
    check_job(
        with_other("model", resume_changed="task_options.model"),
        SAVED_OPTIONS,
        PATH,
        "other rows",
        RULES,
    )
    with pytest.raises(CheckpointError, match="saved with other training data"):
        check_job(
            with_other("dropout", resume_changed="dropout"),
            SAVED_OPTIONS,
            PATH,
            "other rows",
            RULES,
        )
    with pytest.raises(
        CheckpointError, match=r"--resume-changed task_options\.size: not a key that"
    ):
        check_job(
            with_other("size", resume_changed="task_options.size"),
            SAVED_OPTIONS,
            PATH,
            "rows",
            RULES,
        )


def test_an_option_that_the_task_did_not_have_then_is_not_compared() -> None:
    check_job(run(task_options=OPTIONS | {"new": 1}), SAVED_OPTIONS, PATH, "rows", RULES)


def test_both_names_of_a_tied_weight_are_known() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    run: Any = SimpleNamespace(module=module, capabilities=SimpleNamespace(ranks_per_shard=1))
    saved: Any = type("Saved", (dict,), {"path": Path("saved")})({"optimizer/1.weight/exp_avg": 0})
    _check_names(run, cast("Any", None), saved)
    saved["model/2.weight"] = 0
    with pytest.raises(
        CheckpointError, match=r"saved: 'model/2.weight' belongs to nothing in the model"
    ):
        _check_names(run, cast("Any", None), saved)


STEPS = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
OWN = replace(SingleStrategy.capabilities, own_values={"schedule": STEPS})
OTHER = replace(SingleStrategy.capabilities, own_values={"schedule": {"type": "OneCycle"}})


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (
            OWN,
            SingleStrategy.capabilities,
            r"was \{\"type\": \"WarmupLR\".* of strategy 'single' and is that of the config",
        ),
        (
            SingleStrategy.capabilities,
            OWN,
            r"was that of the config and is \{\"type\": \"WarmupLR\"",
        ),
        (OWN, OTHER, r"was .*WarmupLR.* and is .*OneCycle"),
    ],
)
def test_a_schedule_of_the_strategys_own_is_the_job(
    then: Capabilities, now: Capabilities, said: str
) -> None:
    saved = collect_job_state(replace(run(), capabilities=then), Progress(step=7))
    check_job(replace(run(), capabilities=then), saved, PATH, None, {})
    with pytest.raises(
        CheckpointError, match=f"schedule {said}.*; .* accept that with --resume-changed schedule"
    ) as caught:
        check_job(replace(run(), capabilities=now), saved, PATH, None, {})
    assert "\n" not in str(caught.value)
    check_job(replace(run(resume_changed=["schedule"]), capabilities=now), saved, PATH, None, {})
