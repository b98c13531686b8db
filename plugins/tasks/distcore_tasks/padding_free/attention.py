"""Attention within each row of a joined sequence: in groups of like length, or in one call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from distcore.model import current_masks
from distcore_tasks.padding_free.token_sequence import Bounds, Crossing, Group, TokenSequence

SDPA, OWN = "distcore_rows", "distcore_rows_own"
"""Names of this attention in transformers: for models with ``sdpa``, and for models with
attention of their own.
"""
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's kernels for nested tensors. A CPU only has the last one, without ``is_causal``."""
Compute = Callable[..., tuple[Tensor, Any]]
"""An attention function of transformers.

It gets a module, queries, keys, values, a mask and options.
"""


def register(before: str, compiled: bool) -> str:
    """Register the attention that replaces ``before`` with transformers, and return its name.

    ``compiled``: layers are compiled. Their code then ends before attention and goes on after it,
    because the sizes of groups change with each batch.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    function: Compute
    mask: Callable[..., Any]
    if before == "eager":
        name, function, mask = OWN, attend_own, eager_mask
    else:
        name, function, mask = SDPA, attend, sdpa_mask
    if compiled:
        function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)
    return name


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    token_sequence: TokenSequence | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each row of ``token_sequence``.

    Without one, the result is that of ``sdpa`` of transformers.

    ``query``, ``key`` and ``value`` are ``(1, heads, tokens, size)``; the result is ``(1, tokens,
    heads, size)``. The option ``position_bias`` belongs to the longest row, ``(1, heads, longest,
    longest)``. Between a decoder and its encoder it is not read, and ``key`` has the encoder's
    tokens. Else a ``query`` shorter than ``key`` has the first token of each row only, and so has
    the result.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if token_sequence is None:
        return sdpa(module, query, key, value, attention_mask, **options)[0], None
    if token_sequence.bounds is not None:
        options["is_causal"] = _is_causal(module, options)
        return _at_once(query, key, value, token_sequence.bounds, **options), None
    return _in_groups(sdpa, module, query, key, value, token_sequence, options), None


def attend_own(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    token_sequence: TokenSequence | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the same by the eager attention of the module's model.

    It is for models whose attention ``sdpa`` does not have, such as with capped scores or sinks.
    """
    eager = _eager_attention(module)
    if token_sequence is None:
        return eager(module, query, key, value, attention_mask, **options)[0], None

    def compute(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """Compute eager attention; ``visible`` is True where a query may attend to a key."""
        if visible is None and _is_causal(module, options):
            visible = _window(query.shape[2], None, query.device)
        # Eager attention adds its mask to the scores.
        added: Tensor | None = None
        if visible is not None:
            lowest = torch.finfo(query.dtype).min
            added = torch.where(visible, 0.0, lowest).to(query.dtype)
        return eager(module, query, key, value, added, **options)

    return _in_groups(compute, module, query, key, value, token_sequence, options), None


def _eager_attention(module: nn.Module) -> Compute:
    """Return the eager attention function of the model that ``module`` is part of."""
    name = "eager_attention_forward"
    sources = (vars(sys.modules[base.__module__]) for base in type(module).__mro__)
    function: Compute = next(source[name] for source in sources if name in source)
    return function


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """Return True if tokens attend to earlier ones only: by the call, else by the module."""
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    return bool(causal)


def _in_groups(
    compute: Compute,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequence: TokenSequence,
    options: dict[str, Any],
) -> Tensor:
    """Compute attention group by group, and return ``(1, tokens, heads, size)``."""
    if sequence.crossing is not None and not _is_causal(module, options):
        return _across(compute, module, query, key, value, sequence.crossing, options)
    causal = _is_causal(module, options)
    window = options.get("sliding_window")
    bias = options.get("position_bias")
    # One split, because autograd joins its gradients. It would pad those of separate slices with
    # zeros, and sum them.
    repeated = key.shape[2] - sequence.real
    sizes = [*(group.stop - group.start for group in sequence.groups), repeated]
    first_only = query.shape[2] < key.shape[2]
    query_sizes = [*(group.rows for group in sequence.groups), 0] if first_only else sizes
    queries, keys, values = _cut(query, query_sizes), _cut(key, sizes), _cut(value, sizes)
    parts = []
    masks = current_masks() if module.training and options.get("dropout") else None
    with masks.one_call() if masks else nullcontext():
        # The repeated tokens are the last part, which no group takes.
        for group, q, k, v in zip(sequence.groups, queries, keys, values, strict=False):
            q = q[:, None].transpose(1, 2) if first_only else _rows(q, group)
            k, v = _rows(k, group), _rows(v, group)
            if bias is not None:
                options = options | {"position_bias": bias[:, :, : group.longest, : group.longest]}
            mask = group.mask
            if causal:
                # Padding is at the end, where no real token attends to it.
                mask = None
                if window and window < group.longest:
                    mask = _window(group.longest, window, q.device)
            with masks.some_rows(group.numbers) if masks else nullcontext():
                attended = compute(module, q, k, v, mask, **options)[0].flatten(0, 1)
            if not first_only and group.real is not None:
                attended = attended.index_select(0, group.real)
            parts.append(attended)
    if repeated and not first_only:
        parts.append(parts[0].new_zeros(repeated, *parts[0].shape[1:]))
    return torch.cat(parts)[None]


def _across(
    compute: Compute,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    crossing: Crossing,
    options: dict[str, Any],
) -> Tensor:
    """Compute the attention of a decoder's tokens to its encoder's.

    Returns ``(1, tokens, heads, size)``.
    """
    groups = crossing.groups
    options = options | {"position_bias": None}
    repeated = key.shape[2] - groups[-1].stop
    sizes = [*(group.stop - group.start for group in groups), repeated]
    keys, values = _cut(key, sizes), _cut(value, sizes)
    padded_query = query[0].transpose(0, 1).index_select(0, crossing.places)
    query_sizes = [
        group.rows * longest for group, longest in zip(groups, crossing.longest, strict=True)
    ]
    queries = torch.split(padded_query, query_sizes)
    parts = []
    masks = current_masks() if module.training and options.get("dropout") else None
    with masks.one_call() if masks else nullcontext():
        # The repeated tokens are the last part of keys and values, which no group takes.
        for group, q, k, v in zip(groups, queries, keys, values, strict=False):
            q = q.view(group.rows, -1, *q.shape[1:]).transpose(1, 2)
            k, v = _rows(k, group), _rows(v, group)
            with masks.some_rows(group.numbers) if masks else nullcontext():
                attended = compute(module, q, k, v, group.mask, **options)[0]
            parts.append(attended.flatten(0, 1))
    return torch.cat(parts).index_select(0, crossing.back)[None]


def _window(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Return which of a row's ``tokens`` each one attends to, bool ``(1, 1, tokens, tokens)``.

    These are the last ``window`` tokens up to it; all of them without a window.
    """
    positions = torch.arange(tokens, device=device)
    distance = positions[:, None] - positions
    visible = (distance >= 0) & (distance < (window or tokens))
    return visible[None, None]


def _cut(states: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Split ``(1, heads, tokens, size)`` into parts ``(sizes[i], heads, size)``."""
    return torch.split(states[0].transpose(0, 1), sizes)


def _rows(tokens: Tensor, group: Group) -> Tensor:
    """Return a group's tokens, ``(tokens, heads, size)``, as ``(rows, heads, longest, size)``."""
    padded = tokens if group.places is None else tokens.index_select(0, group.places)
    return padded.reshape(group.rows, group.longest, *tokens.shape[1:]).transpose(1, 2)


def _at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Bounds,
    *,
    is_causal: bool,
    dropout: float = 0.0,
    scaling: float | None = None,
    **unused: Any,
) -> Tensor:
    """Compute attention of all rows in one kernel call, and return ``(1, tokens, heads, size)``.

    The kernel gets the rows' bounds: see https://docs.pytorch.org/docs/stable/nested.html, tensors
    of the layout ``torch.jagged``.
    """
    query_rows = rows
    if query.shape[2] < key.shape[2]:  # the first token of each row
        query_rows = Bounds(torch.arange(len(rows.begins), device=query.device), 1, 1)
    heads_per_key = query.shape[1] // key.shape[1]
    if heads_per_key > 1:  # grouped-query attention
        key = key.repeat_interleave(heads_per_key, 1)
        value = value.repeat_interleave(heads_per_key, 1)
    with sdpa_kernel(KERNELS):
        attended = scaled_dot_product_attention(
            _jagged(query, query_rows),
            _jagged(key, rows),
            _jagged(value, rows),
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scaling,
        )
    return attended.transpose(1, 2).values()[None]


def _jagged(states: Tensor, rows: Bounds) -> Tensor:
    """Return ``(1, heads, tokens, size)`` as a nested tensor.

    Its shape is ``(rows, heads, tokens of a row, size)``.
    """
    tokens = states[0].transpose(0, 1).contiguous()
    nested: Tensor = torch.nested.nested_tensor_from_jagged(
        tokens, rows.begins, min_seqlen=rows.shortest, max_seqlen=rows.longest
    )
    return nested.transpose(1, 2)
