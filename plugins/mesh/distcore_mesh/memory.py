"""Compute the memory of a rank of a mesh before a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from distcore import Memory, OptimizerFactory, RunConfig, footprint
from distcore.model import repeated_classes
from distcore_fsdp import memory, units
from distcore_mesh.experts import splits_of_experts
from distcore_mesh.options import MeshOptions
from distcore_mesh.pipeline_split import keep_stage_parameters, split_into_stages
from distcore_mesh.stages import Stages
from distcore_mesh.tensor_layout import TensorSplit
from distcore_mesh.tensor_parallel import splits_of
from distcore_mesh.tp_plans import plan_for


def mesh_memory(
    options: MeshOptions,
    config: RunConfig,
    meta_model: nn.Module,
    ranks: int,
    make_optimizer: OptimizerFactory,
) -> Memory:
    """Return the memory of the rank that holds most. Its traffic between layers is not known."""
    pp, replicas, shards, _, tp = options.sizes(ranks)
    whole = _split_model(options, meta_model, tp)
    settings = memory.ShardingSettings(
        shards=shards,
        replicas=replicas,
        frees=True,
        offloads=False,
        gathered_in=options.gathered_in(config),
        reduced_in=options.dtype_of(config, options.reduce_dtype),
        parted=frozenset(splits_of_experts(meta_model)),
        parts=options.ep,
    )
    names = tuple(repeated_classes(meta_model))

    def make_stage_optimizer(part: nn.Module) -> Optimizer:
        """Make the optimizer as a run does: for the whole model, then reduced to
        the parameters of ``part``.
        """
        model = copy.deepcopy(whole)
        return keep_stage_parameters(make_optimizer(model), dict(model.named_parameters()), part)

    parts = _stage_models(options, config, whole, pp)
    stages = [
        memory.sharded_memory(part, units.find_units(part, names), make_stage_optimizer, settings)
        for part in parts
    ]
    most = max(stages, key=lambda stage: stage.states + stage.buffers)
    buffers = most.buffers if shards * replicas > 1 else 0  # else nothing is gathered
    return replace(most, buffers=buffers, sent=None, sent_each=0)


def _split_model(options: MeshOptions, meta_model: nn.Module, tp: int) -> nn.Module:
    """Return the model with one rank's part of the layers that are split."""
    splits: dict[str, TensorSplit] = {}
    if tp > 1:
        splits |= splits_of(meta_model, plan_for(meta_model, options.plan), tp)
        splits |= splits_of_experts(meta_model)

    def shape(name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        return splits[name].shape_of_part(tp) if name in splits else tuple(parameter.shape)

    return footprint.resized(meta_model, shape)


def _stage_models(
    options: MeshOptions, config: RunConfig, whole: nn.Module, pp: int
) -> Iterator[nn.Module]:
    """Yield the model of each rank of the pipeline, without the modules of other stages."""
    dtype, meta = options.dtype_of(config, options.param_dtype), torch.device("meta")
    for rank in range(pp):
        part = copy.deepcopy(whole)
        if pp > 1:
            stages = Stages(rank, pp, (), (), options.pp_schedule, options.chunks)  # without groups
            split_into_stages(part, stages, dtype, meta)
        yield part
