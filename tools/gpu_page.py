"""Print what `make gpu` measured, as a table; with --page also into docs/devices.md, and
the rows into docs/gpu.json.

    python tools/gpu_page.py [--page]

Of a test that ran several times the last rows count.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD, ROWS, PAGE = ROOT / "build/gpu/rows.jsonl", ROOT / "docs/gpu.json", ROOT / "docs/devices.md"
BEGIN, END = "<!-- measured: tools/gpu_page.py --page -->\n", "<!-- end of measured -->\n"


def main() -> int:
    """Print the table; return 1 if a row is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", action="store_true")
    page = parser.parse_args().page
    if not RECORD.exists():
        print("not measured here: torch sees no accelerator")
        return 0
    rows = latest(RECORD)
    print(table(rows))
    for row in rows:
        if row["why"]:
            print(f"\n{row['test']}: {row['why']}", file=sys.stderr)
    if page:
        ROWS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        PAGE.write_text(before + BEGIN + "\n" + table(rows) + "\n" + END + after, encoding="utf-8")
    return int(any(row["state"] in ("BROKEN", "failed") for row in rows))


def latest(record: Path) -> list[dict[str, str]]:
    """Return the rows of the last run of each test, in the order in which tests first ran."""
    by_test: dict[str, dict[str, dict[str, str]]] = {}
    for line in map(json.loads, record.read_text(encoding="utf-8").splitlines()):
        rows = by_test.setdefault(line["test"], {})
        if any(
            old["machine"] != line["machine"] or old["state"] != line["state"]
            for old in rows.values()
        ):
            rows.clear()
        rows[line["what"]] = line
    return [row for rows in by_test.values() for row in rows.values()]


def table(rows: list[dict[str, str]]) -> str:
    """Return a table for each machine; what was skipped is left out, and what did
    not hold is bold.
    """
    text = []
    for machine in dict.fromkeys(row["machine"] for row in rows):
        text.append(f"On {machine}:\n\n| what | measured | bound |\n|---|---|---|")
        shown = [
            row
            for row in rows
            if row["machine"] == machine and row["state"] in ("held", "BROKEN", "failed")
        ]
        by_test: dict[tuple[str, ...], list[dict[str, str]]] = {}
        for row in shown:
            by_test.setdefault(
                (row["test"].partition("[")[0], row["bound"], row["state"]), []
            ).append(row)
        text += [f"| {' | '.join(cells)} |" for same in by_test.values() for cells in lines(same)]
        text.append("")
    return "\n".join(text)


def lines(same: list[dict[str, str]]) -> list[tuple[str, ...]]:
    """Return one line for rows that measure the same, with the largest number; several if
    no number tells them.
    """
    try:
        largest = max(same, key=lambda row: float(row["measured"]))
    except ValueError:
        largest = None
    if largest is None or len(same) == 1:
        return [(row["what"], _measured(row), row["bound"]) for row in same]
    return [
        (
            f"{largest['what'].rpartition(': ')[2]}: {len(same)} runs",
            _measured(largest),
            largest["bound"],
        )
    ]


def _measured(row: dict[str, str]) -> str:
    return row["measured"] if row["state"] == "held" else f"**{row['measured'] or row['state']}**"


if __name__ == "__main__":
    sys.exit(main())
