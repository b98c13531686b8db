"""The part of each row that a rank computes, for dropout masks by row.

Together the ranks have the mask of one process. Masks of attention have four dimensions, heads
second; others have the features last, and the tokens before them.
"""

from __future__ import annotations

from distcore.model import current_masks

Part = tuple[int, int]
"""Number of a rank in its group, and the size of the group."""
WHOLE: Part = (0, 1)


def split_features(part: Part) -> None:
    """Make masks of a part of the heads and of the features from now on."""
    _set_parts({(4, 1): part, (3, 2): part, (2, 1): part})


def split_heads(part: Part) -> None:
    """Make masks of a part of the heads from now on."""
    _set_parts({(4, 1): part})


def split_tokens(part: Part) -> None:
    """Make masks of a part of the tokens from now on."""
    _set_parts({(3, 1): part})


def _set_parts(parts: dict[tuple[int, int], Part]) -> None:
    """Set the parts of masks, if masks are by row; keys: a mask's dimensions, and the split one."""
    masks = current_masks()
    if masks:
        masks.set_parts(parts)
