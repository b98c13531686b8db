"""Tests by the lines that they run: which tests can notice a change, the shortest first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutation.changes import Mutant
from mutation.scratch import ROOT, Scratch

LIMIT = 900.0
"""Seconds that the tests of one file may take."""
Tests = dict[str, Any]
"""By test: ``seconds`` and ``lines``, a list of lines by file."""


@dataclass(frozen=True)
class Kind:
    """A set of tests that is measured, and asked, together."""

    name: str
    """``quick`` or ``ranks``."""
    marks: str
    """The expression of pytest's ``-m`` that selects them."""


QUICK = Kind("quick", "not slow and not machines and not gpu and not ranks and not programs")
RANKS = Kind("ranks", "not slow and not machines and not gpu and (ranks or programs)")


def measure(
    scratch: Scratch, kind: Kind, patterns: Sequence[str], targets: Sequence[str], store: Path
) -> Tests:
    """Return the lines of ``targets`` that each test of the files runs.

    ``store`` keeps them by test file; a file is measured again if it, or a file of the targets that
    it runs, has changed.
    """
    store.mkdir(parents=True, exist_ok=True)
    tests: Tests = {}
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        name = str(path.relative_to(ROOT))
        kept = store / f"{kind.name}-{name.replace('/', '-')}.json"
        known = json.loads(kept.read_text()) if kept.is_file() else {"digests": {}}
        if name not in known["digests"] or known["digests"] != _digests(known["digests"]):
            traced = _trace(scratch, name, kind, targets, store / "notes")
            run = {file for test in traced.values() for file in test["lines"]}
            known = {"digests": _digests([name, *sorted(run)]), "tests": traced}
            kept.write_text(json.dumps(known))
            print(f"{name}: {len(known['tests'])} {kind.name} tests", flush=True)
        tests |= known["tests"]
    return tests


def _digests(files: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each file that there is."""
    paths = {file: ROOT / file for file in files}
    return {
        file: hashlib.sha256(path.read_bytes()).hexdigest()
        for file, path in paths.items()
        if path.is_file()
    }


def _trace(scratch: Scratch, name: str, kind: Kind, targets: Sequence[str], notes: Path) -> Tests:
    notes.unlink(missing_ok=True)
    variables = {"MUTATION_TARGETS": ":".join(targets), "MUTATION_LINES": str(notes.absolute())}
    plugin = [
        "-p",
        "mutation_lines",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--timeout",
        "120",
    ]
    arguments = ["-q", *plugin, "-m", kind.marks, "-k", "not test_law", name]
    scratch.run("pytest", arguments, LIMIT, environment={**variables})
    tests: Tests = {}
    for line in notes.read_text().splitlines() if notes.exists() else []:
        note = json.loads(line)
        test = tests.setdefault(note["test"], {"seconds": 0.0, "passed": False, "lines": {}})
        if "file" in note:
            test["lines"].setdefault(note["file"], []).append(note["line"])
        else:
            test |= {"seconds": note["seconds"], "passed": note["passed"]}
    return {name: test for name, test in tests.items() if test.pop("passed")}


def noticing(tests: Tests, mutant: Mutant, budget: float) -> list[str]:
    """Return the tests that run a line of the mutant, the shortest first, as many as
    fit into ``budget`` seconds.

    What runs at import only, such as a constant, is up to all tests, first those that run another
    line of its file.
    """
    changed = set(range(mutant.line, mutant.end + 1))
    chosen = [
        name for name, test in tests.items() if changed & set(test["lines"].get(mutant.file, ()))
    ] or [*tests]
    chosen.sort(
        key=lambda name: (mutant.file not in tests[name]["lines"], tests[name]["seconds"], name)
    )
    spent = 0.0
    fit: list[str] = []
    for name in chosen:
        spent += tests[name]["seconds"]
        if fit and spent > budget:
            break
        fit.append(name)
    return fit
