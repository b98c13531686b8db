"""``distcore compare RUN RUN…``: runs that are there, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distcore.cli import print_cells, say, stdout_console
from distcore.files import strict_json
from distcore_workbench.compare.comparison import free_folder, write
from distcore_workbench.compare.comparison_table import FILE_WIDTH
from distcore_workbench.compare.trial_record import said_of
from distcore_workbench.pages.document import command_line
from distcore_workbench.report.curves import charts_of, lines_of
from distcore_workbench.report.folders import folders_of, read
from distcore_workbench.report.report_content import evaluation_data
from distcore_workbench.report.report_page import runs_page
from distcore_workbench.report.side_by_side import Facts, cells, facts_of, headings, markdown_table

TITLE = "Runs compared"
WHAT_TO_GIVE = "give run folders, or --strategies for a job to run"


def run(paths: Sequence[Path], out: str | None) -> int:
    """Print the table and, with ``out``, write it there as a page, Markdown and JSON; return 0.

    Raises ConfigError.
    """
    folder = free_folder(out) if out else None
    runs = [read(path) for path in folders_of(paths, "compare", WHAT_TO_GIVE)]
    facts = facts_of(runs, command_line())
    facts["notes"] += [line for path in paths for line in said_of(path)]
    show(facts)
    if folder is not None:
        charts = charts_of(
            [lines_of(run.folder, run.config) for run in runs],
            [evaluation_data(run) for run in runs],
        )
        table = markdown_table(headings(facts), cells(facts))
        listed = "".join(f"- {line}\n" for line in facts["notes"])
        texts = {
            "json": strict_json(facts, indent=1),
            "md": f"# {TITLE}\n\n`{facts['command']}`\n\n{table}\n\n{listed}",
            "html": runs_page(TITLE, facts, charts, facts["notes"]),
        }
        write(texts, folder)
        print(f"compared: {folder}/compare.html, compare.md, compare.json", flush=True)
    return 0


def show(facts: Facts) -> None:
    """Print the table, its columns folded on a narrow screen, and the notes below it."""
    console = stdout_console(FILE_WIDTH)
    print_cells(console, headings(facts), cells(facts), numbers=True)
    for line in facts["notes"]:
        say(console, line)
