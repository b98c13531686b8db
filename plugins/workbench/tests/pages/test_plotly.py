"""The library that draws the plots is the file that its makers published, with its license."""

from __future__ import annotations

import hashlib

from distcore_workbench.pages.plotly import SHA256, VERSION, asset, source


def test_the_file_is_that_of_the_version_and_checksum_named() -> None:
    assert hashlib.sha256(source().encode()).hexdigest() == SHA256
    assert f"plotly.js (basic - minified) v{VERSION}\n" in source()[:100]


def test_the_license_of_plotly_is_shipped_with_it() -> None:
    assert "MIT License" in asset("plotly-LICENSE")
    assert "Plotly" in asset("plotly-LICENSE")


def test_the_source_of_plotly_can_stand_inside_a_page() -> None:
    assert "</script" not in source().lower()
    assert "<!--" not in source()
