"""Datasets of LLaMA-Factory: rows that ``dataset_info.json`` describes, as conversations,
texts or pairs of answers.

LLaMA-Factory makes a conversation of every row, and writes it by the chat template. So these rows
are written anew, as conversations, beside the config. Files that have such rows already are taken
as they are.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from distcore import ConfigError, nearest
from distcore_migrate.draft import OFF, Draft, Tree, whole

INFO = "dataset_info.json"
CHOOSE = "CHOOSE"
"""In place of data that no source says; ``distcore train`` refuses it."""
ROW_FORMS = ("alpaca", "sharegpt", "openai")
TAGS: Tree = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
"""Names in a conversation of the form of ShareGPT."""
OPENAI_TAGS: Tree = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "observation_tag": "tool", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
OPENAI_TURNS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag")
"""Those names that are to be OpenAI's in a file that is read as it is."""
MEDIA = ("images", "videos", "audios")
FILES = (".json", ".jsonl", ".csv", ".parquet")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dataset:
    """One entry of ``dataset_info.json``."""

    name: str
    """Its name."""
    folder: Path
    """The folder of ``dataset_info.json``, to which file names are relative."""
    entry: Tree
    """What it says."""

    @property
    def form(self) -> str:
        """Form of its rows. LLaMA-Factory's ``openai`` is ``sharegpt`` with other tags."""
        form = str(self.entry.get("formatting", "alpaca"))
        return "sharegpt" if form == "openai" else form

    @property
    def is_ranking(self) -> bool:
        """True for rows with a better and a worse answer."""
        return bool(self.entry.get("ranking"))

    @property
    def tags(self) -> Tree:
        """Names in a conversation."""
        defaults = OPENAI_TAGS if self.entry.get("formatting") == "openai" else TAGS
        return defaults | (self.entry.get("tags") or {})

    def column(self, name: str) -> str | None:
        """Return the name of a column; ``None`` if rows have none."""
        columns = self.entry.get("columns") or {}
        defaults = {}
        if self.form == "sharegpt":
            defaults = {"messages": "conversations"}
        elif not columns:
            # An entry with columns of its own has none of alpaca's that it does not name.
            defaults = {"prompt": "instruction", "query": "input", "response": "output"}
        column = columns.get(name, defaults.get(name))
        return None if column is None else str(column)

    @property
    def files(self) -> list[Path]:
        """Its files, in the order of their names; none for one of a hub."""
        if "file_name" not in self.entry:
            return []
        path = self.folder / str(self.entry["file_name"])
        if path.is_dir():
            return sorted(file for file in path.iterdir() if file.suffix in FILES)
        return [path]


@dataclass(slots=True)
class Rows:
    """Rows of datasets that were read, and what is to say of them."""

    rows: list[Row] = field(default_factory=list)
    """Rows as distcore's tasks take them."""
    dropped: int = 0
    """Rows that LLaMA-Factory drops, because their turns do not alternate or have no text."""


def find_info(directory: object, beside: Path | None) -> Path | None:
    """Return ``dataset_info.json`` of ``dataset_dir``, or ``None`` if it is not there.

    The folder may be relative to that of the YAML, ``beside``, or the file lies next to the YAML.
    """
    named = Path(str(directory or "data")).expanduser()
    folders = [named]
    if beside is not None:
        folders += [beside / named, beside]
    files = [folder / INFO for folder in folders]
    return next((file for file in files if file.is_file()), None)


def datasets_of(names: object, info: Path) -> list[Dataset]:
    """Return the datasets with these names, several with commas.

    Raises ConfigError for one that is not described.
    """
    try:
        entries = json.loads(info.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"file {info}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict):
        entries = {}
    datasets = []
    for listed_name in names if isinstance(names, list) else str(names).split(","):
        name = str(listed_name).strip()
        entry = entries.get(name)
        if not isinstance(entry, dict):
            near = nearest(name, [*entries])
            raise ConfigError(f"dataset {name}: {info} does not describe it{near}")
        datasets.append(Dataset(name, info.parent, entry))
    return datasets


def set_data(draft: Draft, stage: str, beside: Path | None) -> None:
    """Set data, columns and evaluation data of the facts that the keys of LLaMA-Factory became."""
    names = draft.take("datasets")
    evaluation_names = draft.take("eval_datasets")
    max_samples = draft.take("max_samples")
    info = find_info(draft.take("dataset_dir"), beside)
    if info is None:
        absent = f"names of LLaMA-Factory's {INFO}, which is not here"
        draft.note_fact("open", "datasets", f"{absent}: give --data the files themselves")
        draft.note_fact("open", "eval_datasets", f"{absent}: give --eval-data the files")
        draft.note_fact("none", "max_samples", "cut the file to so many rows")
        return
    draft.note_fact("idle", "dataset_dir", f"{info} was read")
    limit = None if max_samples in OFF else whole(max_samples)
    sources = (("data", names, "datasets"), ("eval_data", evaluation_names, "eval_datasets"))
    for option, value, fact in sources:
        if value in OFF:
            draft.note_fact("off", fact)
        else:
            _set_source(draft, option, datasets_of(value, info), stage, limit, draft.origin(fact))
    if limit is None:
        draft.note_fact("off", "max_samples")


def _set_source(
    draft: Draft,
    option: str,
    datasets: list[Dataset],
    stage: str,
    limit: int | None,
    origin: str,
) -> None:
    """Set the files of one option, or the rows to be written; a note says why it stays open."""
    key = f"task_options.{option}"
    for dataset in datasets:
        problem = _problem(dataset, stage)
        if problem is not None:
            draft.set(key, CHOOSE, origin)
            draft.note("open", f"{option} = {CHOOSE}", problem)
            return
    columns = _columns_as_they_are(datasets, stage)
    files = [str(file) for dataset in datasets for file in dataset.files]
    if columns is not None and limit is None and files:
        draft.set(key, ",".join(files), origin)
        _set_columns(draft, columns, origin)
        return
    if not files:
        _set_hub(draft, key, datasets, columns, stage, origin)
        return
    converted = Rows()
    for dataset in datasets:
        _read(dataset, stage, limit, converted)
    if limit is not None:
        remark = f"the first {limit} rows of each dataset are taken"
        draft.note("differs", f"max_samples = {limit}", remark)
    if converted.dropped:
        remark = (
            "have no text, or turns that do not alternate: left out, as LLaMA-Factory leaves"
            " them out"
        )
        draft.note("differs", f"{option}: {converted.dropped} rows", remark)
    if not converted.rows:
        names = ", ".join(dataset.name for dataset in datasets)
        raise ConfigError(f"{origin}: {names}: no row can be trained on")
    draft.rows[key] = converted.rows
    # The name of the file that the rows are written to takes the place of this word.
    draft.set(key, CHOOSE, origin)
    _set_columns(draft, {}, origin, form="messages" if stage == "sft" else None)


def _set_columns(draft: Draft, columns: Tree, origin: str, form: str | None = None) -> None:
    """Set the names of columns, and the form of rows that are conversations."""
    for name, column in columns.items():
        draft.set(f"task_options.columns.{name}", column, origin)
    if form or "messages" in columns:
        draft.set("task_options.form", form or "messages", origin)


def _set_hub(
    draft: Draft,
    key: str,
    datasets: list[Dataset],
    columns: Tree | None,
    stage: str,
    origin: str,
) -> None:
    """Set one dataset of the Hugging Face hub, whose rows are not read here."""
    dataset = datasets[0]
    url = dataset.entry.get("hf_hub_url")
    if columns is None and dataset.form == "alpaca" and stage == "sft":
        columns = {"prompt": dataset.column("prompt"), "completion": dataset.column("response")}
        draft.note(
            "differs",
            f"{dataset.name}: rows of alpaca",
            "the prompt is the instruction alone, without a chat "
            "template around it and without the column of further input",
        )
    if len(datasets) > 1 or not url or columns is None:
        draft.set(key, CHOOSE, origin)
        names = ", ".join(dataset.name for dataset in datasets)
        remedy = f"download them, and name file_name in {INFO}"
        option = key.rpartition(".")[2]
        draft.note("open", f"{option} = {CHOOSE}", f"{names}: rows of a hub are not read: {remedy}")
        return
    subset = f":{dataset.entry['subset']}" if dataset.entry.get("subset") else ""
    draft.set(key, f"{url}{subset}@{dataset.entry.get('split', 'train')}", origin)
    _set_columns(draft, columns, origin)


def _problem(dataset: Dataset, stage: str) -> str | None:
    """Return why a dataset cannot be taken; ``None`` if it can."""
    columns = dataset.entry.get("columns") or {}
    form = str(dataset.entry.get("formatting", "alpaca"))
    if form not in ROW_FORMS:
        return f"{dataset.name}: formatting = {form} is not known (known: {', '.join(ROW_FORMS)})"
    for name in MEDIA:
        if columns.get(name):
            return f"{dataset.name}: has {name}, which no shipped task reads beside texts"
    if stage == "kto":
        return (
            f"{dataset.name}: a row of kto has one answer and its tag; here it has both answers to"
            " a prompt, chosen and rejected: put a good and a bad one into a row"
        )
    if stage in ("dpo", "rm") and not dataset.is_ranking:
        return (
            f"{dataset.name}: rows of {stage} have two answers, but {INFO} does not say ranking:"
            " true"
        )
    if stage in ("sft", "pt") and dataset.is_ranking:
        return (
            f"{dataset.name}: rows have two answers (ranking); {stage} learns one: take stage dpo"
            " or rm"
        )
    return next((f"{file}: no such file" for file in dataset.files if not file.is_file()), None)


def _columns_as_they_are(datasets: list[Dataset], stage: str) -> Tree | None:
    """Return the columns by which all files are read as they are; ``None``: rows are converted."""
    columns, *others = [_columns_of_one(dataset, stage) for dataset in datasets]
    return columns if all(other == columns for other in others) else None


def _columns_of_one(dataset: Dataset, stage: str) -> Tree | None:
    """Return the columns by which a task of distcore reads the rows of one dataset, or ``None``."""
    if stage == "pt" and dataset.form == "alpaca":
        return {"text": dataset.column("prompt")}
    # LLaMA-Factory joins these with the prompt, which no column of distcore does.
    has_further_columns = any(dataset.column(name) for name in ("query", "system", "history"))
    if has_further_columns:
        return None
    if dataset.is_ranking and dataset.form == "alpaca":
        return {name: dataset.column(name) for name in ("prompt", "chosen", "rejected")}
    has_tools = dataset.column("tools") not in (None, "tools")
    has_roles = all(dataset.tags[name] == OPENAI_TAGS[name] for name in OPENAI_TURNS)
    if stage == "sft" and dataset.form == "sharegpt" and has_roles and not has_tools:
        return {"messages": dataset.column("messages")}
    return None


def _read(dataset: Dataset, stage: str, limit: int | None, made: Rows) -> None:
    """Add the first rows of a dataset, as many as ``limit`` and ``num_samples`` allow."""
    limits = [int(number) for number in (limit, dataset.entry.get("num_samples")) if number]
    max_rows = min(limits, default=None)
    rows = chain.from_iterable(_rows_of(file) for file in dataset.files)
    for number, row in enumerate(rows):
        if max_rows is not None and number >= max_rows:
            return
        if number == 0:
            _check_first(dataset, row)
        converted = _converted(dataset, row, stage)
        if converted is None:
            made.dropped += 1
        else:
            made.rows.append(converted)


def _check_first(dataset: Dataset, row: Row) -> None:
    """Raise ConfigError if the first row lacks a column, or has roles that no tag names.

    LLaMA-Factory drops such rows, which are all of them.
    """
    is_alpaca = dataset.form == "alpaca"
    column = dataset.column("prompt" if is_alpaca else "messages")
    if column not in row:
        listed = ", ".join(map(str, row))
        raise ConfigError(
            f"dataset {dataset.name}: no column {column!r}{nearest(str(column), map(str, row))}"
            f" (found: {listed}); name it in columns of {INFO}"
        )
    tags = dataset.tags
    turns = row[column]
    if is_alpaca or not isinstance(turns, list):
        return
    named_roles = [tags[name] for name in tags if name not in ("role_tag", "content_tag")]
    roles = [turn.get(tags["role_tag"]) for turn in turns if isinstance(turn, dict)]
    unknown = next((role for role in roles if role not in named_roles), None)
    if unknown:
        raise ConfigError(
            f"dataset {dataset.name}: the role {unknown!r} is none of its tags"
            f" ({', '.join(named_roles)}); name it in tags of {INFO}"
        )


def _rows_of(file: Path) -> Iterator[Row]:
    """Yield the rows of a file. Raises ConfigError, one line."""
    try:
        yield from _parsed(file)
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"file {file}: cannot be read: {' '.join(str(error).split())}") from None


def _parsed(file: Path) -> Iterable[Row]:
    """Return the rows of a file; raises ValueError for a value that is no row."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        return list(pq.read_table(file).to_pylist())
    text = file.read_text(encoding="utf-8-sig")
    if file.suffix == ".csv":
        return list(csv.DictReader(text.splitlines(keepends=True)))
    try:
        tree = json.loads(text)
    except ValueError:
        tree = [json.loads(line) for line in text.splitlines() if line.strip()]
    # A file of JSON lines with one line is read as one value.
    rows = tree if isinstance(tree, list) else [tree]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is no object with columns")
    return rows


def _converted(dataset: Dataset, row: Row, stage: str) -> Row | None:
    """Return a row as distcore's task takes it; ``None`` for one that LLaMA-Factory drops."""
    convert = _of_alpaca if dataset.form == "alpaca" else _of_sharegpt
    messages = convert(dataset, row)
    if messages is None:
        return None
    if dataset.is_ranking:
        return _pair(dataset, row, messages)
    if not messages:
        return None
    if stage == "pt":
        return {"text": "\n".join(message["content"] for message in messages)}
    # There is nothing to learn from a conversation that ends with a question.
    if messages[-1]["role"] != "assistant":
        return None
    tools = row.get(dataset.column("tools") or "")
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def _of_alpaca(dataset: Dataset, row: Row) -> list[Row] | None:
    """Return the messages of a row of alpaca; of pairs without an answer."""
    values = {}
    for name in ("prompt", "query", "response", "system", "history"):
        values[name] = row.get(dataset.column(name) or "")
    parts_of_question = [str(values[name]) for name in ("prompt", "query") if values[name]]
    if not parts_of_question:
        return None
    messages = []
    if values["system"]:
        messages.append({"role": "system", "content": str(values["system"])})
    for question, answer in values["history"] or []:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": "\n".join(parts_of_question)})
    if values["response"] and not dataset.is_ranking:
        messages.append({"role": "assistant", "content": str(values["response"])})
    return messages


def _of_sharegpt(dataset: Dataset, row: Row) -> list[Row] | None:
    """Return the messages of a row of ShareGPT; ``None`` if its turns do not alternate."""
    tags = dataset.tags
    turns = row.get(dataset.column("messages") or "")
    if not isinstance(turns, list) or not turns:
        return None
    roles_of_questions = (tags["user_tag"], tags["observation_tag"])
    roles_of_answers = (tags["assistant_tag"], tags["function_tag"])
    messages: list[Row] = []
    system = row.get(dataset.column("system") or "")
    for turn in turns:
        if not isinstance(turn, dict):
            return None
        role = turn.get(tags["role_tag"])
        text = turn.get(tags["content_tag"])
        if role == tags["system_tag"] and not messages:
            system = text
            continue
        # The first is a question, and then they alternate, as in LLaMA-Factory.
        expected = roles_of_answers if len(messages) % 2 else roles_of_questions
        if role not in expected or not isinstance(text, str):
            return None
        messages.append(_message(tags, str(role), text))
    if system:
        messages.insert(0, {"role": "system", "content": str(system)})
    return messages


def _message(tags: Tree, role: str, text: str) -> Row:
    """Return one turn with OpenAI's roles; the JSON of a function's call becomes tool calls."""
    if role == tags["function_tag"]:
        try:
            calls = json.loads(text)
        except ValueError:
            return {"role": "assistant", "content": text}
        functions = calls if isinstance(calls, list) else [calls]
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": call} for call in functions],
        }
    roles = {tags["user_tag"]: "user", tags["observation_tag"]: "tool"}
    return {"role": roles.get(role, "assistant"), "content": text}


def _pair(dataset: Dataset, row: Row, messages: list[Row]) -> Row | None:
    """Return prompt and both answers as texts. Raises ConfigError for a prompt of several turns."""
    texts = []
    for name in ("chosen", "rejected"):
        answer = row.get(dataset.column(name) or "")
        # In ShareGPT's form an answer is a turn, in alpaca's a text.
        if isinstance(answer, dict):
            answer = answer.get(dataset.tags["content_tag"])
        texts.append(answer)
    if not messages or not all(isinstance(text, str) and text for text in texts):
        return None
    if len(messages) > 1:
        turns = " and ".join(dict.fromkeys(message["role"] for message in messages))
        raise ConfigError(
            f"dataset {dataset.name}: a prompt has several messages ({turns}), but a row of"
            " preferences is of texts: write the prompt as the chat template does, and name the"
            " file by data"
        )
    chosen, rejected = texts
    return {"prompt": messages[0]["content"], "chosen": chosen, "rejected": rejected}
