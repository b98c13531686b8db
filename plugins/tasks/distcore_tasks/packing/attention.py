"""Attention over a sequence that is many rows, each row by itself: in groups of like length, or all at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from distcore_tasks.packing.groups import Bounds, Group, Groups

NAME = "distcore_rows"
"""What transformers calls this attention."""
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Those of torch that know rows of unlike length; the last, without ``is_causal``, is the one that a CPU has."""


def register() -> None:
    """Have transformers know the attention by ``NAME``; calls without rows of its own are those of ``sdpa``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: Groups | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return what ``sdpa`` of transformers does, ``(1, tokens, heads, size)`` for the rows of ``packed_rows``.

    ``query``, ``key`` and ``value`` are ``(1, heads, tokens, size)``; ``position_bias``, if there is one, is that of
    the longest row, ``(1, heads, longest, longest)``. A shorter ``query`` is of the first token of each row, and so is
    what is returned.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if packed_rows is None:
        found: tuple[Tensor, None] = sdpa(
            module, query, key, value, attention_mask, position_bias=position_bias, **options
        )
        return found
    causal = options.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    if packed_rows.bounds is not None:
        return _at_once(query, key, value, packed_rows.bounds, **options | {"is_causal": is_causal}), None
    # Cut once: the gradients of the cuts are joined, where those of slices would be padded with zeros and summed.
    sizes = [group.stop - group.start for group in packed_rows.groups]
    firsts = query.shape[2] < key.shape[2]
    asking = _cut(query, [group.rows for group in packed_rows.groups] if firsts else sizes)
    parts = []
    for group, q, k, v in zip(packed_rows.groups, asking, _cut(key, sizes), _cut(value, sizes), strict=True):
        q = q[:, None].transpose(1, 2) if firsts else _rows(q, group)
        k, v = _rows(k, group), _rows(v, group)
        bias = None if position_bias is None else position_bias[:, :, : group.longest, : group.longest]
        mask = None if is_causal else group.mask  # padding comes behind all that may look back
        made = sdpa(module, q, k, v, mask, position_bias=bias, **options)[0].flatten(0, 1)
        parts.append(made if firsts or group.real is None else made.index_select(0, group.real))
    return torch.cat(parts)[None], None


def _cut(states: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return ``(1, heads, tokens, size)`` as parts ``(sizes[i], heads, size)``."""
    return torch.split(states[0].transpose(0, 1), sizes)


def _rows(tokens: Tensor, group: Group) -> Tensor:
    """Return the rows of a group, ``(rows, heads, longest, size)``, from its tokens, ``(tokens, heads, size)``."""
    found = tokens if group.places is None else tokens.index_select(0, group.places)
    return found.reshape(group.rows, group.longest, *tokens.shape[1:]).transpose(1, 2)


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
    """Return what the rows see, ``(1, tokens, heads, size)``, from one kernel that knows where each begins.

    Source: https://docs.pytorch.org/docs/stable/nested.html, tensors of the layout ``torch.jagged``.
    """
    asking = rows
    if query.shape[2] < key.shape[2]:  # the first token of each row
        asking = Bounds(torch.arange(len(rows.begins), device=query.device), 1, 1)
    shared = query.shape[1] // key.shape[1]  # heads that have their keys and values in common
    key, value = (states.repeat_interleave(shared, 1) if shared > 1 else states for states in (key, value))
    jagged = (_jagged(query, asking), _jagged(key, rows), _jagged(value, rows))
    with sdpa_kernel(KERNELS):
        found = scaled_dot_product_attention(*jagged, dropout_p=dropout, is_causal=is_causal, scale=scaling)
    return found.transpose(1, 2).values()[None]


def _jagged(states: Tensor, rows: Bounds) -> Tensor:
    """Return ``(1, heads, tokens, size)`` as a nested tensor, ``(rows, heads, tokens of a row, size)``."""
    tokens = states[0].transpose(0, 1).contiguous()
    made: Tensor = torch.nested.nested_tensor_from_jagged(
        tokens, rows.begins, min_seqlen=rows.shortest, max_seqlen=rows.longest
    )
    return made.transpose(1, 2)
