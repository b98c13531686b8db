"""Packed rows over ranks, document by document: each document is computed as if it were alone,
whatever ranks exchange, and no token of another document changes a bit of it.
"""

import os
from copy import deepcopy
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from small_models import SMALL
from torch.nn.functional import cross_entropy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from distcore import ConfigError, RankInfo, Run, RunConfig, StrategyError, defaults, launch
from distcore_mesh.context_parallel import _attend, _mask_beside_documents, split_sequences
from distcore_mesh.document_attention import PackedRows, attend
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.strategy import MeshStrategy

ONE_HEAD: dict[str, Any] = SMALL | {"num_attention_heads": 1, "num_key_value_heads": 1}
NEOX: dict[str, Any] = {name: SMALL[name] for name in SMALL if name != "num_key_value_heads"}
GPT2: dict[str, Any] = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "llama, one head": lambda: LlamaForCausalLM(LlamaConfig(**ONE_HEAD)),
}
PACKED = {
    # A length that divides has a real last token; a document ends on the cut.
    "divides": [[5, 7, 12], [3, 9, 4, 8]],
    # One that does not is padded inside of blocks, and the second row at its end, too.
    "does not": [[6, 5, 7, 5], [8, 4, 7]],
}
"""Lengths of the documents of each row."""
EXCHANGES = ("heads", "blocks", "keys", "auto")


def cases():
    """Models and what their ranks exchange; of one head they can exchange keys alone."""
    return [
        (name, exchange)
        for name in MODELS
        for exchange in EXCHANGES
        if "one head" not in name or exchange in ("keys", "auto")
    ]


def rows_of(lengths, seed=1):
    """Token ids and positions of packed rows, padded at the end."""
    torch.manual_seed(seed)
    longest = max(map(sum, lengths))
    tokens = torch.randint(3, 64, (len(lengths), longest))
    positions = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, sizes in enumerate(lengths):
        own = torch.cat([torch.arange(size) for size in sizes])
        positions[row, : len(own)] = own
    return tokens, positions


def documents_of(lengths):
    """Row, first and last token of each document."""
    for row, sizes in enumerate(lengths):
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        for start, stop in pairwise(ends):
            yield row, start, stop


def alone(model, tokens, lengths):
    """The logits of each document, computed without others."""
    return [
        model(input_ids=tokens[row : row + 1, start:stop]).logits[0]
        for row, start, stop in documents_of(lengths)
    ]


def packed(model, tokens, positions, lengths):
    """The logits of each document in packed rows."""
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return [logits[row, start:stop] for row, start, stop in documents_of(lengths)]


def backward(logits, tokens, lengths):
    total = torch.zeros(())
    for of_document, (row, start, stop) in zip(logits, documents_of(lengths), strict=True):
        targets = tokens[row, start + 1 : stop]
        total = total + cross_entropy(of_document[:-1], targets, reduction="sum")
    total.backward()


def measured(name, exchange, world, lengths):
    """Errors of logits and gradients, and the bits by which documents see each other."""
    torch.manual_seed(0)
    whole = MODELS[name]().train()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model = deepcopy(whole)
    strategy = MeshStrategy(cp=world.size, cp_exchange=exchange)
    run = Run(
        config=RunConfig(device="cpu"),
        world=world,
        capabilities=strategy.capabilities,
        module=model,
        model=model,
    )
    wrapped = strategy.wrap_model(run, model, None)
    tokens, positions = rows_of(lengths)
    expected, made = alone(whole, tokens, lengths), packed(model, tokens, positions, lengths)
    error_of_logits = max(
        float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, made, strict=True)
    )
    backward(expected, tokens, lengths)
    backward(made, tokens, lengths)
    gradients = {at: p.grad for at, p in model.named_parameters() if p.grad is not None}
    wrapped.state.sequences.sum_gradients(gradients)
    largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    error_of_gradients = max(
        float((gradients[at] - p.grad).abs().max()) / largest
        for at, p in whole.named_parameters()
        if p.grad is not None
    )
    return error_of_logits, error_of_gradients, *leaks(model, tokens, positions, lengths)


@torch.no_grad()
def leaks(model, tokens, positions, lengths):
    """How far a document's logits move with the first token of another one, at most, and with that
    of its own, at least.
    """
    model.eval()
    before = packed(model, tokens, positions, lengths)
    of_others, of_own = 0.0, float("inf")
    for number, (row, start, _) in enumerate(documents_of(lengths)):
        changed = tokens.clone()
        changed[row, start] = 3 + (tokens[row, start] - 2) % 61
        after = packed(model, changed, positions, lengths)
        moves = [float((a - b).abs().max()) for a, b in zip(before, after, strict=True)]
        of_own = min(of_own, moves.pop(number))
        of_others = max(of_others, *moves)
    return of_others, of_own


def in_a_rank(names):
    strategy = MeshStrategy(cp=int(os.environ["WORLD_SIZE"]))
    rank_info = RankInfo(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    world = strategy.setup(RunConfig(device="cpu"), rank_info)
    group = ParallelGroup(cast("Any", torch.distributed.group.WORLD), world.rank, world.size)
    results: dict[Any, Any] = {
        (name, exchange, form): measured(name, exchange, world, lengths)
        for name, exchange in cases()
        if name in names
        for form, lengths in PACKED.items()
    }
    for case in ATTENTIONS:
        results[case] = distance(case, group)
    defaults.teardown(world)
    return results


ATTENTIONS: dict[str, tuple[int, int, list[list[int]], int | None]] = {
    "one document": (1, 1, [[0], [0]], None),
    "shared keys": (4, 2, [[0, 7, 11, 30], [0, 25]], None),
    "a window": (2, 2, [[0], [0]], 9),
    "a window of packed rows": (2, 1, [[0, 7, 11, 30], [0, 25]], 6),
    "documents on the cut": (1, 1, [[0, 16, 24], [0, 8, 36]], None),
}
"""Heads, heads of keys, starts of documents, and window."""


def distance(case, group):
    """The largest error of output and gradients, relative to those of attention under a mask."""
    heads, key_heads, starts, window = ATTENTIONS[case]
    torch.manual_seed(0)
    shapes = [(2, number, 48, 16) for number in (heads, key_heads, key_heads, heads)]
    query, key, value, weights = (torch.randn(shape) for shape in shapes)
    whole = (query, key, value)
    leaves = [tensor.clone().requires_grad_() for tensor in whole]
    expected = under_a_mask(leaves, starts, window)
    (expected * weights).sum().backward()
    rank, ranks = (group.rank, group.size) if group else (0, 1)
    own = [tensor.chunk(ranks, 2)[rank].clone().requires_grad_() for tensor in whole]
    made = attend(own[0], own[1], own[2], PackedRows(starts, window), 0.25, group)
    (made * weights.chunk(ranks, 2)[rank]).sum().backward()
    pairs = [(made, expected), *((a.grad, b.grad) for a, b in zip(own, leaves, strict=True))]
    return max(
        float((mine - due.chunk(ranks, 2)[rank]).detach().abs().max() / due.detach().abs().max())
        for mine, due in pairs
    )


def under_a_mask(states, starts, window):
    query, key, value = states
    document = torch.zeros(len(starts), query.shape[2], dtype=torch.long)
    for row, firsts in enumerate(starts):
        for first in firsts[1:]:
            document[row, first:] += 1
    places = torch.arange(query.shape[2])
    distances = places[:, None] - places
    seen = (distances >= 0) & (distances < (window or query.shape[2]))
    seen = seen & (document[:, :, None] == document[:, None])
    sharing = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(sharing, 1) for each in (key, value))
    products = (query @ key.transpose(2, 3)) * 0.25
    return products.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_by_documents_is_that_under_a_mask(case):
    assert distance(case, None) < 2e-6


@pytest.fixture(scope="module")
def on_two():
    return launch(in_a_rank, list(MODELS), nproc=2)


@pytest.mark.ranks
@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_around_two_ranks_is_that_under_a_mask(case, on_two):
    assert max(rank[case] for rank in on_two) < 2e-6


@pytest.mark.ranks
@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize(("name", "exchange"), cases())
def test_each_document_of_packed_rows_is_computed_as_if_it_were_alone(name, exchange, form, on_two):
    for rank in on_two:
        logits, gradients, of_others, of_own = rank[name, exchange, form]
        assert max(logits, gradients) < 1e-5
        assert of_others == 0.0
        assert of_own > 1e-4  # else the probe sees nothing


@pytest.mark.ranks
@pytest.mark.slow
def test_four_ranks_share_a_row_of_one_head():
    for rank in launch(in_a_rank, ["llama, one head"], nproc=4):
        for case, result in rank.items():
            if isinstance(case, str):
                assert result < 2e-6, case
                continue
            logits, gradients, of_others, _ = result
            assert max(logits, gradients) < 1e-5, case
            assert of_others == 0.0


LLAMA = LlamaConfig(**SMALL)


@pytest.mark.parametrize(
    ("exchange", "settings", "resolved"),
    [
        ("auto", {}, "auto"),
        ("auto", {"attention_dropout": 0.1}, "heads"),
        ("auto", {"num_attention_heads": 1, "num_key_value_heads": 1}, "keys"),
        ("heads", {}, "heads"),
    ],
)
def test_auto_exchanges_what_the_heads_and_dropout_allow(exchange, settings, resolved):
    with_heads = {name: size for name, size in SMALL.items() if name not in settings}
    model = LlamaForCausalLM(LlamaConfig(**with_heads, **settings))
    group = ParallelGroup(cast("Any", None), 0, 2)
    assert split_sequences(model, group, (0, 1), exchange).exchange == resolved


@pytest.mark.parametrize(
    ("mask", "options", "why"),
    [
        (None, {"dropout": 0.1}, "has no dropout"),
        (torch.ones(2, 1, 4, 4), {}, "needs padding at the end of rows alone"),
        (None, {"position_ids": None}, "needs position_ids"),
        (torch.ones(()), {}, "takes packed rows without an attention_mask"),
    ],
)
def test_what_attention_by_documents_cannot_compute_is_refused(mask, options, why):
    model = LlamaForCausalLM(LLAMA).train()
    group = ParallelGroup(cast("Any", None), 0, 2)
    split_sequences(model, group, (0, 1), "keys")
    states = torch.zeros(2, 4, 2, 8)
    packed_positions = torch.tensor([[0, 1, 0, 1]])
    with pytest.raises(StrategyError, match=f"cp_exchange = 'keys': attention by documents {why}"):
        _attend(
            model.model.layers[0].self_attn,
            states,
            states,
            states,
            mask,
            **{"position_ids": packed_positions} | options,
        )


def test_an_exchange_without_ranks_to_share_rows_is_refused():
    with pytest.raises(ConfigError, match="cp_exchange = 'keys': needs cp greater than 1"):
        MeshStrategy(cp_exchange="keys").check_config(RunConfig(nproc=2))


def test_a_mask_is_made_where_documents_are_left_out_of_account():
    """With an attention mask one process does not look at positions; nor may ranks."""

    def make_mask(*_sizes, attention_mask, **_settings):
        return attention_mask[:, None, None]

    at_the_end = torch.tensor([[1, 1, 0], [1, 1, 1]])
    at_the_start = torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert _mask_beside_documents(make_mask, "auto") is None
    made = _mask_beside_documents(make_mask, "auto", attention_mask=at_the_end)
    assert made is not None
    assert made.dim() == 4
    made = _mask_beside_documents(make_mask, "keys", attention_mask=at_the_end)
    assert made is not None
    assert made.dim() == 0
    made = _mask_beside_documents(make_mask, "keys", attention_mask=at_the_start)
    assert made is not None
    assert made.dim() == 4
