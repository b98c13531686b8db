"""All tasks share the names of their main files, so a reader of one task finds the way in all."""

from __future__ import annotations

from pathlib import Path

import pytest

import distcore_tasks

ROOT = Path(distcore_tasks.__file__).parent
FROM_DATA = {"encode", "dataset", "prepare", "streamed"}
"""Files of a task whose rows are not those of a ``RowPipeline``, between rows and batches."""
SKELETON = {"__init__", "task", "options", "models", "embedded", "unlabeled", "rows"} | FROM_DATA
OWN = {
    "causal_lm": {
        "conversations",
        "shapes",
        "vocabulary",
        "sequence_packing",
        "router",
        # what a row is, its tokens, and its lines in a batch
        *("forms", "windows"),
    },
    "distillation": set[str](),
    "embedding": {
        "datasets",
        "folder_keys",
        "losses",
        "known",
        "modules",
        "retrieval",
        "text_settings",
    },
    "image_classification": {
        *("shapes", "conv", "small_images", "preprocessing", "processors"),
        # where images come from
        *("arrays", "decoding", "encoded", "folders", "sources", "stores", "stream_sources"),
    },
    "masked_lm": {"masking"},
    "preference": {"losses", "pairs"},
    "reward_model": set[str](),
    "seq2seq": {"shapes", "vocabulary", "scores", "languages"},
    "text_classification": {"datasets", "other_tasks", "problems", "records"},
    "token_classification": {"datasets", "metrics", "tags", "words"},
}
"""Additional files of each task."""
OF_ANOTHER = {"rows", "encode", "dataset", "prepare", "streamed", "embedded", "unlabeled"}
LACKS = {
    "causal_lm": {"dataset", "prepare", "streamed"},
    "embedding": {*FROM_DATA, "unlabeled"},
    "distillation": OF_ANOTHER,  # text_classification
    # Images are decoded by the batch; digits are arrays.
    "image_classification": {"encode", "embedded", "dataset", "streamed"},
    "seq2seq": {*FROM_DATA, "unlabeled"},
    "masked_lm": {*FROM_DATA, "unlabeled"},
    "text_classification": {*FROM_DATA, "unlabeled"},
    "token_classification": {*FROM_DATA, "unlabeled"},
    "preference": {*FROM_DATA, "models", "unlabeled"},  # models of causal_lm
    "reward_model": OF_ANOTHER,  # preference
}
"""Files of the skeleton that a task does not need."""


def names(folder: Path) -> set[str]:
    return {
        path.stem
        for path in folder.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }


def test_every_task_is_listed() -> None:
    assert {file.parent.name for file in ROOT.glob("*/task.py")} == set(OWN)


@pytest.mark.parametrize("task", OWN)
def test_a_task_has_the_files_of_the_skeleton_and_its_own(task: str) -> None:
    assert names(ROOT / task) == (SKELETON - LACKS.get(task, set())) | OWN[task]
