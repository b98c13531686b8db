"""Outputs of an evaluation: checked per micro-batch, joined, gathered over ranks, and ordered.

Lines of predictions, which a task makes of them, are checked and written as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distcore.errors import TaskError, defined_at
from distcore.files import strict_json
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.ragged import Ragged
from distcore.plugin.task.task import FileRows

INDEX = "index"
"""Name under which the row numbers travel with the outputs."""
BLOCK = "distcore_block"
"""Name under which the numbers of blocks travel with their sums."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Row numbers, outputs and sums of some rows; of a whole dataset without the numbers."""

    index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """The number of each row, int64, shape ``(n,)``."""
    outputs: dict[str, Tensor | Ragged] = field(default_factory=dict)
    """Outputs of n rows by name."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums over these rows by name, float64."""
    blocks: Tensor | None = None
    """Numbers of m blocks, int64, shape ``(m,)``: ``sums`` then have a row for each of them.

    So it is under ``exact``, where blocks are added in one order whatever rank had them.
    """


class Collector:
    """Collects the results of one rank's micro-batches on the CPU, to save memory of the device."""

    def __init__(self) -> None:
        self._index: list[Tensor] = []
        self._outputs: dict[str, list[Tensor | Ragged]] = {}
        self._sums: dict[str, Tensor] = {}
        self._blocks: list[int] = []
        self._sums_of_blocks: dict[str, list[Tensor]] = {}

    def add(
        self,
        indices: np.ndarray,
        outputs: Mapping[str, object],
        sums: Mapping[str, object],
        is_counted: bool,
        block: int | None = None,
    ) -> None:
        """Take the results of one micro-batch; if not ``is_counted``, only dtypes and shapes.

        The sums of a ``block`` are kept apart, under its number. Raises TaskError for a sum that is
        no tensor or has another shape than before.
        """
        rows = len(indices) if is_counted else 0
        self._index.append(torch.from_numpy(indices)[:rows])
        for name, value in outputs.items():
            assert isinstance(value, Tensor | Ragged)  # checked_outputs has seen to it
            self._outputs.setdefault(name, []).append(_first(value, rows))
        for name, total in sums.items():
            if not isinstance(total, Tensor):
                raise TaskError(
                    f"task: sums() returned {type(total).__name__} as {name!r}; expected a tensor"
                )
            part = total.detach().double().cpu()
            before = self._sums.setdefault(name, torch.zeros_like(part))
            if before.shape != part.shape:
                shapes = f"{tuple(before.shape)} and {tuple(part.shape)}"
                raise TaskError(
                    f"task: sums() returned {name!r} of shapes {shapes}; expected the same for"
                    " every batch"
                )
            if block is not None:
                count = 1 if is_counted else 0
                self._sums_of_blocks.setdefault(name, []).append(part[None][:count])
            elif is_counted:
                before += part
        if block is not None and is_counted:
            self._blocks.append(block)

    def joined(self) -> Collected:
        """Return the joined results; raises TaskError for outputs with rows of several shapes."""
        outputs = {name: _joined(name, parts) for name, parts in self._outputs.items()}
        index = torch.cat([torch.empty(0, dtype=torch.long), *self._index])
        if not self._sums_of_blocks:
            return Collected(index=index, outputs=outputs, sums=self._sums)
        sums = {name: torch.cat(parts) for name, parts in self._sums_of_blocks.items()}
        blocks = torch.tensor(self._blocks, dtype=torch.long)
        return Collected(index=index, outputs=outputs, sums=sums, blocks=blocks)


class InOrder:
    """Puts gathered results into the order of the dataset.

    In addition to the outputs it takes a byte for each row.
    """

    def __init__(self, rows: int) -> None:
        """``rows`` is the number of rows of the dataset."""
        self.evaluated = 0
        self.seen = torch.zeros(rows, dtype=torch.bool)
        self._placed: dict[str, Tensor] = {}
        self._ragged: dict[str, list[Tensor | Ragged]] = {}
        self._sums: dict[str, Tensor] = {}
        self._index = [torch.empty(0, dtype=torch.long)]

    def add(self, results: Collected) -> None:
        """Take the results of some rows."""
        rows = results.index
        self.evaluated += len(rows)
        self.seen[rows] = True
        for name, value in results.outputs.items():
            if isinstance(value, Ragged):
                self._ragged.setdefault(name, []).append(value)
                continue
            if name not in self._placed:
                self._placed[name] = value.new_empty(len(self.seen), *value.shape[1:])
            placed = self._placed[name]
            # Joined with no rows of the others, which raises for another shape.
            placed[rows] = _cat(name, [placed[:0], value], "rows")
        if self._ragged:
            self._index.append(rows)
        self._sums = {name: total + self._sums.get(name, 0) for name, total in results.sums.items()}

    def joined(self) -> Collected:
        """Return the outputs in order, and the sums; no numbers."""
        order = torch.cat(self._index).argsort()
        ragged = {name: _joined(name, parts).take(order) for name, parts in self._ragged.items()}
        return Collected(outputs={**self._placed, **ragged}, sums=self._sums)


def checked_outputs(method: str, outputs: object, rows: int) -> dict[str, Tensor | Ragged]:
    """Return the outputs of one micro-batch; TaskError, naming ``method``, for other rows."""
    if not isinstance(outputs, Mapping):
        kind = type(outputs).__name__
        raise TaskError(f"task: {method}() returned {kind}; expected a dict of tensors ({rows}, …)")
    for name, value in outputs.items():
        if name == INDEX:
            raise TaskError(
                f"task: {method}() returned {name!r}, which is the name of the row numbers; choose"
                " another"
            )
        _check_rows(method, name, value, rows)
    return dict(outputs)


def gather_leaders(run: Run, hooks: Hooks, mine: Collected, rows: np.ndarray) -> Collected:
    """Return the outputs of ``rows`` by the ranks that lead data shards; every rank calls.

    Each calls with rows of its own.

    In a pipeline the other ranks of a shard have values of no meaning.
    """
    count = len(mine.index) if run.world.is_shard_leader else 0
    outputs = {name: _first(value, count) for name, value in mine.outputs.items()}
    gathered = gather(run, hooks, Collected(index=mine.index[:count], outputs=outputs))
    numbers = gathered.index.tolist()
    order = torch.tensor([numbers.index(row) for row in rows.tolist()], dtype=torch.long)
    selected = {
        name: value.take(order) if isinstance(value, Ragged) else value[order]
        for name, value in gathered.outputs.items()
    }
    return Collected(index=gathered.index[order], outputs=selected)


def gather(run: Run, hooks: Hooks, mine: Collected) -> Collected:
    """Return the results of all ranks, on the CPU and the same on every rank; every rank calls."""
    rows: dict[str, Tensor] = {INDEX: mine.index}
    entries: dict[str, Tensor] = {}
    for name, value in mine.outputs.items():
        if isinstance(value, Ragged):
            rows[name] = value.lengths
            entries[name] = value.values
        else:
            rows[name] = value
    gathered = _gather(run, hooks, rows)
    index = gathered.pop(INDEX)
    outputs: dict[str, Tensor | Ragged] = dict(gathered)
    # In a call of their own: ranks have as many rows under each name, but not as many entries.
    if entries:
        for name, values in _gather(run, hooks, entries).items():
            outputs[name] = Ragged(values, gathered[name])
    sums = {}
    if mine.blocks is not None:
        sums = _sums_in_order(_gather(run, hooks, {BLOCK: mine.blocks, **mine.sums}))
    elif mine.sums:
        # As a row of the leader's: ranks of one data shard have the same sums.
        count = 1 if run.world.is_shard_leader else 0
        parts = {name: total[None][:count] for name, total in mine.sums.items()}
        sums = {name: part.sum(0) for name, part in _gather(run, hooks, parts).items()}
    return Collected(index=index, outputs=outputs, sums=sums)


def _sums_in_order(sums_of_blocks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums over all blocks, added one block after the other by their numbers."""
    order = sums_of_blocks.pop(BLOCK).argsort()
    sums = {}
    for name, parts in sums_of_blocks.items():
        total = torch.zeros_like(parts[0])
        # Not by ``sum``, which adds in an order of its own.
        for part in parts[order]:
            total += part
        sums[name] = total
    return sums


def _gather(run: Run, hooks: Hooks, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    on_device = {name: tensor.to(run.world.device) for name, tensor in tensors.items()}
    return {name: tensor.cpu() for name, tensor in hooks.gather_outputs(run, on_device).items()}


def _check_rows(method: str, name: str, value: object, rows: int) -> None:
    """Raise TaskError unless an output has ``rows`` rows."""
    returned = f"task: {method}() returned {name!r}"
    if isinstance(value, Ragged):
        lengths = value.lengths
        if lengths.shape != (rows,) or lengths.dtype != torch.int64:
            form = f"{tuple(lengths.shape)} and {lengths.dtype}"
            raise TaskError(
                f"{returned} with lengths of shape {form} for {rows} rows; expected ({rows},) and"
                " int64"
            )
        entries = len(value.values) if value.values.dim() else 0
        if int(lengths.sum()) != entries or bool((lengths < 0).any()):
            total = int(lengths.sum())
            raise TaskError(
                f"{returned} with {entries} values for lengths that sum up to {total}; expected as"
                " many"
            )
        return
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise TaskError(
            f"task: {method}() returned {kind} as {name!r}; expected a tensor ({rows}, …) or a"
            " Ragged"
        )
    if value.dim() == 0 or len(value) != rows:
        shape = tuple(value.shape)
        raise TaskError(
            f"{returned} of shape {shape} for {rows} rows; expected ({rows}, …), or a Ragged of"
            f" {rows} rows"
        )


def _first(value: Tensor | Ragged, rows: int) -> Tensor | Ragged:
    """Return all ``rows`` of a micro-batch's output, or none of them, on the CPU."""
    if isinstance(value, Ragged):
        values = value.values if rows else value.values[:0]
        return Ragged(values.detach().cpu(), value.lengths[:rows].cpu())
    return value[:rows].detach().cpu()


def _joined(name: str, parts: list[Tensor | Ragged]) -> Tensor | Ragged:
    """Return the outputs of several micro-batches as one; TaskError for rows of several shapes."""
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if not ragged:
        return _cat(name, [part for part in parts if isinstance(part, Tensor)], "rows")
    if len(ragged) < len(parts):
        raise TaskError(
            f"task: outputs {name!r} are a Ragged for some batches and a tensor for others;"
            " expected one"
        )
    values = _cat(name, [part.values for part in ragged], "values")
    return Ragged(values, torch.cat([part.lengths for part in ragged]))


def _cat(name: str, tensors: list[Tensor], what: str) -> Tensor:
    """Join tensors along the first dimension; TaskError if the others differ."""
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) > 1:
        listed = " and ".join(map(str, sorted(shapes)))
        raise TaskError(
            f"task: outputs() returned {name!r} with {what} of shapes {listed}; {what} of a dataset"
            " have one shape: return a distcore.Ragged, pad them to a fixed length, or return a"
            " number per row"
        )
    return torch.cat(tensors)


def checked_losses(
    losses: Tensor, row_loss: Callable[..., object], rows: int | None = None
) -> Tensor:
    """Return the losses of rows; raises TaskError, with the place of ``row_loss``, for others.

    They must have the shape ``(n,)``, and a gradient in training.
    """
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        kind = type(losses).__name__
        if isinstance(losses, Tensor):
            kind = f"a tensor of shape {tuple(losses.shape)}"
        problem = f"{kind}; expected one loss per row, shape (n,)"
    elif torch.is_grad_enabled() and not losses.requires_grad:
        problem = "losses without a gradient (detached?)"
    elif rows not in (None, len(losses)):
        problem = f"{len(losses)} losses for {rows} rows"
    else:
        return losses
    task = type(getattr(row_loss, "__self__", None)).__name__
    raise TaskError(f"task {task}: row_loss() returned {problem}{defined_at(row_loss)}")


def checked_metrics(method: str, metrics: object) -> dict[str, object]:
    """Return the metrics from ``method`` by name; raises TaskError for a value that is not JSON."""
    if not isinstance(metrics, dict):
        raise TaskError(
            f"task: {method}() returned {type(metrics).__name__}; expected a dict of metrics by"
            " name"
        )
    plain = {name: _plain(value) for name, value in metrics.items()}
    for name, value in plain.items():
        answer = f"{method}() as {name!r} returned {type(value).__name__}"
        checked_json(f"{answer}; expected a JSON value", value)
    return plain


def _plain(value: object) -> object:
    """Return the number in a tensor or array without dimensions; anything else as it is."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        return value.item()
    return value


def checked_json(complaint: str, value: object) -> str:
    """Return ``value`` as JSON text; otherwise raises TaskError, beginning with ``complaint``."""
    try:
        return strict_json(value)
    except (TypeError, ValueError) as error:
        raise TaskError(f"task: {complaint}: {error}") from error


def tested_lines(lines: Iterable[object]) -> Iterator[str]:
    """Yield the lines of predictions.jsonl; TaskError for a line that is no dict of JSON values."""
    return map(_line, _objects(lines))


def row_lines(lines: Iterable[object], rows: FileRows) -> list[str]:
    """Return one line for each of ``rows``; TaskError for other lines, too many or too few.

    A line begins with file, row and, if known, id. It has no ``index``, which counts test rows. A
    ``file`` from the task replaces file and row.
    """
    predictions = list(_objects(lines))
    if len(predictions) != len(rows.records):
        raise TaskError(
            f"task: predictions() gave {len(predictions)} lines for {len(rows.records)} rows"
        )
    written = []
    for number, prediction in enumerate(predictions):
        prediction.pop("index", None)
        source: dict[str, object] = {}
        if "file" not in prediction:
            source |= {"file": rows.file, "row": rows.start + number}
        if rows.ids is not None:
            source["id"] = rows.ids[number]
        written.append(_line(source | prediction))
    return written


def _objects(lines: Iterable[object]) -> Iterator[dict[str, object]]:
    """Yield the lines; raises TaskError for one that is no dict."""
    for line in lines:
        if not isinstance(line, dict):
            raise TaskError(
                f"task: predictions() gave {type(line).__name__} as a line; expected a dict"
            )
        yield line


def _line(values: dict[str, object]) -> str:
    return checked_json("predictions() gave a line that is not JSON", values) + "\n"
