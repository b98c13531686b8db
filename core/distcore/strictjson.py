"""JSON that every reader takes: it has no NaN and no Infinity, so what is not a number is null."""

from __future__ import annotations

import json
import math


def strict_json(value: object, indent: int | None = None) -> str:
    """Return ``value`` as JSON text, letters as they are."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
