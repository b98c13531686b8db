"""Padding-free computation and packing of rows into sequences are two things, each
known to few modules.
"""

from __future__ import annotations

import re
from pathlib import Path

from distcore_tasks.padding_free.supported_models import DECODERS, ENCODERS, RELATIVE

ROOT = Path(__file__).parents[2]
CORE = {
    "config/schema.py",  # the key
    "config/keys.py",  # its earlier name, and what resets it
    "cli/flags.py",  # the flag
    "plugin/task/spec.py",  # the methods of a task
    "plugin/task/bound.py",  # the same, as the core calls them
    "resolve/row_form.py",  # chosen from the lengths of the rows
    "engine/row_form.py",  # proved before the first step
    "plugin/report.py",  # the outcome, in the report
}
PACKAGE = "distcore_tasks/padding_free/"
INHERIT = {
    f"distcore_tasks/{task}/options.py"
    for task in ("embedding", "masked_lm", "seq2seq", "text_classification", "token_classification")
}
PADS_FOR_A_LOSS = "distcore_tasks/distillation/options.py"
"""Its loss may read hidden states, which are there for padded rows alone."""
TABLE = "distcore_migrate/trl.py"
"""The table that says what an argument of this name of another trainer becomes."""
PACKING = "distcore_tasks/causal_lm/sequence_packing.py"


def knowing(folder: Path, words: str) -> set[str]:
    files = (file for file in folder.rglob("*.py") if "tests" not in file.relative_to(ROOT).parts)
    return {
        str(file.relative_to(folder))
        for file in files
        if re.search(words, file.read_text(), re.IGNORECASE)
    }


def of_plugins(words: str) -> set[str]:
    plugins = (folder for folder in (ROOT / "plugins").iterdir() if folder.is_dir())
    return {name for folder in plugins for name in knowing(folder, words)}


def test_padding_free_computation_is_known_to_eight_modules_of_the_core() -> None:
    assert knowing(ROOT / "core/distcore", r"padding[ _-]?free") == CORE


def test_a_task_names_it_once_where_it_inherits() -> None:
    others = {name for name in of_plugins(r"padding[ _-]?free") if not name.startswith(PACKAGE)}
    assert others == INHERIT | {PACKING, TABLE, PADS_FOR_A_LOSS}
    for name in INHERIT:
        text = (ROOT / "plugins/tasks" / name).read_text()
        assert len(re.findall(r"^(?:from|class) .*PaddingFreeOptions.*$", text, re.M)) == 2
        # module and class, and the class again
        assert len(re.findall(r"padding[ _-]?free", text, re.IGNORECASE)) == 3


def test_the_page_on_data_lists_the_model_types() -> None:
    _, _, section = (ROOT / "docs/data.md").read_text().partition("## Padding-free computation")
    listed = re.findall(r"`([\w-]+)`", section.partition("- `auto`")[0])
    assert listed == [*ENCODERS, *RELATIVE, *RELATIVE, *DECODERS]


def test_packing_is_known_to_the_language_model_alone() -> None:
    words = r"\bpack(?:s|ed|ing)?\b|_pack|Pack(?:ed|ing)"
    named = {"distcore_tasks/causal_lm/options.py", "distcore_tasks/causal_lm/prepare.py"}
    assert knowing(ROOT / "plugins/tasks", words) == named | {PACKING}
    # earlier names
    assert knowing(ROOT / "core/distcore", r"\bpacking\b") == {"config/keys.py", "cli/flags.py"}
