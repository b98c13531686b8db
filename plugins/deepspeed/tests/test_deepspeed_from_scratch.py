"""At stage 3 a model, from scratch or from files, never exists whole on a rank, and starts
as in one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from models_from_scratch import from_files, from_scratch, small_models
from torch import nn
from transformers import AutoModelForSequenceClassification

from distcore import RankInfo, Run, RunConfig, World, launch
from distcore_deepspeed.checkpoint import parts
from distcore_deepspeed.strategy import DeepSpeedStrategy

pytestmark = pytest.mark.ranks

SEED = 3
LARGE = small_models(vocab_size=5001)["llama"]  # drawn in blocks, cut within one
MODELS: dict[str, Callable[[], nn.Module]] = small_models(vocab_size=65) | {"large": LARGE}
FILES = {"files": None, "adapter on files": 3}
"""Sources of a model that is saved in bf16, to the rank of their adapter."""
CASES = [
    (name, precision, trains)
    for name in (*MODELS, *FILES)
    for precision in ("fp32", "bf16")
    for trains in (True, False)
]


def started(
    world: World, folder: Path, name: str, precision: str, trains: bool
) -> tuple[bool, list[str]]:
    """Whether the rank built the model whole, and the tensors that differ from
    those of a whole build.
    """
    strategy = DeepSpeedStrategy(stage=3)
    if name in FILES:
        origin = from_files(
            folder, AutoModelForSequenceClassification, SEED, FILES[name], num_labels=5
        )
    else:
        origin = from_scratch(MODELS[name], SEED)
    config = RunConfig(
        device="cpu",
        seed=SEED,
        nproc=2,
        precision=precision,
        global_batch_size=2,
        micro_batch_size=1,
    )
    built = strategy.build_model(config, world, origin)
    model = built.model
    # an adapter has its values at once
    was_whole = not any(parameter.is_meta for parameter in model.parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    run = Run(
        config=config,
        world=world,
        capabilities=strategy.capabilities,
        module=model,
        model=model,
        total_steps=1,
        strategy_state=built.state,
    )
    prepared = strategy.wrap_model(run, model, torch_adamw if trains else None)
    whole = origin.build()
    wrong = [
        name
        for name, buffer in model.named_buffers()
        if not torch.equal(buffer, whole.get_buffer(name))
    ]
    for parameter in model.parameters():
        wanted = whole.get_parameter(names[id(parameter)]).detach().flatten()
        dtype = torch.bfloat16 if precision == "bf16" else wanted.dtype
        held = cast("Any", parameter).ds_tensor
        own = wanted[world.rank * len(held) :][: len(held)]
        if held.dtype != dtype or not torch.equal(held[: len(own)], own.to(dtype)):
            wrong.append(names[id(parameter)])
    if trains:  # the fp32 weights that the optimizer steps
        trained = Run(
            config=config,
            world=world,
            capabilities=strategy.capabilities,
            module=model,
            model=prepared.model,
            optimizer=prepared.optimizer,
        )
        for part in parts(trained):
            wanted = (
                whole.get_parameter(part.name)
                .detach()
                .flatten()[part.start : part.start + part.count]
            )
            if not torch.equal(part.slice_of(part.master), wanted):
                wrong.append(f"{part.name}, stepped")
    return was_whole, wrong


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def starts(folder: Path) -> dict[tuple[str, str, bool], tuple[bool, list[str]]]:
    rank_info = RankInfo(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    strategy = DeepSpeedStrategy(stage=3)
    world = strategy.setup(RunConfig(device="cpu"), rank_info)
    outcomes = {case: started(world, folder, *case) for case in CASES}
    strategy.teardown(world)
    return outcomes


@pytest.fixture(scope="module")
def by_rank(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[tuple[str, str, bool], tuple[bool, list[str]]]]:
    folder = tmp_path_factory.mktemp("model")
    saved: Any = MODELS["bert"]().bfloat16()
    saved.save_pretrained(folder)
    return list(launch(starts, folder, nproc=2))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_start_with_the_weights_of_one_process_and_build_no_whole_model(
    by_rank: list[dict[tuple[str, str, bool], tuple[bool, list[str]]]], case: tuple[str, str, bool]
) -> None:
    assert [rank[case] for rank in by_rank] == [(case[0] == "vit", [])] * 2
