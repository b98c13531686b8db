"""Make a report: read the runs, and show them in the terminal or write the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distcore import ConfigError
from distcore.cli import stdout_console
from distcore_workbench.pages.file_name import check_page
from distcore_workbench.report.folders import folders_of
from distcore_workbench.report.live import follow
from distcore_workbench.report.report_content import content_of
from distcore_workbench.report.report_page import page
from distcore_workbench.report.terminal import show


def run(paths: Sequence[Path], html: Path | None, following: bool, everything: bool = False) -> int:
    """Show the runs in the terminal or, with ``html``, write a page of them there; return 0.

    Raises ConfigError.

    ``everything``: also wrong predictions, other curves, times and memory, in the terminal.
    ``following``: show their curves while they train, and the report when the last one has ended.
    """
    folders, console = folders_of(paths, "report"), stdout_console()
    check_page(html)
    if following:
        follow(folders, console)
    content = content_of(folders)
    if html is None:
        show(content, console, everything)
        return 0
    try:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page(content), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {html}: cannot be written: {error.strerror}") from None
    print(f"report: {html}", flush=True)
    return 0
