"""Measure the laws and write the tables of the READMEs: python tools/law_tables.py [ddp fsdp …]

A table stands between ``<!-- laws -->`` and ``<!-- /laws -->``: a row a case, a column a set of options, in it the
measured error. What a strategy is exempt from is a dash, with the reason below the table.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from distcore.testing.cases import LAWS, Finding
from distcore.testing.runner import check

ROOT = Path(__file__).parents[1]
COLUMNS: dict[str, list[tuple[str, str, int, dict[str, Any]]]] = {
    "plugins/ddp": [("ddp", "ddp", 2, {}), ("static graph", "ddp", 2, {"static_graph": True}), ("dp", "dp", 1, {})],
    "plugins/fsdp": [
        ("full", "fsdp", 2, {}),
        ("grad", "fsdp", 2, {"sharding": "grad"}),
        ("hybrid, 4 ranks", "fsdp", 4, {"sharding": "hybrid", "shard_size": 2}),
    ],
    "plugins/deepspeed": [(f"stage {stage}", "deepspeed", 2, {"stage": stage}) for stage in range(4)],
    "plugins/horovod": [("2 ranks", "horovod", 2, {}), ("3 ranks", "horovod", 3, {})],
    "plugins/accelerate": [
        ("ddp", "accelerate", 2, {}),
        ("deepspeed, stage 2", "accelerate", 2, {"backend": "deepspeed", "zero_stage": 2}),
        ("deepspeed, stage 3", "accelerate", 2, {"backend": "deepspeed", "zero_stage": 3}),
    ],
    "examples/strategy-localsgd": [("every=1", "localsgd", 2, {}), ("every=4", "localsgd", 2, {"every": 4})],
}
BEGIN, END = "<!-- laws -->\n", "<!-- /laws -->"


def table(columns: dict[str, list[Finding]]) -> str:
    """Return the findings as Markdown; raises SystemExit if a law is broken."""
    first = next(iter(columns.values()))
    lines = [f"| law | case | bound | {' | '.join(columns)} |", "|---|---|---|" + "---|" * len(columns)]
    for row, finding in enumerate(first):
        cells = [_cell(found[row]) for found in columns.values()]
        bounds = {f"{found[row].bound:.0e}" for found in columns.values() if found[row].bound}
        law = f"{LAWS[finding.law]} {finding.law}"
        lines.append(f"| {law} | {finding.case} | {'/'.join(sorted(bounds)) or '0'} | {' | '.join(cells)} |")
    reasons = {(name, f.note): None for name, found in columns.items() for f in found if f.held is None}
    notes = [
        f"- {name}: {', '.join(f.case for f in columns[name] if f.held is None and f.note == note)}: {note}"
        for name, note in reasons
    ]
    return "\n".join([*lines, "", *(["Exempt, with the declared reason:", "", *notes] if notes else [])]) + "\n"


def _cell(finding: Finding) -> str:
    if finding.held is None:
        return "–"
    if not finding.held:
        raise SystemExit(str(finding))
    return "0" if not finding.error else f"{finding.error:.1e}"


def main(chosen: list[str]) -> None:
    for folder, settings in COLUMNS.items():
        if chosen and Path(folder).name not in chosen and Path(folder).name.removeprefix("strategy-") not in chosen:
            continue
        columns = {
            title: check(strategy, nproc, settings={f"strategy_options.{key}": value for key, value in options.items()})
            for title, strategy, nproc, options in settings
        }
        readme = ROOT / folder / "README.md"
        found = table(columns)
        before, rest = readme.read_text().split(BEGIN)
        readme.write_text(f"{before}{BEGIN}{found}{END}{rest.split(END)[1]}")
        print(f"{readme}\n{found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
