"""The proof of the first steps raises no false alarm over the examples, however they are cut."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distcore import RunConfig, load_config, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.needs("distcore-tasks", "distcore-ddp", "distcore-fsdp"),
    pytest.mark.filterwarnings("ignore"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXTS = {"model": "bert-tiny", "max_seq_len": 32, "eval_fraction": 0.01}
OWN_STEPS = {
    "agc": "AGC",
    "fomaml": "FOMAML",
    "gradient_norm": "GradientNorm",
    "lookahead": "Lookahead",
    "pcgrad": "PCGrad",
    "sam": "SAM",
}
"""Classes of tasks by their file."""


def extension(file: str, option: str, value: Any) -> dict[str, Any]:
    """Return the keys of a run with an extension of the gallery."""
    return TEXTS | {f"extensions.{EXAMPLES / file}{option}": value}


JOBS: dict[str, dict[str, Any]] = {
    "demo": {"eval_fraction": 0.01}
    | {
        key: value
        for key, value in yaml.safe_load((EXAMPLES / "demo.yaml").read_text()).items()
        if key not in ("strategy", "nproc", "epochs", "global_batch_size", "schedule")
    },
    "gradientnoise": extension(
        "extension-gradientnoise/gradientnoise.py:GradientNoise", ".scale", 0.001
    ),
    "nanguard": extension("extension-nanguard/nanguard.py:NanGuard", "", True),
    "curves": extension("tracker-sqlite/curves.py:Curves", ".file", "../curves.sqlite"),
    "adan": TEXTS | {"optimizer.name": f"{EXAMPLES}/optimizer-adan/adan.py:Adan"},
    "diffusion": {"task": f"{EXAMPLES}/task-diffusion/diffusion.py:Diffusion"},
    **{
        file: {"task": f"{EXAMPLES}/own-steps/{file}.py:{name}"} for file, name in OWN_STEPS.items()
    },
}
"""Keys of a run with each example. A reader's rows, a launcher and own strategies change no step
that the proof of these three would not have.
"""
CUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "ddp": {"strategy": "ddp", "nproc": 2},
    "fsdp": {"strategy": "fsdp", "nproc": 2},
}
NOT_PROVED = {
    "gradientnoise": r"extension '.*' wraps wrap_model\(\), and one plain .*",
    **dict.fromkeys(OWN_STEPS, "the task makes its own steps"),
}
"""What the report says instead."""


@pytest.fixture(autouse=True)
def _neighbors() -> Iterator[None]:
    """Let the examples import the file beside them, as a script does."""
    folder = str(EXAMPLES / "own-steps")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    def of(**keys: Any) -> RunConfig:
        small: dict[str, Any] = {
            "max_steps": 3,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "device": "cpu",
            "prove": "on",
            "out": str(tmp_path / "run"),
            "extensions.progress": False,
            "log_level": "error",
        }
        return load_config(None, small | keys)

    return of


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("job", JOBS)
def test_an_example_is_proved_or_named(
    job: str, cut: str, precision: str, config: Any, tmp_path: Path
) -> None:
    train(config(**JOBS[job] | CUTS[cut], precision=precision))
    proof = json.loads((tmp_path / "run/report.json").read_text())["proof"]
    says = NOT_PROVED.get(job, "")
    assert re.fullmatch(says, proof["why"]), proof
    assert proof["steps"] == (0 if says else 2)
