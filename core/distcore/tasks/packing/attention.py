"""Attention over a sequence that is many rows: in groups of rows of like length, each row by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distcore.tasks.packing.groups import Group, Groups

NAME = "distcore_rows"
"""What transformers calls this attention."""


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
