"""Measure the laws and write their tables: python tools/law_tables.py [--tables-only]
[ddp fsdp … tasks]

What is measured goes into docs/laws.json, case by case; without names everything is measured, and
the date, the versions and the minutes are noted; with ``--tables-only`` nothing is. What stands
between ``<!-- laws -->`` and ``<!-- /laws -->`` is made from that file: docs/laws.md has the
largest error per law and bound, which settings refuse which modules of a user's own, and a
sentence about tasks. The README of a plugin names the measured settings; that of an example has a
row per setting.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

import laws_of_tasks

from distcore.testing import STRATEGIES
from distcore.testing.findings import LAWS, Finding

ROOT = Path(__file__).parents[1]
NUMBERS = ROOT / "docs/laws.json"
SETTINGS: dict[str, list[tuple[str, str, int, dict[str, Any]]]] = {
    "plugins/ddp": [
        ("ddp", "ddp", 2, {}),
        ("static graph", "ddp", 2, {"static_graph": True}),
        ("find_unused", "ddp", 2, {"find_unused": True}),
        ("dp", "dp", 1, {}),
    ],
    "plugins/fsdp": [("full", "fsdp", 2, {}), ("grad", "fsdp", 2, {"sharding": "grad"})],
    "plugins/mesh": [
        ("tp=2", "mesh", 2, {"tp": 2}),
        ("shard=2", "mesh", 2, {"shard": 2}),
        ("tp=2, shard=2", "mesh", 4, {"tp": 2, "shard": 2}),
        ("pp=2", "mesh", 2, {"pp": 2}),
        ("pp=2, interleaved", "mesh", 2, {"pp": 2, "pp_schedule": "interleaved"}),
        ("pp=2, shard=2", "mesh", 4, {"pp": 2, "shard": 2}),
        ("pp=2, tp=2", "mesh", 4, {"pp": 2, "tp": 2}),
        ("ep=2", "mesh", 2, {"ep": 2}),
    ],
    "plugins/deepspeed": [
        (f"stage {stage}", "deepspeed", 2, {"stage": stage}) for stage in range(4)
    ],
    "plugins/horovod": [
        ("2 ranks", "horovod", 2, {}),
        ("3 ranks", "horovod", 3, {}),
        ("find_unused", "horovod", 2, {"find_unused": True}),
    ],
    "plugins/accelerate": [
        ("ddp", "accelerate", 2, {}),
        ("deepspeed, stage 2", "accelerate", 2, {"backend": "deepspeed", "zero_stage": 2}),
        ("deepspeed, stage 3", "accelerate", 2, {"backend": "deepspeed", "zero_stage": 3}),
    ],
    "examples/strategy-localsgd": [
        ("every=1", "localsgd", 2, {}),
        ("every=4", "localsgd", 2, {"every": 4}),
    ],
}
"""Title, strategy, ranks and options of each setting, by the folder of the README that shows it."""
ERRORS = "../../docs/laws.md#what-was-measured"
"""Where every README leads to."""
VERSIONED = ("torch", "deepspeed", "horovod", "accelerate", "transformers")
"""What decides the results beside distcore."""
PLACES = re.compile(r"; (raised at|details in|traceback in) .*")
"""The end of an error's line, which says where more of it is."""
MARKS = re.compile(r"(<!-- laws -->\n).*?(<!-- /laws -->)", re.S)

Setting = dict[str, Any]
"""title, strategy, ranks, options, and ``errors``: by case the measured error, or the
reason of an exemption.
"""


def measure(
    title: str,
    strategy: str,
    ranks: int,
    options: dict[str, Any],
    cases: dict[str, Any],
    known_errors: dict[str, Any],
) -> Setting:
    """Measure the cases of one setting that ``known_errors`` lacks, and note law and bound of each
    in ``cases``.

    Raises SystemExit if a law is broken.
    """
    missing = [name for name in STRATEGIES.cases if name not in known_errors]
    print(f"measure {strategy} {options} on {ranks} rank(s): {len(missing)} cases", flush=True)
    findings: list[Finding] = []
    if missing:
        subject = STRATEGIES.subject(strategy, ranks, options, only=missing)
        (findings,) = STRATEGIES.measure_all([subject])
    if broken := [str(finding) for finding in findings if finding.held is False]:
        raise SystemExit("\n".join(broken))
    for finding in findings:
        known = cases.setdefault(finding.case, {"law": finding.law})
        if finding.bound is not None:  # else no setting that was measured so far keeps the case
            known["bound"] = max(known.get("bound", 0.0), _short(finding.bound))
    errors = known_errors | {
        finding.case: _reason(finding.note) if finding.error is None else _short(finding.error)
        for finding in findings
    }
    return {
        "title": title,
        "strategy": strategy,
        "ranks": ranks,
        "options": options,
        "errors": {name: errors[name] for name in STRATEGIES.cases},
    }


def _reason(note: str) -> str:
    """Return why a case has no error, without places in code and on the disk that measured it."""
    return PLACES.sub("", note)


def _short(number: float) -> float:
    """Two digits, as the tables show them."""
    return float(f"{number:.1e}")


def table(cases: dict[str, Any], settings: list[Setting]) -> str:
    """A row per law and bound with the largest error over all settings; one row has all cases
    that allow no error.
    """
    folded = _folded(cases)
    exact = [name for (_, bound), names in folded.items() if not bound for name in names]
    rows = [
        (f"{LAWS[law]} {law}", _bound(names, bound), names)
        for (law, bound), names in folded.items()
        if bound
    ]
    rows.append((f"all, {len(exact)} cases", "exact", exact))
    lines = ["| law | bound | largest error |", "|---|---|---|"]
    for law, bound, names in rows:
        lines.append(
            f"| {law} | {bound} |"
            f" {_cell([it['errors'][name] for it in settings for name in names])} |"
        )
    return "\n".join(lines) + "\n"


def table_of_settings(cases: dict[str, Any], settings: list[Setting]) -> str:
    """A row per setting, a column per law and bound; a column in which no error is
    above 0 is left out.
    """
    errors = {name: [setting["errors"][name] for setting in settings] for name in cases}
    columns = {
        heading: names
        for heading, names in _folded(cases).items()
        if any(error and not isinstance(error, str) for name in names for error in errors[name])
    }
    headings = [f"{law}, {_bound(names, bound)}" for (law, bound), names in columns.items()]
    lines = [f"| setting | {' | '.join(headings)} |", "|---|" + "---|" * len(headings)]
    for setting in settings:
        cells = [_cell([setting["errors"][name] for name in names]) for names in columns.values()]
        lines.append(f"| {setting['title']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table_of_own_modules(settings: list[Setting]) -> str:
    """A row per case of modules of a user's own, with the settings under which it does not train:
    the run is refused, or ends.
    """
    lines = ["| modules of a user's own | not trained, but refused, under |", "|---|---|"]
    for case in STRATEGIES.own_modules:
        refusing = [setting for setting in settings if isinstance(setting["errors"][case], str)]
        lines.append(f"| `{case}` | {_names_of(refusing, settings)} |")
    return "\n".join(lines) + "\n"


def _names_of(some: list[Setting], settings: list[Setting]) -> str:
    """Name settings by their strategies; by titles, too, where a strategy has others."""
    if not some or len(some) == len(settings):
        return "all" if some else "none"
    every = _of_strategies(settings)
    names = []
    for strategy, of_strategy in _of_strategies(some).items():
        titles = "; ".join(setting["title"] for setting in of_strategy)
        is_whole = len(of_strategy) == len(every[strategy])
        names.append(f"`{strategy}`" if is_whole else f"`{strategy}` ({titles})")
    return ", ".join(names)


def _folded(cases: dict[str, Any]) -> dict[tuple[str, float], list[str]]:
    """The names of the cases by law and bound, laws in order, exact ones first."""
    folded: dict[tuple[str, float], list[str]] = {}
    for name, case in cases.items():
        if "bound" in case:
            folded.setdefault((case["law"], case["bound"]), []).append(name)
    return dict(sorted(folded.items(), key=lambda item: (LAWS[item[0][0]], item[0][1])))


def _bound(names: list[str], bound: float) -> str:
    if names == ["failing-rank-ends-job"]:
        return f"{bound:g} s"
    return f"{bound:.0e}" if bound else "exact"


def _cell(results: list[float | str]) -> str:
    errors = [error for error in results if not isinstance(error, str)]
    if not errors:
        return "exempt"
    return f"{max(errors):.1e}" if max(errors) else "0"


def _exempt(cases: dict[str, Any], columns: dict[str, list[Setting]]) -> Iterator[str]:
    """One line per column and reason; the cases of a law that is exempt as a whole by the law."""
    for column, settings in columns.items():
        reasons: dict[str, dict[str, list[str]]] = {}
        for setting in settings:
            for name, reason in setting["errors"].items():
                if isinstance(reason, str):
                    reasons.setdefault(reason, {}).setdefault(setting["title"], []).append(name)
        for reason, exempt in reasons.items():
            others = [setting["title"] for setting in settings if setting["title"] not in exempt]
            named = f"all but {others[0]}" if len(others) == 1 < len(exempt) else "; ".join(exempt)
            where = f" ({named})" if others else ""
            names = list(
                dict.fromkeys(name for by_setting in exempt.values() for name in by_setting)
            )
            yield f"- {column}{where}: {', '.join(_listed(names, cases))}: {reason}"


def _listed(names: list[str], cases: dict[str, Any]) -> Iterator[str]:
    for law in LAWS:
        of_law = [name for name, case in cases.items() if case["law"] == law]
        gone = [name for name in of_law if name in names]
        yield from [f"law {LAWS[law]}"] if gone == of_law else gone


def by_setting(numbers: dict[str, Any], folder: str) -> str:
    """The cells of a plugin's README: measured settings; of an example's: errors, and
    exempt cases with reasons.
    """
    cases, settings = numbers["cases"], numbers["settings"][folder]
    if folder.startswith("plugins/"):
        titles = "; ".join(setting["title"] for setting in settings)
        return f"Measured settings: {titles} ([errors and exempt cases]({ERRORS})).\n"
    return "\n".join(
        [
            f"The largest error by law and bound. [Cases]({ERRORS}) without a column are exact.",
            "",
            table_of_settings(cases, settings),
            "Exempt cases, with reasons:",
            "",
            *_exempt(cases, _of_strategies(settings)),
            "",
        ]
    )


def of_all(numbers: dict[str, Any]) -> str:
    """The tables of docs/laws.md."""
    settings = [
        setting
        for folder, some in numbers["settings"].items()
        if folder.startswith("plugins/")
        for setting in some
    ]
    strategies = ", ".join(f"`{name}`" for name in _of_strategies(settings))
    return "\n".join(
        [
            f"{strategies}, over {len(settings)} settings:\n",
            table(numbers["cases"], settings),
            table_of_own_modules(settings),
            laws_of_tasks.sentence(numbers["tasks"]),
            *([f"{numbers['measured']}\n"] if "measured" in numbers else []),
        ]
    )


def _of_strategies(settings: list[Setting]) -> dict[str, list[Setting]]:
    columns: dict[str, list[Setting]] = {}
    for setting in settings:
        columns.setdefault(setting["strategy"], []).append(setting)
    return columns


def pages(numbers: dict[str, Any]) -> dict[Path, str]:
    """Every page with a table of the laws, with the table that it should show."""
    tables = {
        ROOT / folder / "README.md": by_setting(numbers, folder) for folder in numbers["settings"]
    }
    return tables | {ROOT / "docs/laws.md": of_all(numbers)}


def with_table(text: str, filled: str) -> str:
    """The page ``text`` with ``filled`` between its marks."""
    return MARKS.sub(lambda marks: f"{marks[1]}{filled}{marks[2]}", text)


def select_folders(names: Collection[str]) -> list[str]:
    """The folders that are meant by the last part of their names; all where nothing is said."""
    wanted = set(names)
    return [
        folder
        for folder in SETTINGS
        if not wanted or folder.rpartition("/")[2].removeprefix("strategy-") in wanted
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="folders to measure; default: all")
    parser.add_argument(
        "--tables-only", action="store_true", help="measure nothing, write the tables again"
    )
    parser.add_argument(
        "--new",
        action="store_true",
        help="measure the cases and settings that have no numbers yet, and keep the others",
    )
    arguments = parser.parse_args()
    numbers: dict[str, Any] = json.loads(NUMBERS.read_text())
    settings, began = numbers["settings"], monotonic()
    for folder in [] if arguments.tables_only else select_folders(arguments.names):
        known = {it["title"]: it["errors"] for it in settings.get(folder, []) if arguments.new}
        settings[folder] = [
            measure(*setting, numbers["cases"], known.get(setting[0], {}))
            for setting in SETTINGS[folder]
        ]
        numbers["settings"] = {name: settings[name] for name in SETTINGS if name in settings}
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
    measures_all = not (arguments.tables_only or arguments.new or arguments.names)
    if measures_all or "tasks" in arguments.names:
        numbers["tasks"] = laws_of_tasks.measure()
    if measures_all:
        versions = ", ".join(f"{name} {version(name)}" for name in VERSIONED)
        numbers["measured"] = (
            f"Measured on {date.today()} in {(monotonic() - began) / 60:.0f} minutes: {versions}."
        )
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
    for page, filled in pages(numbers).items():
        page.write_text(with_table(page.read_text(), filled))


if __name__ == "__main__":
    main()
