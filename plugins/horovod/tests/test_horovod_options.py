"""Horovod's options, without ranks: the settings that each rules out."""

from __future__ import annotations

from typing import Any

import pytest

from distcore import ConfigError, RunConfig

strategy = pytest.importorskip(
    "distcore_horovod.strategy", reason="needs Horovod: distcore-horovod build", exc_type=ImportError
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "fp16"}, "fp16"),
        ({"clip": {"norm": 1.0}}, "clipping"),
        ({"clip": {"norm": None, "value": 0.1}}, "clip"),
    ],
)
def test_adasum_combines_steps_so_nothing_may_change_gradients(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy.hvd, "mpi_built", lambda: True)
    config = RunConfig.model_validate({"device": "cpu", "clip": {"norm": None}} | changes)
    with pytest.raises(ConfigError, match=f"combines steps, not gradients, so .*{said}"):
        strategy.HorovodStrategy(op="adasum").check_config(config)
    strategy.HorovodStrategy().check_config(config)


def test_adasum_without_those_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy.hvd, "mpi_built", lambda: True)
    strategy.HorovodStrategy(op="adasum").check_config(
        RunConfig.model_validate({"device": "cpu", "clip": {"norm": None}})
    )


def test_parameters_without_gradients_and_phases_need_find_unused() -> None:
    plain, unused = strategy.HorovodStrategy().capabilities, strategy.HorovodStrategy(find_unused=True).capabilities
    assert "unused-parameters" in plain.exempt
    assert "unused-parameters" not in unused.exempt
    assert unused.phases
    assert not plain.phases
