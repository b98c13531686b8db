"""Which rows are compared in both forms, and where logits can be computed
at some positions alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from distcore import RunConfig
from distcore.engine.padding_free_check import MOST, _select_logits, _some_rows
from distcore.plugin.task.task import Dataset


def chosen(lengths: list[int], **changes: Any) -> list[int]:
    """Lengths of the rows that are compared."""
    given = {
        "global_batch_size": len(lengths),
        "micro_batch_size": 1,
        "seed": 3,
        "loader": {"length_grouping": "batch"},
    }
    dataset = cast("Dataset", SimpleNamespace(lengths=np.array(lengths)))
    rows = _some_rows(RunConfig.model_validate(given | changes), dataset)
    return [lengths[row] for row in rows]


def test_rows_of_all_lengths_are_compared_as_many_as_a_micro_batch_holds() -> None:
    lengths = list(range(1, 21))
    assert chosen(lengths) == [1, 4, 6, 9, 12, 15, 17, 20]
    assert len(chosen(lengths)) == MOST
    long = list(range(1, 201, 10))
    assert len(chosen(long)) == 4  # of up to 191 tokens
    assert len(chosen([length // 4 for length in long])) == 256 // 47
    by_tokens = {
        "micro_batch_size": "auto",
        "loader": {"length_grouping": "batch", "forward_tokens": 5},
    }
    assert chosen(lengths, **by_tokens, micro_batch_tokens=60) == [1, 11, 20]
    # of a row longer than the budget one
    assert chosen(lengths, **by_tokens, micro_batch_tokens=10) == [1]
    assert chosen([0, 0]) == [0, 0]


@pytest.mark.parametrize(
    ("compile", "ranks", "can"), [("off", 1, True), ("on", 1, False), ("off", 2, False)]
)
def test_logits_at_some_positions_need_whole_layers_that_are_not_compiled(
    compile: str, ranks: int, can: bool
) -> None:
    run: Any = SimpleNamespace(
        config=SimpleNamespace(compile=compile),
        capabilities=SimpleNamespace(ranks_per_shard=ranks),
        module=None,
    )
    task: Any = SimpleNamespace(select_logits=lambda module, data: "selected")
    selected: Any = _select_logits(run, task, cast("Any", "given"))
    assert selected == ("selected" if can else "given")
