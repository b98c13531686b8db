"""The name of a page that a user asks for."""

from __future__ import annotations

from pathlib import Path

from distcore import ConfigError


def check_page(html: Path | None) -> None:
    """Raise ConfigError, one line, for a folder, and for a name that is not of a page: it may
    be of a user's data.
    """
    if html is not None and html.is_dir():
        raise ConfigError(
            f"--html {html}: is a folder, expected a file to write, such as {html}/report.html"
        )
    if html is not None and html.suffix not in (".html", ".htm"):
        raise ConfigError(
            f"--html {html}: expected the name of a page to write, such as"
            f" {html.with_suffix('.html')}"
        )
