"""Text files that other programs read: strict JSON, and atomic writes."""

from __future__ import annotations

import json
import math
from pathlib import Path


def strict_json(value: object, indent: int | None = None) -> str:
    """Return ``value`` as JSON text, not escaped to ASCII; NaN and Infinity become null, because JSON has neither."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def write_atomically(file: Path, text: str) -> None:
    """Write ``text`` to ``file`` as UTF-8; another process sees the whole text or no new file.

    A temporary file in the same folder is renamed, which is atomic on one file system.
    """
    draft = file.with_name(f".{file.name}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
