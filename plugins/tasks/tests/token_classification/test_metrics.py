"""Entities count as conlleval counts them, other tags by themselves; and the baseline
that looks words up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distcore_tasks.token_classification.metrics import Lookup, is_iob, tag_metrics

IOB = ["B-LOC", "B-PER", "I-PER", "O"]
TAGS = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC"]]


def test_an_entity_is_right_if_its_words_and_its_kind_are() -> None:
    # a person too short, a place too many
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-LOC", "B-LOC"]]
    metrics = tag_metrics(TAGS, predicted, IOB)
    assert metrics["accuracy"] == pytest.approx(4 / 6)
    assert metrics["precision"] == pytest.approx(2 / 4)
    assert metrics["recall"] == pytest.approx(2 / 3)
    assert metrics["f1"] == pytest.approx(2 * (1 / 2) * (2 / 3) / (1 / 2 + 2 / 3))
    assert "PER" in str(metrics["classification_report"])


def test_rows_without_entities_have_an_accuracy_but_no_entity() -> None:
    metrics = tag_metrics(TAGS, [["O"] * 4, ["O"] * 2], IOB)
    assert metrics["accuracy"] == pytest.approx(2 / 6)
    assert (metrics["precision"], metrics["recall"], metrics["f1"]) == (0, 0, 0)


def test_rows_without_any_entity_have_no_table() -> None:
    metrics = tag_metrics([["O", "O"]], [["O", "O"]], IOB)
    assert (metrics["accuracy"], metrics["f1"], metrics["classification_report"]) == (
        1,
        0,
        "no entities",
    )


@pytest.mark.parametrize(
    "recorded", json.loads((Path(__file__).parent / "seqeval.json").read_text())
)
def test_figures_are_those_of_seqeval(recorded: dict[str, Any]) -> None:
    tags, predicted = ([row.split() for row in recorded[name]] for name in ("tags", "predicted"))
    metrics = tag_metrics(tags, predicted, IOB)
    assert [metrics[name] for name in ("precision", "recall", "f1")] == pytest.approx(
        recorded["scores"], rel=1e-12
    )
    table, expected = (
        str(text).split() for text in (metrics["classification_report"], recorded["table"])
    )
    assert [_number(word) for word in table] == pytest.approx(
        [_number(word) for word in expected], abs=1.01e-4
    )
    assert [word for word in table if _number(word) < 0] == [
        word for word in expected if _number(word) < 0
    ]


def _number(word: str) -> float:
    """The number written, its last digit rounded up or down; negative where there is none."""
    return float(word) if word[0].isdigit() else -1


def test_tags_without_a_scheme_have_the_mean_over_tags() -> None:
    tags, predicted = [["NOUN", "VERB"], ["NOUN", "DET"]], [["NOUN", "VERB"], ["VERB", "DET"]]
    metrics = tag_metrics(tags, predicted, ["DET", "NOUN", "VERB"])
    assert metrics["accuracy"] == 0.75
    assert metrics["f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    assert "NOUN" in str(metrics["classification_report"])


def test_without_words_there_is_no_metric() -> None:
    assert set(tag_metrics([], [], IOB).values()) == {None}


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (IOB, True),
        (["B-X", "E-X", "I-X", "O", "S-X"], True),
        (["O", "X"], False),
        (["0", "1"], False),
        (["O"], False),
    ],
)
def test_which_tags_name_entities(classes: list[str], expected: bool) -> None:
    assert is_iob(classes) is expected


def test_a_word_is_looked_up_and_one_that_training_lacks_gets_the_commonest_tag() -> None:
    words = [["Ada", "met", "May"], ["May", "came"], ["in", "May"]]
    tags = [["B-PER", "O", "B-PER"], ["B-PER", "O"], ["O", "O"]]
    lookup = Lookup(zip(words, tags, strict=True))
    facts = lookup.facts([(["May", "met", "Bob"], ["B-PER", "O", "B-PER"])], ["B-PER", "O"])
    assert facts == {"majority_share": 0.3333, "lookup_accuracy": 0.6667, "lookup_f1": 0.6667}
