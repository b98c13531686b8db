"""Prompts without answers: which column they are, what the model reads of them, and the line
that a bad one gets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcore.config import RunConfig
from distcore.errors import DataError, ModelError
from distcore.plugin.task.task import FileRows
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.shared.tokenized import GENERATED

ROWS = [{"prompt": f"after {row}", "completion": f" comes {row + 1}"} for row in range(9)]
USER, ANSWER = {"role": "user", "content": "what is 2?"}, {"role": "assistant", "content": "even"}


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[CausalLM, Any]:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = CausalLM(data=str(tmp_path / "rows.jsonl"), max_seq_len=32, dropout=0.0)
    return task, task.prepare(RunConfig())


def unlabeled(prepared: tuple[CausalLM, Any], *given: object) -> Any:
    task, data = prepared
    return task.unlabeled(
        FileRows(file="new.jsonl", start=5, records=[(one,) for one in given]), data
    )


def write_and_open(task: CausalLM, folder: Path, *rows: object) -> list[tuple[object, ...]]:
    (folder / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(task.open_rows(folder / "new.jsonl", {}))


def test_the_column_is_what_the_file_has_or_the_form_says(tmp_path: Path) -> None:
    task = CausalLM()
    assert write_and_open(task, tmp_path, {"prompt": "a", "text": "b"}) == [("a",)]
    assert write_and_open(task, tmp_path, {"text": "b"}) == [("b",)]
    assert write_and_open(task, tmp_path, {"messages": [USER]}) == [([USER], None, None)]
    tools, settings = [{"name": "clock"}], {"enable_thinking": False}
    row = {"messages": [USER], "tools": tools, "chat_template_kwargs": settings}
    assert write_and_open(task, tmp_path, row) == [([USER], tools, settings)]
    assert write_and_open(task, tmp_path, ["a"]) == [("a",)]
    assert write_and_open(task, tmp_path, [[USER]]) == [([USER], None, None)]
    assert write_and_open(CausalLM(form="documents"), tmp_path, {"prompt": "a", "text": "b"}) == [
        ("b",)
    ]
    with pytest.raises(
        DataError,
        match=r"none of the columns messages \(messages\), prompt \(prompts\), text \(doc",
    ):
        write_and_open(task, tmp_path, {"question": "a"})


def test_ids_stand_behind_what_the_model_goes_on_from(tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text('{"prompt": "a", "key": 7}\n')
    assert list(CausalLM().open_rows(tmp_path / "new.jsonl", {"columns.id": "key"})) == [("a", 7)]


def test_the_model_reads_the_prompt_padded_on_the_left_and_no_end(
    prepared: tuple[CausalLM, Any],
) -> None:
    rows = unlabeled(prepared, "after 1", "after 1 2")
    batch, tokenizer = rows.batch(np.asarray([1, 0])), prepared[1].loaded_tokenizer
    assert set(batch) == {"prompt_ids", "prompt_mask"}
    read = [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(*batch.values(), strict=True)]
    assert read == ["after 1 2", "after 1"]
    assert batch["prompt_mask"][:, -1].tolist() == [1, 1]


def test_a_conversation_is_written_up_to_the_answer_that_is_asked_for(
    prepared: tuple[CausalLM, Any],
) -> None:
    asked = "<|user|>what is 2?<|end|><|assistant|>"
    rows = unlabeled(prepared, [USER], [USER, ANSWER], [USER, ANSWER, USER])
    assert rows.texts == [asked, asked, f"{asked}even<|end|>{asked}"]
    [read] = rows.batch(np.asarray([0]))["prompt_ids"]
    assert prepared[1].loaded_tokenizer.decode(read) == asked


def test_tools_and_settings_are_written_before_the_answer_that_is_asked_for(
    prepared: tuple[CausalLM, Any],
) -> None:
    task, data = prepared
    template = "{{ tools | tojson if tools }}{{ mood }}" + data.loaded_tokenizer.chat_template
    data.loaded_tokenizer.chat_template = template
    record = (
        [USER | {"content": "2?"}],
        '[{"name": "clock"}]',
        {"mood": "kind"},
    )  # JSON, as in Parquet
    rows: Any = task.unlabeled(FileRows(file="new.jsonl", start=1, records=[record]), data)
    assert rows.texts == ['[{"name": "clock"}]kind<|user|>2?<|end|><|assistant|>']


def test_generation_ends_after_64_tokens_where_the_run_set_no_limit(
    prepared: tuple[CausalLM, Any],
) -> None:
    task, data = prepared
    model: Any = task.build_model(RunConfig(), data).eval()
    batch = unlabeled(prepared, "after 1", "after 2").batch(np.arange(2))
    assert task.outputs(model, batch) == {}
    model.generation_config.eos_token_id = None  # so that no answer ends earlier
    answers: Any = task.generate(model, batch, False)
    assert answers["generated"].lengths.tolist() == [GENERATED] * 2


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (7, r"prompt is an integer \(7\), expected a string"),
        (" ", "prompt is empty: fill it in or remove the row"),
        (
            [{"role": "user"}],
            "message 1 is an object with 1 keys, expected an object with role and content",
        ),
        ([ANSWER], "the only message is the assistant's: give the one that it should answer"),
        (
            "word " * 40,
            (
                r"the prompt has \d+ tokens, but at most 32 are allowed: .* raise"
                r" task_options.max_seq_len$"
            ),
        ),
    ],
)
def test_a_bad_prompt_is_named_by_file_and_row(
    given: object, problem: str, prepared: tuple[CausalLM, Any]
) -> None:
    with pytest.raises(DataError, match=f"^data file new.jsonl, row 6: {problem}"):
        unlabeled(prepared, "good", given)


def test_a_prompt_leaves_room_for_what_is_to_come(prepared: tuple[CausalLM, Any]) -> None:
    long = (CausalLM(max_seq_len=1024), prepared[1])
    with pytest.raises(
        DataError, match=r"at most 960 are allowed: .* set task_options.max_new_tokens below 64$"
    ):
        unlabeled(long, "x" * 1000)


def test_messages_need_a_chat_template(prepared: tuple[CausalLM, Any]) -> None:
    prepared[1].loaded_tokenizer.chat_template = None
    with pytest.raises(
        ModelError, match=r"data file new.jsonl: the model's tokenizer has no chat template"
    ):
        unlabeled(prepared, [USER])
