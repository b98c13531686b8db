from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DistilBertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers import DistilBertForSequenceClassification as DistilBert

from distcore import StrategyError
from distcore_fsdp.units import checkpoint_activations, describe_units, find_units

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
}


@pytest.fixture
def bert():
    return BertForSequenceClassification(BertConfig(**SMALL))


class Deep(nn.Module):
    """Two blocks of two layers, between an embedding and a head that are larger than a block."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)
        )
        self.heads = nn.ModuleList(nn.Embedding(400, 8) for _ in range(2))


def kinds(units):
    return [type(unit).__name__ for unit in units.values()]


def test_a_transformers_model_says_itself_what_must_not_be_split(bert):
    assert list(find_units(bert, "auto")) == [
        "bert.encoder.layer.1",
        "bert.encoder.layer.0",
        "bert.embeddings",
    ]


def test_the_largest_repeated_block_is_the_unit_where_none_is_declared():
    assert list(find_units(Deep(), "auto")) == ["blocks.1", "blocks.0"]


def test_large_embeddings_are_not_taken_for_blocks():
    model = DistilBert(
        DistilBertConfig(vocab_size=999, dim=16, n_heads=2, n_layers=3, hidden_dim=16)
    )
    assert kinds(find_units(model, "auto")) == ["TransformerBlock"] * 3


def test_a_model_in_which_nothing_repeats_has_no_units():
    assert find_units(nn.Sequential(nn.Linear(2, 2)), "auto") == {}


def test_units_can_be_named_by_class(bert):
    assert set(kinds(find_units(bert, ("BertLayer", "BertPooler")))) == {"BertLayer", "BertPooler"}
    assert kinds(find_units(bert, "BertPooler")) == ["BertPooler"]


def test_units_can_be_named_one_by_one_and_a_star_stands_for_one_part_of_a_name(bert):
    assert list(find_units(bert, ("bert.pooler", "bert.encoder.layer.*"))) == [
        "bert.pooler",
        "bert.encoder.layer.1",
        "bert.encoder.layer.0",
    ]
    assert list(find_units(bert, ("BertPooler", "*.encoder.layer.1"))) == [
        "bert.pooler",
        "bert.encoder.layer.1",
    ]
    for name in ("bert.encoder.layer", "bert.poler", "bert.*.layer"):
        with pytest.raises(
            StrategyError,
            match=r"no module of the model has .* or name; those of a list are LIST\.\*$",
        ):
            find_units(bert, name)


def test_an_unknown_class_is_refused_with_those_of_the_model():
    with pytest.raises(
        StrategyError,
        match=r"wrap = 'Block': no module of the model has that class \(Deep, Embedding",
    ):
        find_units(Deep(), "Block")


def test_units_can_be_chosen_by_size_and_containers_never_are():
    assert list(find_units(Deep(), 144)) == [
        "heads.1",
        "heads.0",
        "blocks.1",
        "blocks.0",
        "embedding",
    ]
    assert list(find_units(Deep(), 3000)) == ["heads.1", "heads.0", "embedding"]


def test_a_weight_that_is_tied_to_another_module_stays_with_the_root():
    model = BertForMaskedLM(BertConfig(**SMALL))
    assert kinds(find_units(model, "auto")) == ["BertLayer", "BertLayer"]


def test_the_log_says_what_is_a_unit_and_what_is_left():
    model = Deep()
    assert (
        describe_units(model, find_units(model, "auto"))
        == "sharded as units: 2 Sequential; with the root: 10,400 parameters"
    )
    assert describe_units(model, {}) == "sharded as one unit: the whole model, 10,688 parameters"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_recomputed_blocks_of_a_decoder_that_keeps_a_cache_give_the_same_gradient(kind):
    made: dict[str, Any] = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    }
    tokens, gradients = torch.arange(6)[None], []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = made[kind]().eval()
        units = find_units(model, "auto")
        if recomputed:
            checkpoint_activations(units.values(), True)
        output = model(input_ids=tokens, labels=tokens)
        assert output.past_key_values is not None
        output.loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*gradients)
    with torch.no_grad():
        assert model(input_ids=tokens).past_key_values.get_seq_length() == 6


class Counts(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self):
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[func._opname] += 1
        return func(*args, **(kwargs or {}))


def step(which):
    """The gradients of a model, and how often its products and its
    activation functions ran forward.
    """
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SMALL | {"num_hidden_layers": 4}))
    tokens = torch.randint(3, 300, (2, 5))
    if which:
        checkpoint_activations(find_units(model, ("BertLayer",)).values(), which)
    with Counts() as counts:
        model.eval()(input_ids=tokens, labels=tokens).loss.backward()
    return (
        {name: p.grad for name, p in model.named_parameters()},
        counts.ran["addmm"],
        counts.ran["gelu"],
    )


def test_chosen_activations_are_recomputed_and_gradients_stay_the_same():
    plain, products, functions = step(False)
    for which, again, of_functions in ((True, 24, 4), (2, 12, 2), ("products", 0, 4)):
        gradients, ran, ran_functions = step(which)
        assert all(
            torch.equal(gradients[name], value)
            for name, value in plain.items()
            if value is not None
        )
        assert (ran - products, ran_functions - functions) == (again, of_functions)


def test_the_remainder_of_a_module_without_its_units_decides_by_size() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(6, 1)), nn.Linear(1, 1)
    )
    assert list(find_units(model, 8)) == ["0.1", "0.0"]  # seven are left in "0"
    assert list(find_units(model, 7)) == ["0.2", "0.1", "0.0"]
