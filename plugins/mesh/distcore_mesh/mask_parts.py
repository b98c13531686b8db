"""The part of each row that a rank computes, for dropout masks by row: together the ranks have the
mask of one process.

Masks of attention have four dimensions, heads second; others have the features last, and
the tokens before them.
"""

from __future__ import annotations

from distcore.model import current_masks

Part = tuple[int, int]
"""Number of a rank in its group, and the size of the group."""
WHOLE: Part = (0, 1)


def split_features(part: Part) -> None:
    """Say that this rank computes a part of the heads and of the features from now on."""
    _tell({(4, 1): part, (3, 2): part, (2, 1): part})


def split_heads(part: Part) -> None:
    """Say that this rank computes a part of the heads from now on."""
    _tell({(4, 1): part})


def split_tokens(part: Part) -> None:
    """Say that this rank computes a part of the tokens from now on."""
    _tell({(3, 1): part})


def _tell(parts: dict[tuple[int, int], Part]) -> None:
    if masks := current_masks():
        masks.set_parts(parts)
