"""How Sphinx builds the site: ``make docs``. The source folder is the repository, so that a link
between two pages is the same relative path here, on the site and in a checkout, wherever the pages
stand.
"""

from __future__ import annotations

import sys
from pathlib import Path

import distcore

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "distcore"
author = copyright = "the distcore authors"
version = release = distcore.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "contents",
    "generated_reference",
    "front_page",
    "whole_numbers",
    "whole_flags",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "plugins/*/README.md",
    "examples/*/README.md",
    "README.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
# folders that need not be searched
exclude_patterns = [".*", "build", "dist", "runs", "core", "tests"]

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True

nitpicky = True
nitpick_ignore_regex = [
    # Other people's names: their documentation is not at hand where the site is built
    # without a network.
    (
        r"py:.*",
        r"(torch|nn|np|numpy|dist|pathlib|datetime|collections|contextlib|typing|pydantic|pluggy|enum|argparse|importlib|rich|pytest|_pytest)(\..+)?",
    ),
    (
        r"py:.*",
        r"Tensor|Optimizer|LRScheduler|Path|Any|Literal|ClassVar|Store",
    ),
    # the variables of generic functions
    (r"py:.*", r"(distcore\.(launchers|engine\.tracing)\.)?T"),
    # in signatures alone
    (r"py:.*", r"Outputs|Losses|Answer|RankGroup|distcore\.plugin\.task\.outputs\.Collected"),
    # as are these
    (r"py:.*", r"distcore\.plugin\.options\.Option|distcore\.testing\.subject\.Subject"),
    (r"py:.*", r"distcore_data\.formats\.(columns\.RowError|blocks\.Block)|io\.BufferedReader"),
    (
        r"py:.*",
        r"distcore_tasks\.rows\.(pipeline\.(V|PreparedRows|NamedValues)|table\.CachedTable)",
    ),
    (
        r"py:.*",
        r"distcore_tasks\.(rows\.label_kind\.LabelKind|shared\.(jagged\.Spans|source_rows\.Rows))",
    ),
    (r"py:.*", r"AbstractContextManager|Callable|Iterator|Iterable|Mapping|Sequence"),
]

html_theme = "furo"
html_title = f"distcore {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
