"""A model, from scratch or from files, never exists whole on a rank, and starts with the
weights of one process.
"""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from models_from_scratch import from_files, from_scratch, small_models
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from distcore import RankInfo, Run, RunConfig, defaults, launch
from distcore_mesh.strategy import MeshStrategy

pytestmark = pytest.mark.ranks

SEED = 3
MODELS = small_models(vocab_size=64)
LAYOUTS: dict[str, Any] = {
    "tp": {"tp": 2}, "shard": {"shard": 2}, "cp": {"cp": 2}, "pp": {"pp": 2},
    "interleaved": {"pp": 2, "pp_schedule": "interleaved"},
}  # fmt: skip
CASES = {
    f"{layout}: {name}": (layout, name)
    for layout in LAYOUTS
    for name in ("bert", "gpt2, tied", "llama")
    if (layout, name) not in (("pp", "gpt2, tied"), ("interleaved", "gpt2, tied"), ("cp", "bert"))
}


FILES: dict[str, Any] = {
    "tp": ("gpt2, tied", AutoModelForCausalLM), "pp": ("llama", AutoModelForCausalLM),
    "shard": ("bert", AutoModelForSequenceClassification),
}  # fmt: skip
"""The model that is read from files in bf16, by layout. That of ``shard`` is read
with an adapter, too.
"""
READ = [f"{layout}: files" for layout in FILES] + ["shard: adapter"]


def started(layout, origin, world):
    """Whether the rank built the model whole, and the tensors that differ from
    those of a whole build.
    """
    strategy, config = MeshStrategy(**LAYOUTS[layout]), RunConfig(device="cpu", seed=SEED)
    built = strategy.build_model(config, world, origin)
    model = built.model
    # An adapter has its values at once, and so has a part of the model that no file has.
    was_whole = not any(parameter.is_meta for parameter in model.parameters())
    run = Run(
        config=config, world=world, capabilities=strategy.capabilities, module=model, model=model,
        strategy_state=built.state,
    )  # fmt: skip
    wrapped = strategy.wrap_model(
        run, model, lambda module: torch.optim.AdamW(module.parameters(), fused=True)
    )
    model, whole = wrapped.model, origin.build()
    layout = wrapped.state.layout
    wrong = []
    for name, parameter in model.named_parameters():
        now = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        wanted, split = whole.get_parameter(name), layout.splits.get(name)
        if now.dtype != wanted.dtype or not torch.equal(
            now, split.part_of(wanted, layout.rank, layout.ranks) if split else wanted
        ):
            wrong.append(name)
    wrong += [
        name
        for name, buffer in model.named_buffers()
        if not torch.equal(buffer, whole.get_buffer(name))
    ]
    assert wrapped.optimizer is not None
    stepped = {
        id(parameter) for group in wrapped.optimizer.param_groups for parameter in group["params"]
    }
    return was_whole, wrong, stepped == {id(parameter) for parameter in model.parameters()}


def starts(folder):
    rank_info = RankInfo(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    world = MeshStrategy(tp=2).setup(RunConfig(device="cpu"), rank_info)
    by_case = {}
    for case, (layout, name) in CASES.items():
        shards = LAYOUTS[layout].get("shard", 1)
        place = replace(world, shard=world.rank % shards, shards=shards)
        by_case[case] = started(layout, from_scratch(MODELS[name], SEED), place)
    for case in READ:
        layout, _, what = case.partition(": ")
        shards = LAYOUTS[layout].get("shard", 1)
        source = from_files(
            folder / layout, FILES[layout][1], SEED, 3 if what == "adapter" else None
        )
        by_case[case] = started(
            layout, source, replace(world, shard=world.rank % shards, shards=shards)
        )
    vit = started("tp", from_scratch(MODELS["vit"], SEED), world)
    defaults.teardown(world)
    return by_case | {"vit": vit}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for layout, (name, _) in FILES.items():
        model: Any = MODELS[name]()
        model.bfloat16().save_pretrained(folder / layout)
    return launch(starts, folder, nproc=2)


@pytest.mark.parametrize("case", [*CASES, *READ])
def test_ranks_start_with_the_weights_of_one_process_and_never_hold_them_all(ranks, case):
    for rank in ranks:
        was_whole, wrong, steps_all = rank[case]
        assert not was_whole
        assert wrong == []
        assert steps_all


def test_a_model_that_cannot_be_replayed_is_built_whole_and_starts_alike(ranks):
    for was_whole, wrong, _ in (rank["vit"] for rank in ranks):
        assert was_whole
        assert wrong == []
