"""In a step the ranks of a tensor-parallel group share dropout masks, communicate little, and
hold parts of weights.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from distcore import Clip, Run, RunConfig, defaults, launch
from distcore.testing.problem import Problem
from distcore.testing.rank import lab_of
from distcore.testing.subject import Subject
from distcore_fsdp.strategy import FSDPStrategy
from distcore_mesh.strategy import MeshStrategy

pytestmark = pytest.mark.ranks

LAYERS = 3
LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    pad_token_id=0,
)


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names[func._opname] += 1
        return func(*args, **(kwargs or {}))


def in_a_rank(folder):
    """Measure, in one launch, all that the tests below look at."""
    subject = Subject(
        config=RunConfig(strategy="mesh", strategy_options={"tp": 2}, nproc=2, device="cpu"),
        cases=(),
    )
    with lab_of(subject, folder) as lab:
        job = lab.job(Problem(dropout=0.3), ema={"decay": 0.5})
        job.train(5)
        splits = job.run.strategy_state.layout.splits
        replicated = {
            name: p.detach() for name, p in job.run.module.named_parameters() if name not in splits
        }
        average = {
            name: part
            for name, part in (job.run.ema or {}).items()
            if isinstance(part, torch.Tensor)
        }
        return replicated, average, *counted(lab)


def counted(lab):
    """The collectives of a step of a Llama model, and its elements here and in whole."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA)
    whole = sum(p.numel() for p in model.parameters())
    strategy = MeshStrategy(tp=2)
    run = Run(
        config=RunConfig(device="cpu"),
        world=lab.world,
        capabilities=strategy.capabilities,
        module=model,
        model=model,
    )
    wrapped = strategy.wrap_model(
        run, model, lambda module: torch.optim.AdamW(module.parameters(), fused=True)
    )
    run = Run(
        config=run.config,
        world=run.world,
        capabilities=run.capabilities,
        module=model,
        model=wrapped.model,
        optimizer=wrapped.optimizer,
        strategy_state=wrapped.state,
    )
    with Collectives() as seen:
        defaults.backward(run, model(input_ids=torch.arange(12).view(2, 6)).logits.square().mean())
        strategy.step(run, Clip(norm=1.0, value=None))
    return dict(seen.names), sum(p.numel() for p in model.parameters()), whole


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch(in_a_rank, tmp_path_factory.mktemp("step"), nproc=2)


def test_parameters_that_both_ranks_hold_stay_equal_under_dropout(ranks):
    (first, *_), (second, *_) = ranks
    assert "blocks.0.norm.weight" in first
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_averages_of_a_group_agree_on_whole_weights(ranks):
    (_, first, *_), (_, second, *_) = ranks
    assert "ema/blocks.0.norm.weight" in first
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_step_exchanges_what_the_layout_needs_and_one_number(ranks):
    embedding, head, norm = 1, 1, 1
    for _, _, seen, *_ in ranks:
        assert seen == {"allreduce_": embedding + 2 * 2 * LAYERS + head + norm, "allgather_": 1}


def test_a_rank_holds_its_part_of_the_model(ranks):
    for *_, mine, whole in ranks:
        assert mine < 0.51 * whole


class HalfUsed(nn.Module):
    """A model with a layer that no forward pass uses, or uses in some only."""

    def __init__(self, uses):
        super().__init__()
        self.first, self.rare, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.uses = list(uses)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(self.rare(x) if self.uses.pop(0) else x)


USES = {
    "never": (False,) * 4,
    "late": (False, False, True, False),
    "first": (True, False, False, False),
}
SHARDED: dict[str, Callable[[], Any]] = {
    "mesh": lambda: MeshStrategy(),
    "mesh replicated": lambda: MeshStrategy(replicate=2),
    "fsdp in 16 bits": lambda: FSDPStrategy(param_dtype="precision", wrap=("Linear",)),
}


def half_used_in_a_rank(folder):
    """The gradients of two steps of two micro-batches, and those of a whole model,
    by strategy and use.
    """
    subject = Subject(config=RunConfig(strategy="mesh", nproc=2, device="cpu"), cases=())
    results = {}
    with lab_of(subject, folder) as lab:
        for (name, make), (use, pattern) in product(SHARDED.items(), USES.items()):
            precision = "bf16" if "16" in name else "fp32"
            config = RunConfig(device="cpu", precision=precision)
            gradients = []
            for strategy in (make(), None):
                torch.manual_seed(0)
                model = HalfUsed(pattern)
                if strategy is None and precision == "bf16":
                    model.bfloat16()
                run = Run(
                    config=config,
                    world=lab.world,
                    capabilities=MeshStrategy().capabilities,
                    module=model,
                    model=model,
                    accumulation=2,
                )
                if strategy is not None:
                    wrapped = strategy.wrap_model(run, model, None)
                    run = replace(run, model=wrapped.model, strategy_state=wrapped.state)
                for number in range(4):
                    if strategy is not None:
                        strategy.accumulate(run, number % 2 == 1)
                    x = torch.full(
                        (2, 4), number + 1.0, dtype=torch.bfloat16 if precision == "bf16" else None
                    )
                    run.model(x).sum().backward()
                named = model.named_parameters()
                # every rank has the same rows, and all are added
                sent = 1 if strategy is None else lab.world.size
                gradients.append(
                    {n: whole_of(p.grad) / sent for n, p in named if p.grad is not None}
                )
            results[name, use] = gradients
    return results


def whole_of(gradient):
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).float()


def test_a_layer_that_no_pass_or_a_late_one_uses_has_its_gradient(tmp_path):
    for results in launch(half_used_in_a_rank, tmp_path, nproc=2):
        for case, (sharded, whole) in results.items():
            assert sharded.keys() == whole.keys(), case
            for name, gradient in whole.items():
                torch.testing.assert_close(
                    sharded[name], gradient, rtol=3e-2 if "16" in case[0] else 1e-6, atol=1e-6
                )
