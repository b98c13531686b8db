"""benchmarks/mutants.py, rehearsed: which changes it makes, and that a copy with one fails the
test of its line.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mutation(monkeypatch):
    """The modules of the benchmark."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import mutants
    from mutation import changes, groups, scratch

    return SimpleNamespace(mutants=mutants, changes=changes, groups=groups, scratch=scratch)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["(a <= b)"]),
        ("a + b", ["(a - b)"]),
        ("f'{a + b}' + c", []),
        ("x = a and not b", ["(a or not b)", "(b)"]),
        ("f(a, b, k=c)", ["pass", "f(b, a, k=c)", "f(a, b)"]),
        ("open(a, encoding='utf-8')", ["pass"]),
        ("x: int = 2", ["3", "1"]),
        ("if a:\n    raise ValueError(1)", ["(not (a))", "pass"]),
        ("def f(x: int = 0) -> None:\n    '''Text.'''", ["1"]),
        ("@cache(1)\ndef f():\n    x.y = 'a'", ["pass"]),
        ("while a:\n    break", ["(not (a))", "continue"]),
    ],
)
def test_the_changes_of_a_source(mutation: Any, source: str, expected: list[str]) -> None:
    made = mutation.changes.mutants_of("file.py", source)
    assert sorted(mutant.after for mutant in made) == sorted(expected)
    assert all(mutation.changes.changes_the_program(mutant, source) for mutant in made)
    assert len({mutant.name for mutant in made}) == len(made)


def test_the_seed_decides(mutation: Any) -> None:
    def first(seed: int) -> list[str]:
        return [
            mutant.name
            for mutant, _ in zip(
                mutation.mutants.choose(["ddp", "loss"], seed), range(6), strict=False
            )
        ]

    assert first(0) == first(0) != first(1)
    assert [name.startswith("plugins/ddp/") for name in first(0)] == [
        True,
        False,
    ] * 3, "in turns over the groups"


def test_the_sentence_on_the_page_is_that_of_the_record(mutation: Any) -> None:
    page = mutation.mutants.PAGE.read_text()
    assert (
        f"<!-- mutants -->\n{mutation.mutants.sentence(mutation.mutants.read())}<!-- /mutants -->"
        in page
    )


@pytest.mark.programs
def test_a_test_notices_a_mutant_of_its_line(mutation: Any, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mutation.mutants, "STORE", tmp_path / "store")
    file = "core/distcore/plugin/batching/permutation.py"
    text = (ROOT / file).read_text()
    group = mutation.groups.Group((file,), ("tests/plugin/test_permutation.py",), ())
    flip, *_ = [
        each for each in mutation.changes.mutants_of(file, text) if each.operator == "arithmetic"
    ]
    alike = mutation.changes.Mutant(
        file, flip.line, flip.end, "none", flip.before, f"({flip.before})", flip.start
    )
    with mutation.scratch.scratch() as copy:
        by = [
            mutation.mutants._by_tests(copy, mutant, group, mutation.mutants.QUICK, 40.0)
            for mutant in (flip, alike)
        ]
        assert (copy.folder / file).read_text() == text, "restored"
    assert by[0].startswith("tests/plugin/test_permutation.py::")
    assert not by[1]
    assert (ROOT / file).read_text() == text
    (kept,) = (tmp_path / "store").glob("quick-*.json")
    assert json.loads(kept.read_text())["tests"]
