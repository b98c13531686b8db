"""plotly.js, the library that draws the plots of a page: its file is shipped as
its makers publish it.
"""

from __future__ import annotations

from importlib.resources import files

PACKAGE = "plotly.js-basic-dist-min"
"""The npm package of the file: scatter plots and bars."""
VERSION = "4.1.1"
SHA256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
"""Checksum of ``plotly-basic.min.js``; its license is in ``plotly-LICENSE``."""


def source() -> str:
    """Return the library's JavaScript, which begins with its version and license."""
    return asset("plotly-basic.min.js")


def asset(name: str) -> str:
    """Return the text of a file that is shipped beside the pages."""
    return files("distcore_workbench.pages").joinpath("assets", name).read_text(encoding="utf-8")
