"""The kit of extensions: ours keep its laws, and each law is broken by an extension that
breaks it on purpose.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit_cases import broken_in

from distcore import dump_config, registry
from distcore_workbench.kits.extension import SUITE
from distcore_workbench.kits.extension_lab import ExtensionLab
from distcore_workbench.kits.missing import packages_of_extras, train_without

ROOT = Path(__file__).parents[4]
FILE = Path(__file__).with_name("broken_extensions.py")
EXAMPLES = ("gradientnoise/gradientnoise.py:GradientNoise", "nanguard/nanguard.py:NanGuard")
ELSEWHERE = {"accelerate_trackers", "lm_eval", "mlflow"}
"""Not measured here: an account of a service is needed, or a language model, or the library
draws as it starts.
"""
OURS = [
    *sorted(registry.offers("extensions").keys() - ELSEWHERE),
    *(f"{ROOT}/examples/extension-{name}" for name in EXAMPLES),
]
BROKEN = broken_in(FILE)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ScalesGradients"])
def test_a_broken_extension_breaks_its_law(name: str) -> None:
    _check_broken(name)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_extension_breaks_its_law(name: str) -> None:
    _check_broken(name)


def _check_broken(name: str) -> None:
    (finding,) = SUITE.measure(f"{FILE}:{name}", only=[BROKEN[name]])
    assert finding.held is False, finding
    assert finding.note
    assert "Traceback" not in finding.note


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", [f"{FILE}:Sound", *OURS])
def test_our_extensions_keep_the_laws(name: str) -> None:
    assert [str(finding) for finding in SUITE.measure(name) if finding.held is False] == []


@pytest.mark.slow
@pytest.mark.programs
def test_a_package_that_is_missing_at_the_first_step_is_an_error(tmp_path: Path) -> None:
    lab = ExtensionLab(f"{FILE}:ImportsLate", {}, tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(lab.config("run", on=True)))
    assert train_without([], file) == ""
    assert "No module named 'tensorboard'" in train_without(["tensorboard"], file)
    assert packages_of_extras("extensions", "wandb") == ["mlflow", "tensorboard", "wandb"]


def test_every_case_has_a_broken_extension() -> None:
    assert set(BROKEN.values()) == SUITE.cases.keys() - {"says-what-is-missing"}
