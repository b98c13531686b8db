"""Valid rows are documents, prompts with completions, or conversations; an invalid
row gets one line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcore.config import RunConfig
from distcore.errors import DataError, DistcoreError
from distcore_tasks.causal_lm.encode import prompt_tokens
from distcore_tasks.causal_lm.forms import unread_keys
from distcore_tasks.causal_lm.rows import CausalRows, Sequences
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.causal_lm.vocabulary import CHAT_TEMPLATE, train_tokenizer
from distcore_tasks.rows.sources import open_source
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.options import Filter, Order
from distcore_tasks.shared.pretrained import load_tokenizer

PROMPTS = [{"prompt": f"add {row} and 1:", "completion": f" {row + 1}"} for row in range(8)]
CHAT = [
    {"messages": [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": f"{row} and 1?"},
        {"role": "assistant", "content": f"It is {row + 1}."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]}
    for row in range(8)
]  # fmt: skip
DOCUMENTS = [{"text": f"document {row} says " + "word " * row} for row in range(8)]


def task_of(folder: Path, rows: list[Any], **options: Any) -> CausalLM:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {"data": str(file), "max_seq_len": 64} | options
    return CausalLM(**given)


def train_rows(task: CausalLM) -> tuple[Sequences, Any]:
    data: Any = task.prepare(RunConfig())
    return data.train, load_tokenizer("it", data.tokenizer)


def counted(dataset: Sequences, tokenizer: Any, row: int) -> str:
    labels = dataset.batch(np.asarray([row]))["labels"].flatten()
    text: str = tokenizer.decode(labels[labels != IGNORED])
    return text


def read(dataset: Sequences, tokenizer: Any, row: int) -> str:
    text: str = tokenizer.decode(dataset.batch(np.asarray([row]))["input_ids"][0])
    return text


def test_a_prompt_row_counts_the_completion_and_its_end(tmp_path: Path) -> None:
    dataset, tokenizer = train_rows(task_of(tmp_path, PROMPTS))
    assert read(dataset, tokenizer, 0) == "add 0 and 1: 1"
    assert counted(dataset, tokenizer, 0) == " 1<|end|>"
    assert np.asarray(dataset.items)[0] == len(tokenizer(" 1")["input_ids"]) + 1


def test_a_conversation_counts_the_answers_and_their_ends(tmp_path: Path) -> None:
    dataset, tokenizer = train_rows(task_of(tmp_path, CHAT))
    whole = "<|system|>You add.<|end|><|user|>0 and 1?<|end|><|assistant|>It is 1.<|end|>"
    assert read(dataset, tokenizer, 0) == f"{whole}<|user|>Sure?<|end|><|assistant|>Yes."
    assert counted(dataset, tokenizer, 0) == "It is 1.<|end|>Yes.<|end|>"


def test_documents_are_one_stream_in_which_each_token_is_predicted_once(tmp_path: Path) -> None:
    (tmp_path / "held-out.json").write_text(json.dumps(DOCUMENTS[:2]))
    task = task_of(tmp_path, DOCUMENTS, max_seq_len=8, eval_data=str(tmp_path / "held-out.json"))
    dataset, tokenizer = train_rows(task)
    stream = tokenizer("".join(row["text"] + "<|end|>" for row in DOCUMENTS))["input_ids"]
    rows = [dataset.batch(np.asarray([row])) for row in range(len(dataset))]
    assert [token for row in rows for token in row["input_ids"][0].tolist()] == stream[:-1]
    assert [token for row in rows for token in row["labels"][0].tolist()] == stream[1:]
    *others, last = np.asarray(dataset.lengths).tolist()
    assert {*others} == {8}
    assert 1 <= last <= 8
    assert (
        task.prepare(RunConfig()).facts["source"]
        == f"{task.data}, each a window of at most 8 tokens"
    )


@pytest.mark.parametrize("rows", [DOCUMENTS, PROMPTS], ids=["documents", "prompts"])
def test_ranks_share_what_is_known_of_each_row(rows: list[Any], tmp_path: Path) -> None:
    dataset, _ = train_rows(task_of(tmp_path, rows, max_seq_len=16))
    for column in (dataset.lengths, dataset.items):
        assert isinstance(column, np.ndarray)
        assert isinstance(column.base, np.memmap)


def test_documents_may_be_joined_without_an_end(tmp_path: Path) -> None:
    dataset, tokenizer = train_rows(
        task_of(tmp_path, DOCUMENTS, max_seq_len=8, end_documents=False)
    )
    tokens = [
        token
        for row in range(len(dataset))
        for token in dataset.batch(np.array([row]))["input_ids"][0].tolist()
    ]
    assert tokens
    assert tokenizer.eos_token_id not in tokens


def test_documents_apart_begin_anew(tmp_path: Path) -> None:
    dataset, tokenizer = train_rows(
        task_of(tmp_path, DOCUMENTS, max_seq_len=8, split_documents=True)
    )
    batches = [dataset.batch(np.asarray([row])) for row in range(len(dataset))]
    assert sum(int((batch["position_ids"] == 0).sum()) for batch in batches) > len(dataset)
    first = tokenizer("document")["input_ids"][0]
    assert any(first in batch["input_ids"] for batch in batches)
    # nothing before a document says how it begins
    assert not any(first in batch["labels"] for batch in batches)


def test_a_batch_gives_the_prompt_of_each_row_to_go_on_from(tmp_path: Path) -> None:
    data: Any = task_of(tmp_path, PROMPTS, max_new_tokens=3).prepare(RunConfig())
    tokenizer = load_tokenizer("it", data.tokenizer)
    batch = data.evaluation.batch(np.asarray([0]))
    assert tokenizer.decode(batch["prompt_ids"][0]).startswith("add ")
    assert tokenizer.decode(batch["prompt_ids"][0]).endswith("and 1:")
    assert "prompt_ids" not in data.train.batch(np.asarray([0]))


def changed(number: int, key: str, value: str) -> dict[str, Any]:
    messages = [dict(message) for message in CHAT[0]["messages"]]
    messages[number][key] = value
    return {"messages": messages}


BAD = [
    ({"messages": []}, "messages is empty"),
    ({"messages": "hello"}, r"messages is a string \('hello'\), expected a list of"),
    ({"messages": ["hello"]}, "message 1 is a string .*expected an object with role and content"),
    (
        changed(1, "role", "human"),
        "message 2 has the role 'human', expected one of system, user, assistant, tool",
    ),
    (changed(2, "content", ""), "the content of message 3 is empty"),
    ({"messages": CHAT[0]["messages"][:2]}, "no message is the assistant's"),
    (
        {"messages": [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "2"}]},
        (
            "message 1 has 'from' and 'value', the form of ShareGPT, expected 'role' and 'content':"
            " rename these"
        ),
    ),
    (
        changed(2, "tool_calls", "clock"),
        r"tool_calls of message 3 is a string \('clock'\), expected a list of {",
    ),
    ({**CHAT[0], "tools": "clock"}, "tools is a string but no JSON: "),
    (
        {**CHAT[0], "tools": {"name": "clock"}},
        "tools is an object with 1 keys, expected a list of objects",
    ),
    (
        {**CHAT[0], "tools": [{"name": "clock"}]},
        "the chat template has no place for tools: take a model with one",
    ),
    (
        {**CHAT[0], "chat_template_kwargs": "[1]"},
        "chat_template_kwargs is a list of 1 values, expected an object",
    ),
    (
        changed(1, "content", "on and on " * 40),
        r"the answer is cut off entirely: \d+ tokens come before it; .*64",
    ),
]


@pytest.mark.parametrize(("row", "problem"), BAD)
def test_a_bad_conversation_is_named_by_file_and_row(
    row: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    task = task_of(tmp_path, [*CHAT[:3], row, *CHAT[3:]], form="messages")
    with pytest.raises(DataError, match=rf"data file .*rows.jsonl, row 4: {problem}") as raised:
        task.prepare(RunConfig())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"prompt": "a", "completion": None}, *PROMPTS], r"row 1: completion is missing \(null\)"),
        ([{"prompt": " ", "completion": "b"}, *PROMPTS], "row 1: prompt is empty"),
        (
            [{"question": "a", "answer": "b"}],
            "has none of the columns messages .* text .*columns.text=NAME",
        ),
        ([DOCUMENTS[0]], "holds one row, so none is left for evaluation"),
    ],
)
def test_a_bad_row_gets_one_line(rows: list[Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=problem) as raised:
        task_of(tmp_path, rows).prepare(RunConfig())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        (
            {"conversations": [{"from": "human", "value": "hi"}]},
            "--messages-column conversations; from and value are",
        ),
        (
            {"instruction": "a", "input": "b", "output": "c"},
            "--prompt-column instruction --completion-column output",
        ),
    ],
)
def test_columns_of_other_libraries_are_named_with_what_to_do(
    row: dict[str, Any], hint: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl: has the columns? .*: .*{hint}"):
        task_of(tmp_path, [row] * 4).prepare(RunConfig())


def test_files_of_two_forms_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps(CHAT))
    task = task_of(tmp_path, PROMPTS, eval_data=str(tmp_path / "other.json"))
    with pytest.raises(
        DataError,
        match=r"other.json, for evaluation: has messages, but .* has prompts: use one form",
    ):
        task.prepare(RunConfig())


def test_rows_that_come_with_distcore_are_refused_for_a_stream_of_another_form(
    tmp_path: Path,
) -> None:
    task = task_of(tmp_path, DOCUMENTS, eval_data="stdlib-help", stream=True)
    with pytest.raises(
        DataError, match=r"^dataset stdlib-help, for evaluation: has prompts, but .* has documents"
    ):
        task.prepare(RunConfig())


def test_a_source_of_a_mixture_without_documents_is_named(tmp_path: Path) -> None:
    for name, kind in (("some", "a"), ("none", "b")):
        lines = (json.dumps(row | {"kind": kind}) for row in DOCUMENTS)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    task = CausalLM(
        data=f"{tmp_path}/some.jsonl,{tmp_path}/none.jsonl",
        order=Order(mix={"some": 0.5, "none": 0.5}),
        filter=Filter("kind", "a"),
    )
    with pytest.raises(DataError, match=r"none(\.jsonl)?: no row of it is left for training"):
        task.prepare(RunConfig())


def pretrained(folder: Path, template: str | None) -> str:
    """A model folder whose tokenizer writes conversations by ``template``."""
    task = task_of(folder, DOCUMENTS)
    data: Any = task.prepare(RunConfig())
    task.build_model(RunConfig(), data).save_pretrained(folder / "model")  # type: ignore[operator]
    tokenizer = load_tokenizer("it", data.tokenizer)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "the model's tokenizer has no chat template"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "row 1: the chat template refuses it: roles must alternate",
        ),
        (
            "{{ messages|length }}{{ messages[-1]['content'] }}",
            "row 1: the chat template does not write message 1",
        ),
    ],
)
def test_a_template_that_does_not_serve_is_named(
    template: str | None, problem: str, tmp_path: Path
) -> None:
    model = pretrained(tmp_path, template)
    with pytest.raises(DistcoreError, match=problem):
        task_of(tmp_path, CHAT, model=model).prepare(RunConfig())


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_that_nobody_reads_are_named_once(suffix: str, tmp_path: Path) -> None:
    rows = [
        {**row, "weight": 0.5, "source": "mine", "id": number} for number, row in enumerate(CHAT)
    ]
    task = task_of(tmp_path, rows)
    if suffix == "parquet":
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
        task = CausalLM(data=str(tmp_path / "rows.parquet"), max_seq_len=64)
    [line] = [line for line in task.prepare(RunConfig()).warnings if "not read" in line]
    assert line == f"data file {tmp_path}/rows.{suffix}: not read: columns weight, source"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_settings_are_columns_which_some_rows_have(
    suffix: str, stream: bool, tmp_path: Path
) -> None:
    model = pretrained(tmp_path, "{{ tools | tojson if tools }}{{ mood }}" + CHAT_TEMPLATE)
    more = {"tools": '[{"name": "a clock"}]', "chat_template_kwargs": '{"mood": "kind"}'}
    rows = [
        {**row, **dict.fromkeys(more)} if number % 2 else {**row, **more}
        for number, row in enumerate(CHAT)
    ]
    rows = [
        row if suffix == "parquet" else {key: row[key] for key in row if row[key]} for row in rows
    ]
    task = task_of(
        tmp_path,
        rows,
        model=model,
        stream=stream,
        max_seq_len=128,
        eval_data=str(tmp_path / "rows.jsonl"),
    )
    if suffix == "parquet":
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
        file = str(tmp_path / "rows.parquet")
        task = CausalLM(data=file, eval_data=file, max_seq_len=128, model=model, stream=stream)
    dataset, tokenizer = train_rows(task)
    assert read(dataset, tokenizer, 0).startswith(
        '[{"name": "a clock"}]kind<|system|>You add.<|end|>'
    )
    assert read(dataset, tokenizer, 1).startswith("<|system|>You add.<|end|>")
    assert counted(dataset, tokenizer, 0) == "It is 1.<|end|>Yes.<|end|>"


def test_a_text_file_has_documents(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("".join(f"{row['text']}\n" for row in DOCUMENTS))
    texts, _ = train_rows(CausalLM(data=str(file), max_seq_len=64))
    alike, _ = train_rows(task_of(tmp_path, DOCUMENTS))
    assert len(texts) == len(alike)
    rows = np.arange(len(texts))
    assert all(
        (texts.batch(rows)[name] == alike.batch(rows)[name]).all()
        for name in ("input_ids", "labels")
    )


def test_a_completion_that_ends_with_the_end_token_gets_no_second_one(tmp_path: Path) -> None:
    rows = [{**row, "completion": row["completion"] + "<|end|>"} for row in PROMPTS]
    dataset, tokenizer = train_rows(task_of(tmp_path, rows))
    assert counted(dataset, tokenizer, 0) == " 1<|end|>"
    documents = task_of(tmp_path, [{"text": "some words<|end|>"} for _ in range(8)])
    dataset, tokenizer = train_rows(documents)
    assert "<|end|><|end|>" not in read(dataset, tokenizer, 0)


def test_a_prompt_keeps_its_own_end_token_and_not_the_one_that_a_tokenizer_adds() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer: Any = train_tokenizer(["what is 1 + 1?"], 300)
    end, token = tokenizer.eos_token, tokenizer.eos_token_id
    for adds_end in (False, True):
        if adds_end:
            added = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, token)])
            tokenizer.backend_tokenizer.post_processor = added
        plain, ended = prompt_tokens(tokenizer, ["what is", f"what is{end}"])
        assert token not in plain
        assert ended == [*plain, token]


@pytest.mark.parametrize("stream", [False, True])
def test_keys_of_messages_that_the_template_does_not_name_are_named_once(
    stream: bool, tmp_path: Path
) -> None:
    weighted = [{**message, "weight": 0, "tool_call_id": None} for message in CHAT[0]["messages"]]
    weighted[-1] |= {"reasoning_content": "Because.", "train": False}
    task = task_of(tmp_path, [{"messages": weighted}, *CHAT], stream=stream)
    lines = [line for line in task.prepare(RunConfig()).warnings if "of messages" in line]
    named = [
        line
        for line in lines
        if line.endswith("not read: keys weight, reasoning_content, train of messages")
    ]
    assert len(named) == len(lines) == 1
    template = CHAT_TEMPLATE + "{# reasoning_content #}"
    tokenizer = type("Template", (), {"chat_template": template})()
    rows = open_source(task.data, CausalRows(task).resolved())
    [line] = unread_keys([rows], tokenizer)
    assert line.endswith("not read: keys weight, train of messages")


def test_a_tokenizer_that_cuts_at_the_begin_is_named_where_rows_are_cut(tmp_path: Path) -> None:
    model = pretrained(tmp_path, CHAT_TEMPLATE)
    file = Path(model, "tokenizer_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation_side": "left"}))
    long = [{**row, "completion": row["completion"] + " and on" * 20} for row in PROMPTS]
    said = [
        [
            line
            for line in task_of(tmp_path, rows, model=model).prepare(RunConfig()).warnings
            if "truncation_side" in line
        ]
        for rows in (long, PROMPTS)
    ]
    assert said[0] == [
        f"model {model}: truncation_side of tokenizer_config.json is not read: rows with answers"
        " are cut at their end; to keep the end, raise --max-seq-len, or cut the rows before"
    ]
    assert not said[1]


def ends_of_texts(task: CausalLM, data: Any) -> object:
    model: Any = task.build_model(RunConfig(), data)
    return model.generation_config.eos_token_id


def test_texts_end_where_the_chat_template_ends_an_answer(tmp_path: Path) -> None:
    """As many published folders do, this one says the tokenizer's end token alone."""
    turn = "<|user|>{{ m.role }} {{ m.content }}<|assistant|>"
    folder = pretrained(tmp_path, "{% for m in messages %}" + turn + "{% endfor %}")
    tokenizer = load_tokenizer("it", Path(folder))
    own = tokenizer.eos_token_id
    end = tokenizer.convert_tokens_to_ids("<|assistant|>")
    task = task_of(tmp_path, CHAT, model=folder)
    data: Any = task.prepare(RunConfig())
    assert ends_of_texts(task, data) == [end, own]
    # A run folder keeps it for predictions and exports, of which each has it in its own file.
    task.save(tmp_path / "run", RunConfig(), data)
    reopened: Any = task.reopen(tmp_path / "run", RunConfig())
    assert ends_of_texts(task, reopened) == [end, own]
    task.save(tmp_path / "export", RunConfig(), reopened)
    assert not (tmp_path / "export" / "answer_ends.json").exists()
    # Documents do not teach how an answer ends.
    documents = task_of(tmp_path, DOCUMENTS, model=folder)
    assert ends_of_texts(documents, documents.prepare(RunConfig())) == own
