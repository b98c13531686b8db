"""Sharding, compiling, layer decay, LoRA and pipelines mean the same blocks of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from distcore.config import LoRA, RunConfig
from distcore.model.blocks import (
    depths_from_top,
    hidden_matrices,
    inside,
    repeated_blocks,
    repeated_classes,
)
from distcore.model.compiling import compile_model

transformers: Any = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip


class Block(nn.Module):
    """A block that a model of one's own may repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)


class Plain(nn.Module):
    """A model that says nothing about its blocks: they stand in a ``ModuleList``."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(99, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 4)


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(  # type: ignore[no-any-return]
        transformers.BertConfig(vocab_size=50, **SMALL)
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **SMALL))  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=32, patch_size=16, **SMALL)
    return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=3, num_heads=2
    )
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


BLOCKS: dict[Callable[[], nn.Module], list[str]] = {
    bert: [f"bert.encoder.layer.{number}" for number in range(3)],
    llama: [f"model.layers.{number}" for number in range(3)],
    gpt2: [f"transformer.h.{number}" for number in range(3)],
    vit: [f"vit.layers.{number}" for number in range(3)],
    t5: [f"{side}.block.{number}" for side in ("encoder", "decoder") for number in range(3)],
    Plain: [f"layers.{number}" for number in range(3)],
}
models = pytest.mark.parametrize("make", BLOCKS, ids=lambda make: make.__name__)


def repeated(model: nn.Module, paths: list[str]) -> list[str]:
    """The paths whose class is there more than once: embeddings, which must not be split
    either, are no blocks.
    """
    counts = Counter(type(model.get_submodule(path)) for path in paths)
    return [path for path in paths if counts[type(model.get_submodule(path))] > 1]


@models
def test_the_definition(make: Callable[[], nn.Module]) -> None:
    assert list(repeated_blocks(make())) == BLOCKS[make]


@models
def test_units_that_are_sharded(make: Callable[[], nn.Module]) -> None:
    units = pytest.importorskip("distcore_fsdp.units")
    model = make()
    assert sorted(repeated(model, list(units.find_units(model, "auto")))) == sorted(BLOCKS[make])


@pytest.mark.programs  # as long as one
@models
def test_regions_that_are_compiled(make: Callable[[], nn.Module]) -> None:
    model = make()
    compile_model(RunConfig(compile="regions"), model)
    compiled = [path for path, module in model.named_modules() if "forward" in vars(module)]
    assert repeated(model, compiled) == BLOCKS[make]


@models
def test_layer_decay(make: Callable[[], nn.Module]) -> None:
    model = make()
    depths = depths_from_top(model)
    deepest = max(depths.values())
    for name, parameter in model.named_parameters():
        is_inside = any(inside(name, path) for path in BLOCKS[make])
        # An embedding in a block, such as T5's of relative positions, is as deep as
        # the other embeddings.
        assert is_inside == (0 < depths[name] < deepest), name
        if parameter in hidden_matrices(model):
            assert is_inside, name


@pytest.mark.parametrize("make", [bert, llama, gpt2], ids=lambda make: make.__name__)
def test_an_adapter_leaves_the_blocks_where_they_are(make: Callable[[], nn.Module]) -> None:
    pytest.importorskip("peft")
    from distcore_lora.adapter import inject

    model = make()
    inject(RunConfig(lora=LoRA(rank=2, alpha=4)), model, None)
    assert list(repeated_blocks(model)) == BLOCKS[make]


@pytest.mark.parametrize("make", [bert, llama, gpt2, vit, Plain], ids=lambda make: make.__name__)
def test_the_stack_that_a_pipeline_cuts(make: Callable[[], nn.Module]) -> None:
    cuts = pytest.importorskip("distcore_mesh.pipeline_split")
    path, blocks = cuts._find_stack(model := make(), "")
    assert [f"{path}.{number}" for number in range(len(blocks))] == BLOCKS[make]
    assert blocks == list(repeated_blocks(model).values())


def test_stacks_of_blocks_are_named_by_the_pipeline_that_cannot_cut_them() -> None:
    cuts = pytest.importorskip("distcore_mesh.pipeline_split")
    with pytest.raises(Exception, match=r"has: encoder.block, decoder.block"):
        cuts._find_stack(t5(), "strategy_options.pp = 2")


class ReadsItsChild(nn.Module):
    """A net whose forward reads the weight of a layer: as a unit of its own, the layer would
    show a shard of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x)) / self.first.weight.abs().sum()


def test_layers_whose_parent_may_read_their_weights_are_no_units() -> None:
    assert not repeated_classes(ReadsItsChild())
    assert not repeated_classes(nn.Sequential(ReadsItsChild(), nn.Linear(4, 4)))
    assert repeated_classes(nn.Sequential(ReadsItsChild(), ReadsItsChild())) == {"ReadsItsChild"}


def test_layers_without_modules_inside_are_units_but_no_blocks_to_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert list(repeated_blocks(model)) == ["0", "2"]
    assert not depths_from_top(model)
