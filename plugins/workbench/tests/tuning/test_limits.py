"""A setting too large by its plan is not started: by a step's peak where that can be traced,
else by its states.
"""

from __future__ import annotations

import pytest
from text_task import TEXTS, UNTRACEABLE

from distcore.config import load_config
from distcore.jobs.train import check
from distcore.model.model_source import model_source
from distcore.resolve.resolve import resolve
from distcore_workbench.tuning import limits
from distcore_workbench.tuning.limits import Plans, needed_bytes, planned_memory
from distcore_workbench.tuning.settings import Setting, with_setting

JOB = {
    "task": TEXTS,
    "data": "rows.json",
    "device": "cpu",
    "global_batch_size": 32,
    "padding_free": "off",
}
SMALL: Setting = {"micro_batch_size": 1, "micro_batch_tokens": None}


def plans_of(**changes: object) -> Plans:
    resolved = resolve(load_config(None, {**JOB, **changes, "out": "run"}))
    data = check(resolved)
    return Plans(
        resolved.task, data, model_source(resolved.config, resolved.task, data).meta_model()
    )


def why_not(plans: Plans, setting: Setting, **changes: object) -> str:
    return plans.why_not(resolve(with_setting(None, {**JOB, **changes, "out": "run"}, setting)))


@pytest.mark.programs  # as long as one
@pytest.mark.usefixtures("work_folder")
def test_a_setting_is_left_out_by_the_peak_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of()
    assert why_not(plans, {}) == ""
    # that of a whole step on one rank: since that has room, nothing else is traced
    assert len(plans._peaks) == 1
    small_run = resolve(with_setting(None, {**JOB, "out": "run"}, SMALL))
    states, small, whole = (
        planned_memory(small_run, plans.meta_model),
        plans._peak(small_run),
        plans._largest_step(small_run),
    )
    assert states
    assert small
    assert whole
    limit = (small.total + whole.total) // 2
    monkeypatch.setattr(limits, "process_limits", lambda: iter([limit]))
    whole_step: Setting = {"micro_batch_size": 32, "micro_batch_tokens": None}
    assert why_not(plans, whole_step).startswith("needs ")
    assert "at its peak, in backward, and a process here may take" in why_not(plans, whole_step)
    assert why_not(plans, SMALL) == ""
    traced = len(plans._peaks)
    why_not(plans, SMALL)
    assert len(plans._peaks) == traced  # each once
    monkeypatch.setattr(limits, "process_limits", lambda: iter([needed_bytes(states, "cpu") - 1]))
    assert "beside its activations, and a process here may take" in why_not(plans, SMALL)
    assert not plans.untraced


@pytest.mark.programs
@pytest.mark.usefixtures("work_folder")
def test_a_setting_that_cannot_be_traced_is_said_once_and_left_out_by_its_states(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = plans_of(task=UNTRACEABLE)
    monkeypatch.setattr(limits, "process_limits", lambda: iter([2**20]))
    assert "beside its activations" in why_not(plans, {}, task=UNTRACEABLE)
    assert not plans.untraced
    monkeypatch.setattr(limits, "process_limits", lambda: iter([2**40]))
    for setting in ({}, SMALL):
        assert why_not(plans, setting, task=UNTRACEABLE) == ""
    assert len(plans.untraced) == 1
    assert "cannot be traced: loss() fails without values" in plans.untraced[0]
    assert capsys.readouterr().err.count("left out by states alone, without activations: ") == 1
