"""Each option keeps the laws: its checkpoints have the right weights by name, and go on elsewhere and come back."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from distcore.testing.findings import Finding
from distcore.testing.runner import measure, subject_of

TOGETHER: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, "round_robin_gradients": True},
}
"""Options that the quick tests measure."""
APART: dict[str, dict[str, Any]] = {
    "round robin at stage 2": {"stage": 2, "round_robin_gradients": True},
    "round robin with offload": {"stage": 2, "round_robin_gradients": True, "offload_optimizer": "cpu"},
    "aligned parameters": {"stage": 2, "config": {"zero_optimization": {"parameter_alignment": True}}},
}
"""Options one by one."""
CASES = ("neutral-names", "clip-after-accumulation", "into-single", "from-single")


@cache
def findings(quick: bool) -> dict[str, dict[str, Finding]]:
    """Measure one of the groups of options in one launch."""
    options = TOGETHER if quick else APART
    subjects = [subject_of("deepspeed", 2, {**each}, {"device": "cpu"}, CASES) for each in options.values()]
    return {
        label: {finding.case: finding for finding in of_one}
        for label, of_one in zip(options, measure(subjects), strict=True)
    }


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("label", [*TOGETHER, *(pytest.param(label, marks=pytest.mark.slow) for label in APART)])
def test_a_law_holds_with_options(label: str, case: str) -> None:
    finding = findings(label in TOGETHER)[label][case]
    assert finding.held, str(finding)
