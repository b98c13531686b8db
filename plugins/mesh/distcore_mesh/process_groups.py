"""Make the process groups of a mesh once for all runs in a world.

Each gloo group costs a rank three threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("pp", "replicate", "shard", "cp", "tp")
"""The dimensions of a mesh, the outermost first."""
EXPERT_DIMENSIONS = ("pp", "replicate", "expert_shard", "ep", "cp", "tp")
"""The dimensions of the mesh over the same ranks in which experts are shared."""

T = TypeVar("T")
# In the module, because its owner, torch's default process group, is a global of torch and outlives
# a run. The keys are weak, so that no group keeps the default one alive.
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[object, object]] = WeakKeyDictionary()
"""Map the default process group to the meshes and groups made in it."""


def make_mesh(device: str, sizes: tuple[int, ...]) -> DeviceMesh:
    """Return the mesh of ``sizes``, one for each of ``DIMENSIONS``. Every rank must call."""
    make = partial(init_device_mesh, device, sizes, mesh_dim_names=DIMENSIONS)
    return _make_once((device, sizes), make)


def make_expert_mesh(device: str, sizes: tuple[int, ...], ep: int) -> DeviceMesh:
    """Return the mesh of ``make_mesh`` with ``shard`` in two: ``expert_shard`` and, in it, ``ep``.

    Every rank must call.
    """
    pp, replicate, shard, cp, tp = sizes
    parts = (pp, replicate, shard // ep, ep, cp, tp)
    make = partial(init_device_mesh, device, parts, mesh_dim_names=EXPERT_DIMENSIONS)
    return _make_once((device, parts), make)


def pipeline_group(mesh: DeviceMesh, number: int) -> dist.ProcessGroup:
    """Return this rank's group of the ranks that differ only in ``pp``.

    Each ``number`` has a separate group. Every rank must call.
    """
    ranks_by_pp = mesh.mesh.movedim(0, -1)
    rows = ranks_by_pp.reshape(-1, mesh["pp"].size()).tolist()
    return _make_once((number, str(rows)), partial(_new_subgroup, rows))


def _make_once(key: object, make: Callable[[], T]) -> T:
    """Return what ``make`` returned when ``key`` was first used in this world."""
    assert dist.group.WORLD is not None  # ranks have joined
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    if key not in groups:
        groups[key] = make()
    return groups[key]  # type: ignore[return-value]  # the same key, so the same type


def _new_subgroup(rows: list[list[int]]) -> dist.ProcessGroup:
    """Connect the ranks of each row. Return the group of this rank's row."""
    group, _ = dist.new_subgroups_by_enumeration(rows)  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup)  # the rows have every rank
    return group
