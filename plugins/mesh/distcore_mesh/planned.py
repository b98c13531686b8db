"""What a rank of a mesh holds, known before a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from distcore import Memory, OptimizerFactory, RunConfig, footprint, repeated_classes
from distcore_fsdp import memory, units
from distcore_mesh.cuts import cut_into_stages, of_stage
from distcore_mesh.layers import splits_of
from distcore_mesh.options import MeshOptions
from distcore_mesh.plans import plan_for
from distcore_mesh.splits import Split
from distcore_mesh.stages import Stages


def planned_memory(
    options: MeshOptions, config: RunConfig, skeleton: nn.Module, ranks: int, make_optimizer: OptimizerFactory
) -> Memory:
    """Return what the rank that holds most of ``ranks`` ranks has; how much it sends between layers is not known."""
    pp, replicas, shards, _, tp = options.sizes(ranks)
    whole = _split(options, skeleton, tp)
    how = memory.ShardingSettings(
        shards=shards,
        replicas=replicas,
        frees=True,
        offloads=False,
        gathered_in=options.dtype_of(config, options.param_dtype),
        reduced_in=options.dtype_of(config, options.reduce_dtype),
    )
    names = tuple(repeated_classes(skeleton))

    def stepped(part: nn.Module) -> Optimizer:
        """Return the optimizer as a run makes it: for the whole model, of which ``part`` is left."""
        model = copy.deepcopy(whole)
        return of_stage(make_optimizer(model), dict(model.named_parameters()), part)

    parts = _stages(options, config, whole, pp)
    held = [memory.sharded_memory(part, units.find_units(part, names), stepped, how) for part in parts]
    most = max(held, key=lambda rank: rank.states + rank.buffers)
    buffers = most.buffers if shards * replicas > 1 else 0  # else nothing is gathered
    return replace(most, buffers=buffers, sent=None, sent_each=0)


def _split(options: MeshOptions, skeleton: nn.Module, tp: int) -> nn.Module:
    """Return the model with what a rank has of layers that are split."""
    splits: dict[str, Split] = splits_of(skeleton, plan_for(skeleton, options.plan), tp) if tp > 1 else {}

    def shape(name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        return splits[name].shape_of_part(tp) if name in splits else tuple(parameter.shape)

    return footprint.resized(skeleton, shape)


def _stages(options: MeshOptions, config: RunConfig, whole: nn.Module, pp: int) -> Iterator[nn.Module]:
    """Yield what is left of the model on a rank of each place in the pipeline."""
    dtype, meta = options.dtype_of(config, options.param_dtype), torch.device("meta")
    for rank in range(pp):
        part = copy.deepcopy(whole)
        if pp > 1:
            stages = Stages(rank, pp, (), (), options.pp_schedule, options.chunks)  # which exchange nothing
            cut_into_stages(part, stages, dtype, meta)
        yield part
