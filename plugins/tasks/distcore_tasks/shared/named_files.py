"""Names of data files are looked at before anything that takes seconds is imported."""

from __future__ import annotations

import re
from pathlib import Path

from distcore.registry import offers

SEVERAL = re.compile(r"[,*?\[\]@:]")
"""What stands in patterns, lists of files, URLs, and names of splits."""


def check_file(source: str) -> None:
    """Raise DataError if a source can only be a file, and is not there."""
    is_one_name = not SEVERAL.search(source)
    is_file = Path(source).suffix.removeprefix(".") in offers("readers")
    if is_one_name and is_file and not Path(source).exists():
        from distcore_data import check_source

        check_source(Path(source))
