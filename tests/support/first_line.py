"""What a command prints, without the line by which it says that it is at work."""

from __future__ import annotations

import re


def after_first_line(screen: str) -> str:
    return re.sub(r"\Adistcore [\w-]+: (starting|loading PyTorch)\n", "", screen)
