"""Read the figures that a page passes to its plotting library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def drawn_in(page: Path) -> dict[str, Any]:
    """The figures of a page, and their axes."""
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert data
    parsed: dict[str, Any] = json.loads(data[1])
    return parsed
