"""The process groups of a layout, made once for all runs in a world: every one of gloo's costs a rank three threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("pp", "replicate", "shard", "cp", "tp")
"""The dimensions of a mesh, the outermost first."""

T = TypeVar("T")
_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[object, object]] = WeakKeyDictionary()
"""By the default process group, which none of them may keep alive."""


def mesh_of(device: str, sizes: tuple[int, ...]) -> DeviceMesh:
    """Return the mesh of these ``sizes``, one for each of ``DIMENSIONS``; every rank calls."""
    return _once((device, sizes), partial(init_device_mesh, device, sizes, mesh_dim_names=DIMENSIONS))


def link(mesh: DeviceMesh, number: int) -> dist.ProcessGroup:
    """Connect the ranks that differ in ``pp`` alone once more, for each ``number``; return the group of this rank.

    Every rank calls.
    """
    rows = mesh.mesh.movedim(0, -1).reshape(-1, mesh["pp"].size()).tolist()
    return _once((number, str(rows)), partial(_subgroup, rows))


def _once(key: object, make: Callable[[], T]) -> T:
    assert dist.group.WORLD is not None  # ranks have joined
    made = _MADE.setdefault(dist.group.WORLD, {})
    if key not in made:
        made[key] = make()
    return made[key]  # type: ignore[return-value]  # of the same key, so of the same type


def _subgroup(rows: list[list[int]]) -> dist.ProcessGroup:
    """Connect the ranks of each row; return the group of this rank's row."""
    group, _ = dist.new_subgroups_by_enumeration(rows)  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup)  # the rows have every rank
    return group
