"""Dropout by row: a mask follows from seed, step, row, place in the row and call of a forward.

Masks are therefore the same for any number of ranks, any micro-batches, with and without padding,
and in recomputation. Every rank makes the same pool of kept and dropped values once per step. A
hash of row, place and call selects where in the pool the mask of a token begins. Both follow from
integer operations, so that masks are the same on any device.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from distcore.errors import TaskError
from distcore.model.dropout import BITS, CountsDraws
from distcore.plugin.strategy.contract import Run

log = logging.getLogger("distcore")

POOL = 2**18
"""Places of the pool at which a mask can begin."""
WIDEST = 2**14
"""Largest last dimension of a mask."""
POOL_VALUES = POOL + WIDEST
"""Values of the pool of one probability of dropout."""
LOW = 2**31 - 1
"""Hashes have 31 bits, so that a product of two fits into int64."""
DRAWS = (
    "draws some for each micro-batch, so results follow from ranks and micro-batches, not from rows"
    " alone; distcore.row_random in at(epoch) of the dataset draws by row"
)
"""A warning about random numbers of a model or a loss, with a remedy; it follows their place."""
_NO_CONTEXT = nullcontext()
Places = dict[tuple[int, ...], tuple[Tensor, Tensor]]
"""Rows in the micro-batch and places in the row of tokens, by their shape.

The shape is that of a joined sequence, or of a table of several sequences.
"""
Table = tuple[Tensor, Tensor] | None
"""Rows and places of the tokens of several sequences, int64 ``(sequences, tokens)``."""
Parts = Mapping[tuple[int, int], tuple[int, int]]
"""Which part of a dimension is computed here, and how many parts it has.

By the number of dimensions of a mask, and one of them.
"""
Call = tuple[int, Tensor, Places, Parts]
"""A call of the forward pass, for its recomputation: number, rows, and their places and parts."""


class RowMasks:
    """The dropout masks of one run, and the position in its current forward pass."""

    def __init__(self) -> None:
        """Begin without rows."""
        self.key = 0
        """Follows from seed and step; set at the beginning of each step."""
        self._pools: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
        self._pools_key = 0
        self._rows: Tensor | None = None
        # Rows that are not a tensor on their device yet: a model without dropout needs none.
        self._numbers: np.ndarray | None = None
        self._device = torch.device("cpu")
        self._places: Places = {}
        self._parts: Parts = {}
        self._firsts: Tensor | None = None
        self._calls: dict[int, Call] = {}
        self._shared: Call | None = None
        self.drawn = 0
        """Numbers that the masks drew from torch's generator, to recognize a call again."""
        self.is_new = True
        """True until the first forward pass."""
        self.outside: str | None = None
        """Which random numbers of the model depend on ranks and micro-batches, if any."""

    @property
    def rows(self) -> Tensor | None:
        """Rows of the current forward pass, int64 ``(n,)``; ``None`` between steps: no mask by row.

        They are on the device of the pass.
        """
        if self._numbers is not None:
            numbers = torch.from_numpy(self._numbers)
            self.rows = numbers.to(self._device, non_blocking=True)
        return self._rows

    @rows.setter
    def rows(self, rows: Tensor | None) -> None:
        """Replace the rows."""
        self._rows = rows
        self._numbers = None

    def begin_rows(
        self, rows: np.ndarray, device: torch.device, batch: object = None
    ) -> AbstractContextManager[object]:
        """Begin a forward pass of dataset ``rows``, int64 ``(n,)``; return the context for it.

        ``batch`` may have their attention mask, which says where their first tokens are. In the
        first forward pass of a run a line says which random numbers of the model are not by row.
        """
        global _current
        _current = self  # another run may have made a step since
        self._numbers = rows
        self._device = device
        self._places = {}
        self._parts = {}
        self._calls = {}
        self._firsts = None
        attended = batch.get("attention_mask") if isinstance(batch, dict) else None
        if isinstance(attended, Tensor) and attended.dim() == 2:
            has_left_padding = not bool(attended[:, 0].all())
            if has_left_padding:
                self._firsts = attended.ne(0).int().argmax(1).to(device)
        return self._noticing_draws() if self.is_new else _NO_CONTEXT

    @contextmanager
    def _noticing_draws(self) -> Iterator[None]:
        """Log which random numbers inside the ``with`` block are not by row."""
        self.is_new = False
        before = other_generators()
        with CountsDraws() as draws:  # type: ignore[no-untyped-call]
            yield
        others = before != other_generators()
        if draws.place or others:
            place = draws.place or "the task (Python's or numpy's generator)"
            log.warning("random numbers: %s %s", place, DRAWS)
        if self.outside:
            log.info(
                "dropout_masks: results depend on ranks and micro-batches, not by row: %s",
                self.outside,
            )

    def set_places(self, rows: Tensor, places: Tensor) -> None:
        """Say where tokens come from, until the next call with as many of them.

        Both have shape ``(tokens,)`` or ``(sequences, tokens)``, int64.

        ``rows`` has the row of each in the micro-batch, ``places`` its place in the row.
        """
        self._places = self._places | {tuple(rows.shape): (rows, places)}

    def set_parts(self, parts: Parts) -> None:
        """Say which parts of a row this rank computes from now on; elsewhere it is all."""
        self._parts = {**self._parts, **parts}

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Count the calls inside the ``with`` block as one: each computes other rows."""
        self._shared = None if self.rows is None else self._next_call(self.rows)
        try:
            yield
        finally:
            self._shared = None

    @contextmanager
    def some_rows(self, rows: Tensor) -> Iterator[None]:
        """Compute only some rows of the micro-batch inside the block, int64 ``(n,)``.

        A row may be among them several times.
        """
        rows_of_batch = self.rows
        self.rows = None if rows_of_batch is None else rows_of_batch[rows]
        try:
            yield
        finally:
            self.rows = rows_of_batch

    def mask(self, like: Tensor, shape: Sequence[int], p: float) -> Tensor | None:
        """Return a mask of ``shape``, in the dtype of ``like``: 0, or a factor that keeps the mean.

        ``None`` if the rows of ``shape`` are not known.
        """
        is_plain = type(like) is Tensor and like.is_floating_point()
        drops_some = 0 < round(p * 2**BITS) < 2**BITS
        if self.rows is None or not is_plain or not drops_some:
            return None
        number, rows, places, parts = self._shared or self._next_call(self.rows)
        if self._shared:
            rows = self.rows
        # Of a dimension that is split over ranks, this rank has one part.
        split = [parts.get((len(shape), dimension), (0, 1)) for dimension in range(len(shape))]
        spans = []
        for (part, _), size in zip(split, shape, strict=True):
            spans.append(range(part * size, (part + 1) * size))
        _, parts_of_width = split[-1]
        if shape[-1] * parts_of_width > WIDEST:
            return None
        table: Table = None
        if len(shape) > 2:
            tokens = shape[2] if len(shape) == 4 else shape[1]
            table = places.get((shape[0], tokens))
        hashed = self._hashes(rows, spans[:-1], number, places, table)
        if hashed is None:
            self.outside = f"dropout of shape {tuple(shape)}, whose rows are not known"
            return None
        windows = self._pool(p, like).as_strided((POOL, shape[-1]), (1, 1), spans[-1].start)
        # The hash leaves out the width, which padding changes.
        begins = (hashed & (POOL - 1)).flatten()
        mask = windows.index_select(0, begins).view(*shape)
        if len(shape) != 4 or (self._firsts is None and table is None):
            return mask
        # A key of attention counts from the first token of its row.
        columns = torch.arange(shape[3], device=mask.device)
        if table:
            firsts = (columns - table[1])[:, None]
        else:
            assert self._firsts is not None
            firsts = self._firsts[:, None, None]
        return mask.take_along_dim((columns - firsts[..., None]) % shape[3], 3)

    def _next_call(self, rows: Tensor) -> Call:
        """Return a call of ``rows``, as it was in the forward pass.

        Recomputation restores torch's generator, so a number drawn from it identifies the call.
        """
        any_number = torch.empty((), dtype=torch.int64).random_(-(2**63), None)
        drawn = int(any_number)
        self.drawn += 1
        if drawn not in self._calls:
            if torch._C._current_graph_task_id() != -1:
                raise TaskError(
                    "task: the model recomputes activations without the random state of the first"
                    " pass; call torch.utils.checkpoint with preserve_rng_state=True, or set"
                    " dropout_masks: rank"
                )
            number = len(self._calls)
            self._calls[drawn] = (number, rows, self._places, self._parts)
        return self._calls[drawn]

    def _hashes(
        self, row_numbers: Tensor, leading: list[range], number: int, places: Places, table: Table
    ) -> Tensor | None:
        """Return a hash for each row of the mask's last dimension, of the ``leading`` dimensions.

        ``row_numbers`` are the rows of the micro-batch, int64 ``(n,)``. ``None`` if it is not known
        to which of them the mask's rows belong.
        """
        salt = (self.key ^ (number * 0x2545F491)) & LOW
        sizes = [len(span) for span in leading]
        if table is not None:
            rows, place = table
            hashed = _mix((row_numbers[rows] & LOW) ^ salt)
            if len(sizes) == 3:  # of attention: the heads are between sequences and tokens
                span = leading[1]
                heads = torch.arange(span.start, span.stop, device=hashed.device)
                hashed = _mix(hashed[:, None] ^ _salts(heads)[:, None])
                place = place[:, None]
            return _mix(hashed ^ _salts(place))
        if not sizes:
            return None
        if sizes[0] == len(row_numbers):
            hashed = _mix((row_numbers & LOW) ^ salt)
            others = leading[1:]
        elif int(np.prod(sizes)) == sizes[-1] and (sizes[-1],) in places:
            rows, place = places[sizes[-1],]
            return _mix(_mix((row_numbers[rows] & LOW) ^ salt) ^ _salts(place))
        else:
            return None
        for at, span in enumerate(others, 1):
            inside = torch.arange(span.start, span.stop, device=row_numbers.device)
            is_tokens = at == len(others)  # the last dimension but one of the mask
            if self._firsts is not None and is_tokens:
                inside = inside - self._firsts.view(-1, *[1] * len(others))
            hashed = _mix(hashed[..., None] ^ _salts(inside))
        return hashed

    def _pool(self, p: float, like: Tensor) -> Tensor:
        """Return the values of all masks of one probability, ``(POOL_VALUES,)``, for this step."""
        if self._pools_key != self.key:
            self._pools_key = self.key
            self._pools = {}
        pool = self._pools.get((p, like.dtype, like.device))
        if pool is None:
            dropped = round(p * 2**BITS)
            values = _random_values(self.key, like.device)
            # Signed: a value is uniform from -2**15 to 2**15 - 1.
            first_kept = dropped - 2 ** (BITS - 1)
            pool = torch.ge(values, first_kept, out=like.new_empty(POOL_VALUES))
            pool.mul_(2**BITS / (2**BITS - dropped))
            self._pools[p, like.dtype, like.device] = pool
        return pool


def other_generators() -> str:
    """Return the states of Python's and numpy's generators, to compare."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    # The repr of a large array leaves out its middle.
    comparable = {name: np.asarray(part).tolist() for name, part in of_numpy.items()}
    return repr((random.getstate(), comparable))


def _random_values(key: int, device: torch.device) -> Tensor:
    """Return 16 random bits for each value of the pool, int16.

    They are a hash of its number, by MurmurHash3's finalizer.
    """
    # Signed, because torch computes with int32 on every device.
    stride = (key | 1) % 2**32 - 2**31
    start = (key >> 31) % 2**32 - 2**31
    numbers = torch.arange(POOL_VALUES // 2, dtype=torch.int32, device=device)
    values = numbers.mul_(stride | 1).add_(start)
    rounds = ((16, -0x7A143595), (13, -0x3D4D51CB), (16, 1))
    for shift, factor in rounds:
        values ^= (values >> shift) & (2 ** (32 - shift) - 1)  # the shift repeats the sign
        values *= factor
    return values.view(torch.int16)


def _mix(values: Tensor) -> Tensor:
    """Return a hash of each value, of 31 bits as the values."""
    values = (values ^ (values >> 16)) * 0x45D9F3B & LOW
    values = (values ^ (values >> 15)) * 0x45D9F3B & LOW
    return values ^ (values >> 16)


def _salts(places: Tensor) -> Tensor:
    """Return numbers of 31 bits that differ from place to place, to be mixed into a hash."""
    return (places + 1) * 0x1B873593 & LOW


_current: RowMasks | None = None
"""The masks of the run that trains in this process, or trained last."""
_of_runs: list[list[RowMasks | None]] = []
"""The masks of each run that is under way in this process, the outer runs first; each in a
list of its own. In the module, as is what they replace: torch has one ``F.dropout`` for all.
"""


@contextmanager
def use_row_masks(run: Run) -> Iterator[RowMasks | None]:
    """Let torch's dropout and attention take their masks by row, if the config says so.

    That holds inside the ``with`` block. A run may begin inside of another one, and end before or
    after it: each has its own masks, or none.
    """
    own = [RowMasks() if run.config.dropout_masks == "row" else None]
    _of_runs.append(own)
    _take_masks_of(own[0])
    try:
        yield own[0]
    finally:
        _of_runs[:] = [other for other in _of_runs if other is not own]
        _take_masks_of(_of_runs[-1][0] if _of_runs else None)


def _take_masks_of(masks: RowMasks | None) -> None:
    """Make ``masks`` the current ones; torch's functions are replaced while any run has some."""
    global _current
    _current = masks
    is_replaced = any(own[0] is not None for own in _of_runs)
    F.dropout = _dropout if is_replaced else _torch_dropout
    F.scaled_dot_product_attention = _attention if is_replaced else _torch_attention


def current_masks() -> RowMasks | None:
    """Return the masks of the run that trains here, for a task that reorders tokens.

    ``None`` if none are by row.
    """
    return _current


_torch_dropout, _torch_attention = F.dropout, F.scaled_dot_product_attention


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Compute torch's ``dropout``, with a mask by row where its rows are known."""
    mask = None
    if training and p and _current is not None:
        mask = _current.mask(input, input.shape, p)
    if mask is None:
        return _torch_dropout(input, p, training, inplace)
    return input.mul_(mask) if inplace else input * mask


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute torch's ``scaled_dot_product_attention``; with dropout by its definition.

    Its masks are by row then.
    """
    shape = (*query.shape[:-1], key.shape[-2])
    mask = _current.mask(query, shape, dropout_p) if dropout_p and _current is not None else None
    if mask is None:
        return _torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        queries_per_key = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(queries_per_key, -3)
        value = value.repeat_interleave(queries_per_key, -3)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    weights = torch.matmul(query * scale, key.transpose(-2, -1))
    if is_causal:
        attn_mask = query.new_ones(shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        low = torch.finfo(weights.dtype).min  # -inf would give NaN for a token without a key
        weights = weights.masked_fill(~attn_mask, low)
    elif attn_mask is not None:
        weights = weights + attn_mask
    return torch.matmul(weights.softmax(-1) * mask, value)
