"""Attention within each row of a joined sequence: in groups of rows of like length,
or in one call.
"""

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
"""An attention function of transformers. It gets a module, queries, keys,
values, a mask and options.
"""


def register(before: str, compiled: bool) -> str:
    """Register the attention with transformers for models with the attention ``before``,
    and return its name.

    ``compiled``: layers are compiled. Their code then ends before attention and goes on after it,
    because the sizes of groups change with each batch.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    name, function, mask = (
        (OWN, attend_own, eager_mask) if before == "eager" else (SDPA, attend, sdpa_mask)
    )
    AttentionInterface.register(name, torch.compiler.disable(function) if compiled else function)  # type: ignore[no-untyped-call]
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
    """Compute attention within each row of ``token_sequence``; without
    one, as ``sdpa`` of transformers.

    ``query``, ``key`` and ``value`` are ``(1, heads, tokens, size)``; the result is ``(1, tokens,
    heads, size)``. The option ``position_bias`` belongs to the longest row, ``(1, heads, longest,
    longest)``. Between a decoder and its encoder it is not read, and ``key`` has the encoder's
    tokens. Else a ``query`` shorter than ``key`` has the first token of each row only, and so has
    the result.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if token_sequence is None:
        return sdpa(module, query, key, value, attention_mask, **options)[0], None
    causal = _is_causal(module, options)
    if token_sequence.bounds is not None:
        return (
            _at_once(query, key, value, token_sequence.bounds, **options | {"is_causal": causal}),
            None,
        )
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
    """Compute the same by the eager attention of the module's own model, such as with
    capped scores or sinks.
    """
    own = next(
        vars(sys.modules[kind.__module__])["eager_attention_forward"]
        for kind in type(module).__mro__
        if "eager_attention_forward" in vars(sys.modules[kind.__module__])
    )
    if token_sequence is None:
        return own(module, query, key, value, attention_mask, **options)[0], None

    def compute(
        module: nn.Module, query: Tensor, *states: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        *keys, seen = states
        if seen is None and _is_causal(module, options):
            seen = _window(query.shape[2], None, query.device)
        added = (
            None
            if seen is None
            else torch.where(seen, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
        )
        done: tuple[Tensor, Any] = own(module, query, *keys, added, **options)
        return done

    return _in_groups(compute, module, query, key, value, token_sequence, options), None


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


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
    causal, window, bias = (
        _is_causal(module, options),
        options.get("sliding_window"),
        options.get("position_bias"),
    )
    # One split, because autograd joins its gradients. It would pad those of separate slices with
    # zeros, and sum them.
    repeated = key.shape[2] - sequence.real
    sizes = [*(group.stop - group.start for group in sequence.groups), repeated]
    firsts = query.shape[2] < key.shape[2]
    asking = _cut(query, [*(group.rows for group in sequence.groups), 0] if firsts else sizes)
    parts = []
    masks = current_masks() if module.training and options.get("dropout") else None
    with masks.one_call() if masks else nullcontext():
        # The repeated tokens are the last part, which no group takes.
        for group, q, k, v in zip(
            sequence.groups, asking, _cut(key, sizes), _cut(value, sizes), strict=False
        ):
            q = q[:, None].transpose(1, 2) if firsts else _rows(q, group)
            k, v = _rows(k, group), _rows(v, group)
            if bias is not None:
                options = options | {"position_bias": bias[:, :, : group.longest, : group.longest]}
            mask = group.mask
            if causal:  # padding is at the end, where no real token attends to it
                mask = (
                    _window(group.longest, window, q.device)
                    if window and window < group.longest
                    else None
                )
            with masks.some_rows(group.numbers) if masks else nullcontext():
                made = compute(module, q, k, v, mask, **options)[0].flatten(0, 1)
            parts.append(made if firsts or group.real is None else made.index_select(0, group.real))
    if repeated and not firsts:
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
    """Compute the attention of a decoder's tokens to its encoder's, and return
    ``(1, tokens, heads, size)``.
    """
    groups, options = crossing.groups, options | {"position_bias": None}
    tokens = [*(group.stop - group.start for group in groups), key.shape[2] - groups[-1].stop]
    places = [group.rows * longest for group, longest in zip(groups, crossing.longest, strict=True)]
    asking = torch.split(query[0].transpose(0, 1).index_select(0, crossing.places), places)
    parts = []
    masks = current_masks() if module.training and options.get("dropout") else None
    with masks.one_call() if masks else nullcontext():
        for group, q, k, v in zip(
            groups, asking, _cut(key, tokens), _cut(value, tokens), strict=False
        ):
            q = q.view(group.rows, -1, *q.shape[1:]).transpose(1, 2)
            with masks.some_rows(group.numbers) if masks else nullcontext():
                made = compute(module, q, _rows(k, group), _rows(v, group), group.mask, **options)[
                    0
                ]
            parts.append(made.flatten(0, 1))
    return torch.cat(parts).index_select(0, crossing.back)[None]


def _window(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Return which of a row's ``tokens`` each sees, bool ``(1, 1, tokens, tokens)``: the last
    ``window`` up to it.
    """
    at = torch.arange(tokens, device=device)
    back = at[:, None] - at
    return ((back >= 0) & (back < (window or tokens)))[None, None]


def _cut(states: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Split ``(1, heads, tokens, size)`` into parts ``(sizes[i], heads, size)``."""
    return torch.split(states[0].transpose(0, 1), sizes)


def _rows(tokens: Tensor, group: Group) -> Tensor:
    """Return the rows of a group, ``(rows, heads, longest, size)``, from its
    tokens, ``(tokens, heads, size)``.
    """
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
    """Compute attention of all rows, ``(1, tokens, heads, size)``, in one kernel call
    with the rows' bounds.

    See https://docs.pytorch.org/docs/stable/nested.html, tensors of the layout ``torch.jagged``.
    """
    asking = rows
    if query.shape[2] < key.shape[2]:  # the first token of each row
        asking = Bounds(torch.arange(len(rows.begins), device=query.device), 1, 1)
    shared = query.shape[1] // key.shape[1]  # heads that share keys and values
    key, value = (
        states.repeat_interleave(shared, 1) if shared > 1 else states for states in (key, value)
    )
    jagged = (_jagged(query, asking), _jagged(key, rows), _jagged(value, rows))
    with sdpa_kernel(KERNELS):
        attended = scaled_dot_product_attention(
            *jagged, dropout_p=dropout, is_causal=is_causal, scale=scaling
        )
    return attended.transpose(1, 2).values()[None]


def _jagged(states: Tensor, rows: Bounds) -> Tensor:
    """Return ``(1, heads, tokens, size)`` as a nested tensor, ``(rows, heads,
    tokens of a row, size)``.
    """
    tokens = states[0].transpose(0, 1).contiguous()
    made: Tensor = torch.nested.nested_tensor_from_jagged(
        tokens, rows.begins, min_seqlen=rows.shortest, max_seqlen=rows.longest
    )
    return made.transpose(1, 2)
