"""The page on data lists the models whose rows are computed without padding."""

from __future__ import annotations

import re
from pathlib import Path

from distcore_tasks.padding_free.supported_models import DECODERS, ENCODERS, RELATIVE

PAGE = Path(__file__).parents[2] / "docs/data.md"


def test_the_page_lists_the_model_types() -> None:
    _, _, section = PAGE.read_text().partition("## Padding-free computation")
    listed = re.findall(r"`([\w-]+)`", section.partition("- `auto`")[0])
    assert listed == [*ENCODERS, *RELATIVE, *RELATIVE, *DECODERS]
