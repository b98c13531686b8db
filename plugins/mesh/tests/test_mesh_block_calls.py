"""A model that does more with its blocks than a pipeline can follow is refused by all stages, with
what it does.
"""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

from distcore import RankInfo, Run, RunConfig, StrategyError, defaults, launch
from distcore_mesh.strategy import MeshStrategy

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product, self.bias = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, hidden: Tensor, shift: Tensor | None = None) -> Tensor:
        output: Tensor = self.product(hidden)
        output += self.bias  # in place
        return output.tanh() if shift is None else (output + shift).tanh()


class Stack(nn.Module):
    """Calls its blocks one after another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.table = nn.Embedding(1, 4)

    def hidden(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.hidden(self.first(inputs))
        shift: Tensor = self.table(torch.zeros(1, dtype=torch.long))
        return hidden + shift


class WithResidual(Stack):
    def hidden(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


class SkipsOne(Stack):
    def hidden(self, hidden: Tensor) -> Tensor:
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return hidden


class EndsEarly(Stack):
    def hidden(self, hidden: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            hidden = block(hidden)
        return hidden


class Repeats(Stack):
    def hidden(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(block(hidden))
        return hidden


class Doubles(Stack):
    def hidden(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden * 2)
        return hidden


class ReadsTable(Stack):
    """As DeBERTa, whose blocks read embeddings of distances."""

    def hidden(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, shift=self.table.weight[0])
        return hidden


ONCE = "with pp a model must call its blocks once each, in their order; it calls block"
MODELS: dict[type[Stack], str] = {
    Stack: "",
    WithResidual: "",
    SkipsOne: f"{ONCE} 1 in the place of block 0",
    EndsEarly: "with pp a model must call each of its 4 blocks; it called 3",
    Repeats: f"{ONCE} 0 in the place of block 1",
    Doubles: "with pp the model changes the hidden state between block 1 and block 2",
    ReadsTable: "with pp blocks must read the hidden state alone; 'shift', which the model gives",
}
ASKED = {
    "output_attentions": "with pp attentions of a model are on the ranks of other stages",
    "output_router_logits": "with pp router logits of a model are on the ranks of other stages",
}


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def llama() -> Any:
    torch.manual_seed(0)
    return t.LlamaForCausalLM(t.LlamaConfig(**SIZES)).eval()


def in_a_rank() -> tuple[list[str], list[str], float]:
    """What each model says in stages, and what another says of its layers."""
    rank_info = RankInfo(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    config = RunConfig(device="cpu")
    one_stage, two_stages = MeshStrategy(pp=2), MeshStrategy(pp=2, pp_schedule="interleaved")
    world = one_stage.setup(config, rank_info)

    def in_stages(strategy: MeshStrategy, model: Any) -> Any:
        run = Run(
            config=config,
            world=world,
            capabilities=strategy.capabilities,
            module=model,
            model=model,
        )
        return strategy.wrap_model(run, model, None).model

    def said(model: Any, *inputs: Any, **named: Any) -> str:
        try:
            model(*inputs, **named)
        except StrategyError as error:
            return str(error)
        return ""

    lines = []
    inputs = torch.linspace(-1, 1, 12).view(3, 4)
    with torch.no_grad():
        for kind, line in MODELS.items():
            whole, said_of_kind = kind(), ""
            # With two stages a rank that refuses leaves messages on their way.
            for strategy in (one_stage,) if line else (one_stage, two_stages):
                split = in_stages(strategy, deepcopy(whole))
                said_of_kind += said(split, inputs)
                if not line and rank_info.rank == 1:
                    assert torch.equal(split(inputs), whole(inputs))
                elif not line:
                    split(inputs)
            lines.append(said_of_kind)
        whole, tokens = llama(), torch.arange(12).view(2, 6)
        split = in_stages(one_stage, deepcopy(whole))
        of_layers = [said(split, tokens, **{name: True}) for name in ASKED]
        states = split(tokens, output_hidden_states=True).hidden_states
        expected = whole(tokens, output_hidden_states=True).hidden_states[-1]
        of_layers += [said(read, states) for read in (len, list, lambda states: states[1])]
        error = float((states[-1] - expected).abs().max())
    defaults.teardown(world)
    return lines, of_layers, error


@pytest.fixture(scope="module")
def ranks() -> Any:
    return launch(in_a_rank, nproc=2)


@pytest.mark.parametrize("kind", MODELS)
def test_calls_that_a_pipeline_cannot_follow_are_refused_by_each_rank(
    kind: type[Stack], ranks: Any
) -> None:
    for lines, _, _ in ranks:
        line, start = lines[list(MODELS).index(kind)], MODELS[kind]
        assert bool(line) == bool(start)
        assert line.startswith(f"strategy 'mesh': {start}" if start else "")
        assert line.endswith("use pp = 1" if start else "")


def test_outputs_of_layers_on_other_stages_are_refused(ranks: Any) -> None:
    for _, of_layers, _ in ranks:
        of_states = "with pp hidden states but the last one, [-1], are on the ranks of other stages"
        for line, start in zip(of_layers, [*ASKED.values(), *[of_states] * 3], strict=True):
            assert line.startswith(f"strategy 'mesh': {start}")
    (*_, error_of_last) = ranks[1]
    assert error_of_last == 0
