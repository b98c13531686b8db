"""Remove the first line of a command's output, which says that the command is starting."""

from __future__ import annotations

import re


def after_first_line(screen: str) -> str:
    return re.sub(r"\Adistcore [\w-]+: starting\n", "", screen)
