"""Precision sets the dtypes that ranks exchange, and recomputation runs each layer twice."""

from collections import defaultdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distcore import Clip, RunConfig, defaults, launch
from distcore.testing.problem import Problem
from distcore.testing.rank import lab_of
from distcore.testing.subject import Subject

pytestmark = pytest.mark.ranks

OPTIONS = {
    "default": {},
    "param_dtype": {"param_dtype": "precision"},
    "reduce_dtype": {"reduce_dtype": "precision"},
    "activation_checkpointing": {"activation_checkpointing": True},
    "tp, activation_checkpointing": {"tp": 2, "activation_checkpointing": True},
}


class Dtypes(TorchDispatchMode):
    """Notes the dtypes of what each collective exchanges."""

    def __init__(self):
        super().__init__()
        self.seen = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen[func._opname] |= {
                each.dtype for each in tree_leaves(args) if isinstance(each, torch.Tensor)
            }
        return func(*args, **(kwargs or {}))


def in_a_rank(folder):
    steps = {}
    for name, options in OPTIONS.items():
        config = RunConfig(strategy="mesh", strategy_options=options, nproc=2, device="cpu")
        with lab_of(Subject(config=config, cases=()), folder) as lab:
            steps[name] = of_a_step(lab.job(Problem(), precision="bf16"))
    return steps


def of_a_step(job):
    """The dtypes of collectives, those of parameters and gradients, how often a layer ran,
    and the gradient's norm.
    """
    ran = []
    job.run.module.get_submodule("blocks.1.up").register_forward_hook(lambda *_: ran.append(1))
    batch = job.data.train.batch(torch.arange(4).numpy())
    with Dtypes() as dtypes:
        with torch.autocast("cpu", torch.bfloat16):
            loss = job.task.loss(job.run.model, batch)
        defaults.backward(job.run, loss)
    kept = {p.dtype for p in job.run.module.parameters()}
    kept |= {p.grad.dtype for p in job.run.module.parameters() if p.grad is not None}
    result = job.hooks.step(job.run, Clip(norm=1e9, value=None))
    # of a sum over data shards, which have the same rows here
    norm = float(result.grad_norm) / job.run.world.shards
    return dict(dtypes.seen), kept, len(ran), norm


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    return launch(in_a_rank, tmp_path_factory.mktemp("options"), nproc=2)[0]


@pytest.mark.parametrize(
    ("options", "gathered", "averaged"),
    [
        ("default", torch.float32, torch.float32),
        ("param_dtype", torch.bfloat16, torch.float32),
        ("reduce_dtype", torch.float32, torch.bfloat16),
    ],
)
def test_shards_are_gathered_and_gradients_averaged_in_these_dtypes(
    options, gathered, averaged, steps
):
    seen, kept, *_ = steps[options]
    assert seen["_allgather_base_"] == {gathered}
    assert seen["_reduce_scatter_base_"] == {averaged}
    assert kept == {torch.float32}


@pytest.mark.parametrize("options", ["activation_checkpointing", "tp, activation_checkpointing"])
def test_blocks_are_computed_again_in_backward_and_the_gradient_is_the_same(options, steps):
    *_, once, norm = steps["default"]
    *_, twice, again = steps[options]
    assert (once, twice) == (1, 2)
    assert again == pytest.approx(norm, rel=1e-5 if options == "activation_checkpointing" else 2e-2)
