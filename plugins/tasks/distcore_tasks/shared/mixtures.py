"""Sources of a mixture: their names in ``order.mix`` and ``order.mix_at``, and their rows."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path

import numpy as np

from distcore import ConfigError, nearest
from distcore_data import IndexedRows
from distcore_tasks.shared.options import TaskOptions


def mixed_sources(options: TaskOptions) -> list[str]:
    """Return the sources of ``data``; none without a mixture.

    Raises ConfigError as ``weights_by_step``.
    """
    weights_of_stages = iter(weights_by_step(options).values())
    return list(next(weights_of_stages, {}))


def weights_by_step(options: TaskOptions) -> dict[int, dict[str, float]]:
    """Return the weight of each source of ``data``, by the number of steps before.

    The steps ascend; the sources have the order of ``data``. Empty without a mixture. Raises
    ConfigError unless each source has one weight, and each weight one source.
    """
    stages = options.order.stages
    sources = [part.strip() for part in options.data.split(",")]
    if stages and len(sources) < 2:
        raise ConfigError(
            f"order.mix: --data {options.data} is one source; name several with commas between them"
        )
    return {step: _weighted(key, weights, sources) for step, (key, weights) in stages.items()}


def _weighted(key: str, weights: Mapping[str, float], sources: Sequence[str]) -> dict[str, float]:
    """Return the weight of each source, in their order; ``weights`` has them by any of its names.

    Raises ConfigError, which starts with ``key``, as ``weights_by_step``.
    """
    listed = ", ".join(sources)
    for name in weights:
        owners = [source for source in sources if name in _names(source)]
        if not owners:
            names = sorted({name for source in sources for name in _names(source)})
            hint = nearest(name, names)
            raise ConfigError(
                f"{key}: {name} is no source of --data{hint}; the sources are {listed}"
            )
        if len(owners) > 1:
            raise ConfigError(f"{key}: {name} names several sources; the sources are {listed}")
    weight_of_source: dict[str, float] = {}
    for source in sources:
        names_with_weight = [name for name in weights if name in _names(source)]
        if len(names_with_weight) != 1:
            problem = "has several weights" if names_with_weight else "has no weight"
            raise ConfigError(
                f"{key}: {source} {problem}; give each source of --data one: {listed}"
            )
        weight_of_source[source] = weights[names_with_weight[0]]
    return weight_of_source


def _names(source: str) -> set[str]:
    """Return the names of a source: itself, and that of its file or folder.

    A pattern has the name of its folder.
    """
    path = Path(source)
    name = path.parent.name if glob.has_magic(path.name) else path.name
    return {source, name, name.partition(".")[0]} - {""}


def source_bounds(
    options: TaskOptions, read: Callable[[str], Sized], numbers: np.ndarray, *, indexed: bool = True
) -> list[int]:
    """Return the first training row of each source of a mixture, and the end of the last.

    Empty without a mixture. ``numbers``: those of the training rows among all rows of ``data``,
    int64, ascending. ``read`` returns the rows of a source; where all of them are taken, and they
    are ``indexed``, the index has their number.
    """
    sources = mixed_sources(options)
    if not sources:
        return []
    if indexed and options.filter.column is None and not options.skip_bad_rows:
        counts = [len(IndexedRows(Path(source).expanduser(), {})) for source in sources]
    else:
        counts = [len(read(source)) for source in sources]
    return [0, *np.searchsorted(numbers, np.cumsum(counts)).tolist()]
