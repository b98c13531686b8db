"""Text files that others read: JSON that any parser takes, and writes that a reader sees whole or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path


def strict_json(value: object, indent: int | None = None) -> str:
    """Return ``value`` as JSON text, not escaped to ASCII; NaN and Infinity, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def write_whole(file: Path, text: str) -> None:
    """Write ``text`` to a draft beside ``file`` and rename it, so that another process reads all of it or nothing."""
    draft = file.with_name(f".{file.name}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
