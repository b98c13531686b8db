"""Change one thing in the code that trains, and see if a test or a law notices: mutants of plugins
and of the core.

    python benchmarks/mutants.py [--count 300] [--seed 0] [--jobs 1] [--minutes 60]
                                 [--groups ddp checkpoint …] [--again] [--page]

A mutant flips a comparison, swaps arithmetic or arguments, moves a constant by 1, negates a
condition, or removes a call, a statement, an argument or a ``raise``. It is made in a copy of the
repository, never in the repository. First run the quick tests that run its line (noted by test,
once, in ``build/mutants``), then the quick cases of ``distcore check``; the first failure kills it,
and so does a time limit. The seed decides which mutants are made, in turns over the groups.

docs/mutants.jsonl is the record: a line as each mutant ends, so a stopped call goes on where it
ended. A mutant of code that has changed since then is forgotten. ``--again`` runs survivors again,
against all cases, under further settings, and against tests that start ranks. ``--page`` writes the
sentence in docs/laws.md and runs nothing.
``reason`` of a survivor is written by hand: why no test can, or need, notice it; ``left`` is
why none does yet.

Bounds: at least 300 mutants, of which at least 95 % are killed, those with a reason aside.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from mutation.changes import Mutant, changes_the_program, mutants_of
from mutation.groups import GROUPS, Group
from mutation.scratch import ROOT, Scratch, scratch
from mutation.tests_of_lines import QUICK, RANKS, Kind, Tests, measure, noticing

RECORD, PAGE, STORE = ROOT / "docs/mutants.jsonl", ROOT / "docs/laws.md", ROOT / "build/mutants"
MARKS = re.compile(r"(<!-- mutants -->\n).*?(<!-- /mutants -->)", re.S)
LIMIT = 300.0
"""Seconds that a stage of one mutant may take."""
BUDGET, RANKS_BUDGET = 40.0, 60.0
"""Seconds of tests, as they took when their lines were noted, that a mutant gets
without and with ranks.
"""
NOT_COLLECTED = 4
"""Exit code of pytest for names of tests that do not exist."""
TARGETS = sorted({folder for group in GROUPS.values() for folder in group.folders})
Entry = dict[str, Any]


def choose(groups: Sequence[str], seed: int) -> Iterator[Mutant]:
    """Yield all mutants of the groups, in turns, in an order that ``seed`` decides."""
    yield from filter(
        None, chain.from_iterable(zip_longest(*(_of_group(GROUPS[name], seed) for name in groups)))
    )


def _of_group(group: Group, seed: int) -> Iterator[Mutant]:
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in group.files()
    }
    mutants = [mutant for file, text in texts.items() for mutant in mutants_of(file, text)]
    random.Random(seed).shuffle(mutants)
    return (mutant for mutant in mutants if changes_the_program(mutant, texts[mutant.file]))


_LOCK, _NOTING = threading.Lock(), threading.Lock()
"""Of the record, and of the notes about tests: one copy makes them for all."""
_noted: dict[tuple[Kind, tuple[str, ...]], Tests] = {}
"""Tests with the lines that they run, by kind and files."""


def judge(copy: Scratch, mutant: Mutant, thorough: bool) -> str:
    """Return what notices the mutant, or nothing; ``thorough``: ask all that could."""
    group = next(group for group in GROUPS.values() if group.has(mutant.file))
    if by := _by_tests(copy, mutant, group, QUICK, BUDGET):
        return by
    for arguments in group.checks if thorough else group.quick_checks():
        with copy.changed(mutant):
            if by := _by_check(copy, arguments):
                return by
    return _by_tests(copy, mutant, group, RANKS, RANKS_BUDGET) if thorough else ""


def _by_tests(copy: Scratch, mutant: Mutant, group: Group, kind: Kind, budget: float) -> str:
    key = kind, group.tests
    if key not in _noted:
        with _NOTING:
            _noted[key] = _noted.get(key) or measure(copy, kind, group.tests, TARGETS, STORE)
    names = noticing(_noted[key], mutant, budget)
    if not names:
        return ""
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--timeout",
        "120",
        "-m",
        kind.marks,
    ]
    with copy.changed(mutant):
        code, _ = copy.run("pytest", [*options, *names], LIMIT)
        if code == NOT_COLLECTED:  # the mutant changed their parameters, or cannot be imported
            functions = dict.fromkeys(name.partition("[")[0] for name in names)
            code, _ = copy.run("pytest", [*options, *functions], LIMIT)
    if code == 0:
        return ""
    said = re.search(r"^(?:FAILED|ERROR) (\S+)", copy.log.read_text(errors="replace"), re.M)
    return "time limit" if code is None else said[1] if said else f"exit code {code} of pytest"


def _by_check(copy: Scratch, arguments: Sequence[str]) -> str:
    code, _ = copy.run("distcore", ["check", *arguments, "--json"], LIMIT, stop_at='"held": false')
    if code == 0:
        return ""
    case = re.findall(r'"case": "([\w-]+)", "held": false', copy.log.read_text(errors="replace"))
    name = f"distcore check {' '.join(arguments[:2])}"
    return (
        f"{name} --case {case[0]}"
        if case
        else f"{name}: {'exit code ' + str(code) if code else 'time limit'}"
    )


def read() -> dict[str, Entry]:
    """Return the record by name; of two lines about one mutant the last one counts."""
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.is_file() else []
    return {entry["name"]: entry for entry in map(json.loads, lines)}


def keep_current() -> dict[str, Entry]:
    """Write the record without mutants that the code no longer has, one line
    each, and return it.
    """
    paths = [path for group in GROUPS.values() for path in group.files()]
    made = [
        mutants_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths
    ]
    known = {mutant.name for mutants in made for mutant in mutants}
    record = {name: entry for name, entry in read().items() if name in known}
    RECORD.write_text(
        "".join(f"{json.dumps(entry)}\n" for entry in record.values()), encoding="utf-8"
    )
    return record


def run(
    mutants: Iterator[Mutant], jobs: int, minutes: float, warm: Sequence[str], thorough: bool
) -> None:
    """Judge the mutants in ``jobs`` copies at once, and record each as it ends."""
    deadline, known = time.monotonic() + 60 * minutes, read()

    def work() -> None:
        with scratch(warm) as copy:
            while time.monotonic() < deadline:
                with _LOCK:
                    mutant = next(mutants, None)
                if mutant is None:
                    return
                began = time.monotonic()
                by = judge(copy, mutant, thorough)
                reason = known.get(mutant.name, {}).get("reason", "")
                change = {"line": mutant.line, "before": mutant.before, "after": mutant.after}
                entry: Entry = {"name": mutant.name, **change, "by": by}
                entry |= {"reason": reason} if reason and not by else {}
                with _LOCK:
                    with RECORD.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(entry) + "\n")
                    seconds = time.monotonic() - began
                    print(f"{seconds:6.1f} s {mutant.name}: {by or 'SURVIVED'}", flush=True)

    workers = [threading.Thread(target=work) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def table(record: Mapping[str, Entry]) -> str:
    """Return a row per group."""
    lines = [
        "| code | mutants | killed by a test | by a law | equal to the original | survived |",
        "|---|---|---|---|---|---|",
    ]
    rows = by_group(record)
    for name, entries in {**rows, "all": [*chain.from_iterable(rows.values())]}.items():
        lines.append(f"| {name} | {' | '.join(map(str, counts(entries)))} |")
    return "\n".join(lines) + "\n"


def by_group(record: Mapping[str, Entry]) -> dict[str, list[Entry]]:
    """Return the entries of each group."""
    return {
        name: [entry for entry in record.values() if group.has(entry["name"].partition(":")[0])]
        for name, group in GROUPS.items()
    }


def counts(entries: Sequence[Entry]) -> tuple[int, int, int, int, int]:
    """Return how many there are, how many a test and a law killed, how many equal
    the original, and survivors.
    """
    law = sum(entry["by"].startswith("distcore check") for entry in entries)
    alike = sum(bool(entry.get("reason")) for entry in entries)
    left = sum(not entry["by"] for entry in entries) - alike
    return len(entries), len(entries) - law - alike - left, law, alike, left


def sentence(record: Mapping[str, Entry]) -> str:
    """Return what docs/laws.md says of the record."""
    rows = by_group(record)
    number, test, law, alike, left = counts([*chain.from_iterable(rows.values())])
    survivors = ", ".join(f"{name} {counts(entries)[-1]}" for name, entries in rows.items())
    return (
        f"Of {number} mutants, tests killed {test} and laws {law}; {alike} equal the original, and"
        f" {left} survived: {survivors}.\n"
    )


def main() -> int:
    """Run mutants, or write the page; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="mutants in the record at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="begin no mutant after these")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--again", action="store_true", help="run survivors without a reason again")
    parser.add_argument("--page", action="store_true", help="write the sentence in docs/laws.md")
    arguments = parser.parse_args()
    keep_current()
    if not arguments.page:
        warm = [*chain(*(GROUPS[name].warm for name in arguments.groups))]
        run(wanted(arguments), arguments.jobs, arguments.minutes, warm, arguments.again)
    record = keep_current()
    if arguments.page:
        PAGE.write_text(
            MARKS.sub(lambda marks: f"{marks[1]}{sentence(record)}{marks[2]}", PAGE.read_text())
        )
    print(table(record))
    counted = [entry for entry in record.values() if not entry.get("reason")]
    killed = sum(bool(entry["by"]) for entry in counted) / max(1, len(counted))
    print(
        f"{killed:.1%} of {len(counted)} killed; bounds"
        f" {'held' if len(record) >= 300 and killed >= 0.95 else 'BROKEN'}"
    )
    return 0 if len(record) >= 300 and killed >= 0.95 else 1


def wanted(arguments: argparse.Namespace) -> Iterator[Mutant]:
    """Yield the mutants that the command line asks for."""
    record = read()
    survivors = {
        name for name, entry in record.items() if not entry["by"] and not entry.get("reason")
    }
    made = choose(arguments.groups, arguments.seed)
    if arguments.again:
        yield from (mutant for mutant in made if mutant.name in survivors)
    else:
        fresh = (mutant for mutant in made if mutant.name not in record)
        yield from (
            mutant for mutant, _ in zip(fresh, range(arguments.count - len(record)), strict=False)
        )


if __name__ == "__main__":
    sys.exit(main())
