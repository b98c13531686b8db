"""Bytes as users write and read them."""

from __future__ import annotations

import re

from distcore import ConfigError

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Return the bytes that ``80G``, ``512MiB`` or ``1.5 GB`` means; raises ConfigError, one line.

    Every unit is a power of 1,024.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(f"--device-memory {text}: expected a size such as 80G or 512M")
    number, unit = match.groups()
    return int(float(number) * UNITS[unit.upper()])


def format_size(size: int) -> str:
    """Return a size to three digits, such as ``1.25 GiB``; ``0`` for none."""
    if not size:
        return "0"
    if size < 1024:
        return f"{size} B"
    # In increasing order: the largest unit that fits is the last.
    letter = [letter for letter, unit in UNITS.items() if size >= unit][-1]
    value = size / UNITS[letter]
    if value < 10:
        return f"{value:.2f} {letter}iB"
    if value < 100:
        return f"{value:.1f} {letter}iB"
    return f"{value:.0f} {letter}iB"
