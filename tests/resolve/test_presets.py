"""``--preset`` fills in what the user leaves open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distcore import RunConfig, load_config
from distcore.config import dump_config
from distcore.distributed.devices import has_fast_bf16
from distcore.errors import ConfigError
from distcore.resolve.resolve import resolve


@pytest.fixture
def rows(work_folder: Path) -> str:
    return str(work_folder / "rows.json")


def test_a_preset_gives_way_to_what_the_user_says() -> None:
    fast = load_config(None, {"preset": "fast"})
    assert (fast.loader.length_grouping, fast.precision) == ("auto", "auto")
    mixed = load_config(
        None, {"preset": "fast", "precision": "fp32", "loader.length_grouping": "window"}
    )
    assert (mixed.loader.length_grouping, mixed.precision) == ("window", "fp32")
    assert load_config(None, {}).loader.length_grouping == "batch"


def test_a_preset_fills_in_a_config_made_in_python_and_not_again_what_a_card_repeats() -> None:
    fast = RunConfig(preset="fast", loader={"workers": 1}, precision="fp32")
    assert (fast.loader.length_grouping, fast.loader.workers, fast.precision) == ("auto", 1, "fp32")
    assert "preset" not in dump_config(fast, defaults=False)
    assert load_config(None, {"preset": "fast", "precision": "fp32"}) == RunConfig(
        preset="fast", precision="fp32"
    )


def test_an_unknown_preset_is_one_line() -> None:
    with pytest.raises(ConfigError, match="preset = 'fats'"):
        load_config(None, {"preset": "fats"})


@pytest.mark.needs("distcore-mesh", "distcore-tasks")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "batch"),
        ({"precision": "bf16"}, "window"),
        # a trial of tune, which must not change the order of the rows
        ({"padding_free": "off"}, "batch"),
        # has no form without padding
        ({"task": "image-classification", "data": "shapes"}, "window"),
        # it pads, but may go on with what another strategy began
        ({"strategy": "mesh", "nproc": 2}, "batch"),
    ],
)
def test_length_grouping_auto_is_windows_where_they_save_time(
    rows: str, changes: dict[str, object], expected: str
) -> None:
    job = {
        "data": rows,
        "model": "bert-tiny",
        "device": "cpu",
        "precision": "fp32",
        "loader.length_grouping": "auto",
    }
    if "task" in changes:
        del job["model"]
    assert resolve(load_config(None, job | changes)).config.loader.length_grouping == expected


@pytest.mark.needs("distcore-tasks")
def test_precision_auto_takes_bf16_only_where_the_hardware_has_it(
    rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, {"precision": "auto", "data": rows, "device": "cpu"})
    assert resolve(config).config.precision == ("bf16" if has_fast_bf16() else "fp32")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert resolve(config).config.precision == "fp32"
