"""Modules of researchers under each strategy: each trains as in one process, or is named or
refused in one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from own_modules import NAMES, task_of
from torch import Tensor

from distcore import DistcoreError, RunConfig, train
from distcore.checkpoint import read_tensors
from distcore.errors import RankError
from distcore.testing.reference import largest_difference

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.needs("distcore-ddp", "distcore-fsdp", "distcore-deepspeed", "distcore-horovod"),
    pytest.mark.filterwarnings("ignore"),
]

WAYS: dict[str, dict[str, Any]] = {
    "one process": {"micro_batch_size": 2},
    "ddp": {"strategy": "ddp", "nproc": 2, "micro_batch_size": 2},
    "fsdp": {"strategy": "fsdp", "nproc": 2, "micro_batch_size": 2},
    "deepspeed": {"strategy": "deepspeed:3", "nproc": 2, "micro_batch_size": 2},
    "horovod": {"strategy": "horovod", "nproc": 2, "micro_batch_size": 2},
}
"""How a run is cut, by name."""
SHARDED = ("fsdp", "deepspeed")
CLOSE = {"MixedKinds": 1e-3}
"""Largest relative difference of weights from those of one process that has whole batches;
5e-6, but for bf16.
"""

BUFFER = "forward updates the (buffer|frozen weight) '.*', once in each micro-batch"
RANDOM = "draws random numbers outside of dropout by row"
NAMED = {
    "SpectralNorm": BUFFER,
    "Codebook": BUFFER,
    "Queue": BUFFER,
    "TargetNetwork": BUFFER,
    "DropConnect": RANDOM,
    "VAE": RANDOM,
    "StochasticDepth": RANDOM,
    "ActNorm": "a row's loss depends on other rows of its micro-batch",
    "CalledAsOften": "a row's loss depends on other rows of its micro-batch",
    "Memory": "one plain process does not repeat itself",
    "FakeQuantized": r"an evaluation changes the buffer 'quantize.zero_point'",
}
"""Modules whose results follow from the cut by their own nature: what a run says of
them, and trains on.
"""
EQUAL = {("one process", "StochasticDepth")}
"""Ways in which such a module is equal all the same: so few numbers come from one stream,
micro-batch after micro-batch.
"""

UNUSED = "got no gradient in this step; freeze it, or --set strategy_options.find_unused=true"
SLOPES = "cannot compute such gradients"
CANNOT = "cannot train this model as it is: "
DTYPES = "two dtypes|are sharded together, which torch does for one dtype alone"
REFUSED: dict[tuple[str, str], str] = {
    **{
        (way, name): UNUSED
        for way in ("ddp", "horovod")
        for name in ("SkippedExperts", "Unused", "Queue", "FrozenPart", "FourierFeatures")
    },
    **{
        (way, "Adversarial"): "needs strategy_options.find_unused=true"
        for way in ("ddp", "horovod")
    },
    ("deepspeed", "Adversarial"): "trains in phases",
    ("fsdp", "WritesData"): "proof: after step 2 the loss differs",
    ("deepspeed", "WritesData"): "proof: after step 2 the loss differs",
    **{(way, name): SLOPES for way in SHARDED for name in ("Forces", "CheckpointedSlope")},
    **{("deepspeed", name): SLOPES for name in ("NeuralODE", "Equilibrium")},
    **{("fsdp", name): "no dimension that could be sharded" for name in ("OwnFunction", "Scalars")},
    **{(way, "MixedKinds"): DTYPES for way in SHARDED},
    **{(way, "ComplexLinear"): "takes no complex parameters" for way in (*SHARDED, "horovod")},
    ("fsdp", "SkippedExperts"): "sums gradients of the same parameters on all ranks",
    ("deepspeed", "SkippedExperts"): "rank 0 comes to the module .* where rank 1 comes to",
    ("deepspeed", "CalledAsOften"): "rank 0 comes to .* where rank 1 comes to",
    ("deepspeed", "FunctionalCall"): f"{CANNOT}AttributeError",
    ("deepspeed", "FunctionalSlope"): f"{CANNOT}RuntimeError",
    ("deepspeed", "FuncGrad"): "calls 'last' inside of torch.func",
    **{
        (way, "TwinRecomputed"): rf"{CANNOT}AssertionError in \w+\(\), \w+.py:\d+"
        for way in ("deepspeed", "horovod")
    },
    ("ddp", "TwinRecomputed"): "got a second gradient in one backward pass",
    **{(way, "SparseBag"): "takes no sparse gradients" for way in (*SHARDED, "horovod")},
    ("deepspeed", "compiled"): r"a result of torch.compile\(\)",
    **{
        ("horovod", name): "cannot compute batch normalization over the rows of a step"
        for name in ("BatchNorm", "OtherMode", "CellBatchNorm", "SiameseBatchNorm")
    },
    **{(way, "GrowsLazily"): "the first forward pass made the parameter 'late'" for way in WAYS},
}
"""What a way refuses in one line, by way and module."""


def run(out: Path, name: str, **changes: Any) -> tuple[str, dict[str, Tensor]]:
    """Train a module for three steps; return why its first steps are not
    proved, and its weights.
    """
    settings: dict[str, Any] = {
        "lr": 0.05,
        "max_steps": 3,
        "global_batch_size": 8,
        "device": "cpu",
        "nproc": 1,
        "out": str(out),
        "extensions": {"progress": False, "metrics": False},
        "checkpoints": {"best": None},
        "data_guard_steps": 0,
        "optimizer": {"name": "sgd", "weight_decay": 0.0},
        "log_level": "error",
        "timeout": 60,
    }
    train(RunConfig(**settings | changes), task_of(name))
    proof = json.loads((out / "report.json").read_text())["proof"]
    return proof["why"], dict(read_tensors(max((out / "checkpoints").iterdir()), ("model",)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Tensor]]:
    """Return the weights of a module that one process trained on whole batches."""
    folder, kept = tmp_path_factory.mktemp("whole"), dict[str, dict[str, Tensor]]()

    def weights(name: str) -> dict[str, Tensor]:
        if name not in kept:
            why, kept[name] = run(folder / name, name, micro_batch_size=8)
            assert not why or name in ("Memory", "FakeQuantized")
        return kept[name]

    return weights


OF_EVERY_RUN = {("fsdp", "SkippedExperts"), ("deepspeed", "SkippedExperts")}
"""Cases that are not slow: both ways in which ranks are compared, over real ranks."""
CASES = [
    pytest.param(way, name, marks=() if (way, name) in OF_EVERY_RUN else pytest.mark.slow)
    for way in WAYS
    for name in NAMES
]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_a_module_trains_as_in_one_process_or_is_named(
    way: str, name: str, whole: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    if says := REFUSED.get((way, name)):
        with pytest.raises(DistcoreError, match=says) as refusal:
            run(tmp_path / "run", name, **WAYS[way])
        assert not isinstance(refusal.value, RankError)
        assert "\n" not in str(refusal.value)
        return
    expected = whole(name)
    why, weights = run(tmp_path / "run", name, **WAYS[way])
    says = "" if (way, name) in EQUAL else NAMED.get(name, "")
    assert re.search(says or "^$", why), why
    assert says or largest_difference(weights, expected)[0] <= CLOSE.get(name, 5e-6)
