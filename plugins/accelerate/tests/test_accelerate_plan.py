"""Declarations and memory of the backends, and the arguments that
Accelerate gets, without ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from distcore import Capabilities, Memory, RunConfig, StrategyError, World
from distcore_accelerate.ddp import NEEDS_FIND_UNUSED
from distcore_accelerate.fsdp2 import plugin_arguments
from distcore_accelerate.settings import Settings, read_settings
from distcore_accelerate.strategy import AccelerateStrategy
from distcore_accelerate.wrapping import choose_layers

WORLD = World(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
DEVICES = frozenset({"cpu", "cuda"})


def test_ddp_declares_what_it_can() -> None:
    declared = Capabilities(
        spec_version=3,
        gradients="sum",
        devices=DEVICES,
        other_optimizers="all",
        why_not_phases=NEEDS_FIND_UNUSED,
        own_steps=True,
        ema=True,
        saves_alone=True,
        compiles=frozenset({"on", "regions"}),
        collectives_per_step=2,
        exempt={"unused-parameters": NEEDS_FIND_UNUSED},
    )
    assert AccelerateStrategy(backend="ddp").capabilities == declared
    unused = AccelerateStrategy(backend="ddp", find_unused=True).capabilities
    assert unused == replace(declared, phases=True, collectives_per_step=3, exempt={})


def test_fsdp2_declares_what_it_can_and_its_stand_in_the_same() -> None:
    strategy = AccelerateStrategy(backend="fsdp2")
    assert strategy.capabilities == Capabilities(
        spec_version=3,
        gradients="sum",
        devices=DEVICES,
        precisions=frozenset({"fp32", "bf16"}),
        optimizers=frozenset({"adamw", "adamw8bit", "muon"}),
        other_optimizers="elementwise",
        shards_parameters=True,
        inner_gradients="first",
        lacks=frozenset({"sparse gradients", "complex parameters", "parameters without elements"}),
        phases=True,
        own_steps=True,
        ema=True,
        compiles=frozenset({"regions"}),
        forward_cost=3.5,
        owns=frozenset({"precision"}),
        limits=("fsdp2 needs GPUs: on a CPU Accelerate falls back to DDP",),
    )
    traced: Any = strategy.traced()
    assert traced.capabilities == strategy.capabilities


def test_ddp_holds_the_whole_model_and_averages_its_gradients() -> None:
    model = nn.Linear(10, 2, device="meta")
    memory = AccelerateStrategy(backend="ddp").plan_memory(
        RunConfig(), model, 4, lambda module: torch.optim.AdamW(module.parameters())
    )
    assert memory == Memory(
        parameters=88, gradients=88, optimizer=2 * 88 + 2 * 4, sent=2 * 88 * 3 // 4
    )


def test_fsdp2_gathers_in_half_precision_and_averages_in_fp32() -> None:
    config = RunConfig.model_validate({"precision": "bf16"})
    given = AccelerateStrategy(backend="fsdp2").active_backend.plugins(config, WORLD)
    plugin = given["fsdp_plugin"]
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert (
        plugin.fsdp_version,
        plugin.cpu_ram_efficient_loading,
        plugin.reshard_after_forward,
    ) == (2, False, True)


def test_options_become_arguments_of_fsdp2() -> None:
    options = AccelerateStrategy(
        reshard_after_forward=False, cpu_offload=True, wrap_classes=("Block", "Pooler")
    )
    assert plugin_arguments(options, Settings()) == {
        "reshard_after_forward": False,
        "cpu_offload": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_cls_names_to_wrap": ["Block", "Pooler"],
    }
    assert (
        plugin_arguments(AccelerateStrategy(), Settings())["transformer_cls_names_to_wrap"] is None
    )


class Layer(nn.Module):
    """A layer with an embedding inside, as BERT's embeddings are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)


class Words(nn.Module):
    """A model as of transformers: it names its layers and its embeddings."""

    _no_split_modules = ("Layer", "Linear")

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner, self.head = Layer(), nn.Linear(2, 2), nn.Linear(2, 4, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.layer.embedding

    def get_output_embeddings(self) -> nn.Module:
        """The layer that computes logits."""
        return self.head


def test_no_unit_of_fsdp2_is_around_the_input_embedding() -> None:
    config = RunConfig.model_validate({})
    for classes, chosen in (
        ((), ["Linear"]),
        (("Layer",), []),
        (("Embedding", "Linear"), ["Linear"]),
    ):
        backend = AccelerateStrategy(backend="fsdp2", wrap_classes=classes).active_backend
        plugin = backend.plugins(config, WORLD)["fsdp_plugin"]
        choose_layers(plugin, Words())
        assert plugin.transformer_cls_names_to_wrap == chosen
    plugin = AccelerateStrategy(backend="fsdp2").active_backend.plugins(config, WORLD)[
        "fsdp_plugin"
    ]
    choose_layers(plugin, nn.Sequential(nn.Linear(2, 2)))
    assert plugin.transformer_cls_names_to_wrap == []


def test_a_parameter_of_an_embedding_and_of_a_layer_is_refused() -> None:
    plugin = AccelerateStrategy(backend="fsdp2").active_backend.plugins(RunConfig(), WORLD)[
        "fsdp_plugin"
    ]
    model = Words()
    model.head.weight = model.layer.embedding.weight  # shared by both embeddings: one unit
    choose_layers(plugin, model)
    model.bias = model.head.weight
    with pytest.raises(
        StrategyError,
        match=r"^parameter 'bias' is one of an embedding, too, .*use --strategy fsdp$",
    ):
        choose_layers(plugin, model)


def test_every_key_of_an_accelerate_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    says = {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_processes": 1,
        "use_cpu": True,
        "gpu_ids": "0,1",
        "num_machines": 2,
        "main_process_ip": "node0",
        "main_process_port": 9901,
    }
    sections: dict[str, Any] = {
        "fsdp_config": {"fsdp_version": 2},
        "deepspeed_config": {"zero_stage": 3},
    }
    file.write_text(yaml.safe_dump(says | sections), encoding="utf-8")
    common: dict[str, Any] = {
        "precision": "bf16",
        "processes": 1,
        "use_cpu": True,
        "gpu_ids": "0,1",
        "machines": 2,
        "address": "node0:9901",
        "fsdp": {"version": 2},
        "deepspeed": {"zero_stage": 3},
    }
    read = read_settings(AccelerateStrategy(config_file=str(file)), {})
    assert read == Settings(backend="fsdp2", source=str(file), distributed_type="FSDP", **common)
    chosen = read_settings(AccelerateStrategy(config_file=str(file), backend="fsdp2"), {})
    assert chosen == Settings(backend="fsdp2", **common)


@pytest.mark.parametrize(
    ("says", "precision"), [({"fp16": True}, "fp16"), ({"mixed_precision": False}, "fp32")]
)
def test_an_accelerate_file_of_an_old_version_is_read(
    says: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    file = tmp_path / "accelerate.yaml"
    older = {"distributed_type": "MULTI_CPU", "num_processes": -1, "gpu_ids": "all"}
    file.write_text(yaml.safe_dump(older | says), encoding="utf-8")
    settings = read_settings(AccelerateStrategy(config_file=str(file)), {})
    assert (settings.precision, settings.processes, settings.gpu_ids) == (precision, None, None)
