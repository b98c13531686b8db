"""Bytes as users write and read them."""

from __future__ import annotations

import re

from distcore import ConfigError

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Return the bytes that ``80G``, ``512MiB`` or ``1.5 GB`` means; every unit is
    a power of 1,024.

    Raises ConfigError, one line.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(f"--device-memory {text}: expected a size such as 80G or 512M")
    return int(float(match[1]) * UNITS[match[2].upper()])


def format_size(size: int) -> str:
    """Return a size to three digits, such as ``1.25 GiB``; ``0`` for none."""
    if size < 1024:
        return str(size) if not size else f"{size} B"
    name, unit = next((name, unit) for name, unit in reversed(UNITS.items()) if size >= unit)
    value = size / unit
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {name}iB"
