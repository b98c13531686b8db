"""Whole numbers, rounded in another way than ``//`` does."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up; exact for integers of any size, unlike ``math.ceil``."""
    return -(-dividend // divisor)
