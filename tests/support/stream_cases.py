"""Rows of each task that streams, and the comparison of datasets that stream them with
those that store them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distcore import RunConfig
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.embedding.task import Embedding
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.preference.task import Preference
from distcore_tasks.reward_model.task import RewardModel
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared.options import Filter
from distcore_tasks.text_classification.options import Columns as TextColumns
from distcore_tasks.text_classification.task import TextClassification
from distcore_tasks.token_classification.task import TokenClassification

WORDS = ["red", "green", "blue", "tree", "sky", "sun", "moon"]


def words(number: int, most: int = 9) -> str:
    return " ".join(WORDS[(number * 7 + place * place) % 7] for place in range(1 + number % most))


def conversation(n: int) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": words(n)}, {"role": "assistant", "content": words(n + 3)}]
    return turns * (1 + n % 2)


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "prompts": lambda n: {"prompt": words(n), "completion": words(n + 1)},
    "messages": lambda n: {"messages": conversation(n)},
    "texts": lambda n: {"text": words(n, 40)},
    "pairs": lambda n: {"source": words(n, 40), "target": words(n + 1)},
    "preferences": lambda n: {"prompt": words(n), "chosen": words(n + 1), "rejected": words(n + 2)},
    "mismatched": lambda n: {"prompt": words(n), "chosen": words(n + 1), "rejected": words(n + 2)},
    "rewards": lambda n: {"prompt": words(n), "chosen": words(n + 1), "rejected": words(n + 2)},
    "tags": lambda n: {
        "tokens": words(n, 40).split(),
        "tags": [f"T{len(word)}" for word in words(n, 40).split()],
    },
    "labels": lambda n: {"text": words(n, 40), "label": WORDS[n % 3]},
    "pairs with labels": lambda n: {
        "text": words(n, 40),
        "second": words(n + 1),
        "label": [n % 3, 3 + n % 2],
    },
    "numbers": lambda n: {"text": words(n, 40), "label": n / 7},
    "groups": lambda n: {"anchor": words(n, 40), "positive": words(n + 1)},
}
TASKS: dict[str, Callable[..., Any]] = {
    "prompts": CausalLM,
    "messages": CausalLM,
    "texts": partial(MaskedLM, split_texts=False),
    "pairs": partial(Seq2Seq, prefix="say: "),
    "preferences": Preference,
    "mismatched": partial(Preference, loss="kto"),
    "rewards": RewardModel,
    "groups": Embedding,
    "labels": TextClassification,
    "pairs with labels": partial(
        TextClassification, columns=TextColumns(text_pair="second"), problem_type="multi_label"
    ),
    "numbers": partial(TextClassification, problem_type="regression"),
    "tags": TokenClassification,
}


def write(file: Path, rows: list[dict[str, Any]], bad: tuple[int, ...] = ()) -> Path:
    lines = ["{" if number in bad else json.dumps(row) for number, row in enumerate(rows)]
    file.write_text("\n".join(lines))
    return file


def both(task: str, **options: Any) -> tuple[Any, Any]:
    """The datasets of a run that streams, and of one that stores."""
    config = RunConfig(global_batch_size=8, padding_free="off")
    streamed, stored = (
        TASKS[task](**options, **extra).prepare(config) for extra in ({"stream": True}, {})
    )
    return streamed, stored


def check_alike(streamed: Any, stored: Any, rows: np.ndarray | None = None) -> None:
    rows = np.random.default_rng(0).permutation(len(stored))[:20] if rows is None else rows
    if hasattr(stored, "at"):
        assert (
            streamed.at(2).batch(rows)["labels"].tolist()
            == stored.at(2).batch(rows)["labels"].tolist()
        )
        streamed, stored = streamed.with_targets().at(1), stored.with_targets().at(1)
    check_same(streamed, stored, rows)


def check_same(streamed: Any, stored: Any, rows: np.ndarray) -> None:
    """Compare rows as an evaluation reads them."""
    assert len(streamed) == len(stored)
    assert streamed.lengths[rows].tolist() == stored.lengths[rows].tolist()
    assert streamed.items[rows].tolist() == stored.items[rows].tolist()
    one, other = streamed.batch(rows), stored.batch(rows)
    assert one.keys() == other.keys()
    for name, value in leaves(one).items():
        assert (value.dtype, value.tolist()) == (
            leaves(other)[name].dtype,
            leaves(other)[name].tolist(),
        ), name


def leaves(batch: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a batch."""
    nested = {
        name: value if isinstance(value, dict) else {"": value} for name, value in batch.items()
    }
    return {
        f"{name} {key}": value for name, inner in nested.items() for key, value in inner.items()
    }


SOME: dict[str, dict[str, Any]] = {
    "all": {},
    "cut": {"max_seq_len": 12},
    "filtered": {"filter": Filter("kind", "^(1|2)$")},
    "bad": {"skip_bad_rows": 5},
    "filtered and bad": {
        "filter": Filter("kind", "^(1|2)$"),
        "skip_bad_rows": 3,
        "eval_fraction": 0.3,
    },
}
