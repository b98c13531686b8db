"""A state.json of which each value has its form, but that no run writes: a resume
refuses it by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from distcore import RunConfig, train
from distcore.checkpoint.manifest import CHECKSUM, MANIFEST, STATE, checksum_line
from distcore.errors import CheckpointError
from distcore.testing.problem import Problem

BEST = {"step": 1, "metric": "loss", "value": 1.0, "waited": 0}
SAID = {
    "rates that are no numbers": (
        {"learning_rates": [math.nan, math.nan]},
        "negative or not a number",
    ),
    "an infinite rate": ({"learning_rates": [math.inf]}, "negative or not a number"),
    "a negative rate": ({"learning_rates": [-1.0]}, "negative or not a number"),
    "more rates than groups": (
        {"learning_rates": [0.01, 0.02, 0.03]},
        "3 learning rates for 2 parameter groups",
    ),
    "rates for nothing": (
        {"learning_rates": [0.01] * 100_000},
        "100000 learning rates for 2 parameter groups",
    ),
    "a list as best": ({"best": [1]}, "AttributeError"),
    "a best value that is no number": (
        {"best": BEST | {"value": math.nan}},
        "the best evaluation cannot be",
    ),
    "a best value in words": ({"best": BEST | {"value": "low"}}, "TypeError"),
    "a best step after the last": (
        {"best": BEST | {"step": 99}},
        "its best step is 99, after step 1",
    ),
    "a best metric without a name": (
        {"best": BEST | {"metric": 5}},
        "the best evaluation cannot be",
    ),
    "a negative patience": ({"best": BEST | {"waited": -5}}, "expected a count"),
}


def run(out: Path, **changes: Any) -> None:
    given = {"out": str(out), "max_steps": 1, "global_batch_size": 8, "lr": 0.01, "device": "cpu"}
    train(
        RunConfig.model_validate(given | {"extensions": {"progress": False}} | changes), Problem()
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    run(out / "run")
    return out / "run"


@pytest.mark.parametrize("name", SAID)
def test_a_hostile_state_is_refused(name: str, finished: Path, tmp_path: Path) -> None:
    changes, said = SAID[name]
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-00000001"
    text = json.dumps(json.loads((path / STATE).read_text()) | changes).encode()
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][STATE] = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    sealed = json.dumps(manifest).encode()
    for file, content in ((STATE, text), (MANIFEST, sealed), (CHECKSUM, checksum_line(sealed))):
        (path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{STATE}: damaged: .*{said}"):
        run(tmp_path / "run", resume="auto")
