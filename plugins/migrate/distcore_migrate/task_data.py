"""Model and data of a script, in the words of the task that it trains."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from distcore_migrate.columns import columns_of
from distcore_migrate.draft import Draft, written
from distcore_migrate.names import DATA_SETS, FROM_SCRATCH, full_name
from distcore_migrate.scripts import OPTIONS, Script

GLUE = {
    "cola": ("sentence", None),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence", None),
    "stsb": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}
"""Tasks of GLUE, with their columns of one text or of a pair."""
METRICS = {
    "text-classification": ("loss", "accuracy", "macro_f1"),
    "image-classification": ("loss", "accuracy", "macro_f1"),
    "token-classification": ("loss", "accuracy", "precision", "recall", "f1"),
    "causal-lm": ("loss", "perplexity", "token_accuracy"),
    "masked-lm": ("loss", "perplexity", "token_accuracy"),
    "seq2seq": ("loss", "perplexity", "token_accuracy"),
    "preference": ("loss", "accuracy", "margin"),
    "reward-model": ("loss", "accuracy", "margin"),
}
"""Metrics that ``checkpoints.best`` may name."""
SUMMARIES = {
    "abisee/cnn_dailymail": ("article", "highlights"),
    "EdinburghNLP/xsum": ("document", "summary"),
    "Samsung/samsum": ("dialogue", "summary"),
}
"""Columns that the summarization script knows by the dataset."""
DATA_FILE = re.compile(r"\.(jsonl?|csv|parquet|arrow|txt)(\.(gz|zst))?$", re.IGNORECASE)
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Splits to words in names of files, as the library ``datasets`` has them."""


def model(draft: Draft, task: str | None) -> None:
    """Set the model; a name that the hub knows without an owner gets it."""
    name, scratch = draft.take("model"), draft.take("model_type")
    if name is not None:
        full = full_name(str(name))
        draft.set(f"{OPTIONS}model", full, draft.origin("model"))
        if full != name:
            draft.note(
                "differs",
                f"{draft.origin('model')} = {name}",
                f"with its owner: {full}; without one, it would "
                "be a built-in model with random weights, or none",
            )
        draft.note_fact("idle", "model_type", "the model says it")
    elif scratch is not None:
        built_in = FROM_SCRATCH.get(scratch)
        if built_in:
            draft.set(f"{OPTIONS}model", built_in, draft.origin("model_type"))
            draft.note_fact(
                "differs",
                "model_type",
                "random weights, with a tokenizer trained on the training rows",
            )
        else:
            draft.note_fact(
                "none",
                "model_type",
                f"built-in models are {', '.join(FROM_SCRATCH)}; or give a folder",
            )
    for other in ("config_name", "tokenizer_name"):
        if draft.take(other) in (None, name):
            draft.note_fact("off", other)
        else:
            draft.note_fact("none", other, "config, tokenizer and weights are one folder")


def data(draft: Draft, script: Script | None) -> None:
    """Set the data and its columns; note where rows are kept for evaluation only here."""
    task = script.task if script else None
    if script is not None and script.data is not None:
        script.data(draft)
    glue = draft.take("glue")
    hub = draft.take("dataset")
    if glue is not None and not draft.facts.keys() & {"dataset", "train_file"}:
        _glue(draft, str(glue))
    elif hub is not None:
        _hub(draft, str(hub), script)
    else:
        draft.note_fact("idle", "glue", "train_file says the data")
        _files(draft)
    percentage = draft.take("validation_percentage")
    if f"{OPTIONS}eval_data" not in draft.values:
        if percentage:
            draft.set(
                f"{OPTIONS}eval_fraction", percentage / 100, draft.origin("validation_percentage")
            )
        if f"{OPTIONS}data" in draft.values and task is not None:
            draft.note(
                "differs",
                "no validation data",
                "a part of data is kept for evaluation (eval_fraction) and not "
                "trained on; eval_data takes other rows",
            )
    else:
        draft.note_fact("off", "validation_percentage")


def _glue(draft: Draft, task_name: str) -> None:
    """Set the data and columns of a task of GLUE, whatever the case of its name."""
    draft.note_fact("idle", "dataset_config", "task_name says it")
    origin = draft.origin("glue")
    name = task_name.lower()
    if name not in GLUE:
        draft.note_fact("none", "glue", f"tasks of GLUE are {', '.join(GLUE)}")
        return
    # MNLI has two validation sets; the script reports this one as the model's.
    held_out = "validation_matched" if name == "mnli" else "validation"
    draft.set(f"{OPTIONS}data", f"nyu-mll/glue:{name}@train", origin)
    draft.set(f"{OPTIONS}eval_data", f"nyu-mll/glue:{name}@{held_out}", origin)
    for column, name_in_data in zip(("text", "text_pair"), GLUE[name], strict=True):
        if name_in_data:
            draft.set(f"{OPTIONS}columns.{column}", name_in_data, origin)
    if name == "stsb":
        draft.set(f"{OPTIONS}problem_type", "regression", origin)


def _hub(draft: Draft, name: str, script: Script | None) -> None:
    """Set a dataset of the hub, or the files of a folder, as ``datasets`` reads both."""
    evaluates_in_training = script is not None and script.evaluates_in_training
    eval_strategy = str(draft.value("eval_strategy", "no"))
    is_evaluated = not evaluates_in_training or eval_strategy != "no"
    if not is_evaluated:
        draft.note_fact(
            "idle", "validation_split", "eval_strategy is no: the script evaluates nothing"
        )
    if _is_path(name):
        _folder(draft, Path(name).expanduser(), is_evaluated)
        return
    for file in ("train_file", "validation_file", "test_file"):
        draft.note_fact("idle", file, "the script takes the dataset")
    full = DATA_SETS.get(name, name)
    if "/" not in full:
        draft.note_fact("none", "dataset", "a name of the hub is OWNER/NAME")
    config = draft.take("dataset_config")
    base = f"{full}:{config}" if config else full
    origin = draft.origin("dataset", "dataset_config")
    train = draft.take("train_split", "train")
    held_out = draft.take("validation_split", "validation")
    origin_of_train = draft.origin("dataset", "dataset_config", "train_split")
    draft.set(f"{OPTIONS}data", f"{base}@{train}", origin_of_train)
    if is_evaluated:
        origin_of_held_out = draft.origin("dataset", "dataset_config", "validation_split")
        draft.set(f"{OPTIONS}eval_data", f"{base}@{held_out}", origin_of_held_out)
    is_summary = script is not None and script.task == "seq2seq" and full in SUMMARIES
    if is_summary and not draft.facts.keys() & {"source_column", "target_column"}:
        _set_pair(draft, SUMMARIES[full], origin)


def _is_path(name: str) -> bool:
    """Return True for a folder or a file, which ``datasets`` prefers to a name of the hub."""
    return name.startswith((".", "/", "~")) or Path(name).exists()


def _folder(draft: Draft, folder: Path, is_evaluated: bool) -> None:
    """Set the files of a folder; those with the name of a split in theirs are its rows."""
    for file in ("train_file", "validation_file", "test_file"):
        draft.note_fact("idle", file, "the script takes the dataset")
    draft.note_fact("none", "dataset_config", "a folder is read as its files are")
    origin = draft.origin("dataset", "train_split")
    train = str(draft.take("train_split", "train"))
    held_out = str(draft.take("validation_split", "validation"))
    if (folder / "dataset_dict.json").is_file():
        draft.set(f"{OPTIONS}data", f"{folder}@{train}", origin)
        rows_of_evaluation = f"{folder}@{held_out}" if (folder / held_out).is_dir() else ""
    else:
        by_split = _files_by_split(folder)
        if not by_split:
            draft.note(
                "open",
                written(draft.origin("dataset"), folder),
                "no data files are there: check the path",
            )
        # Files of no split are all rows, which the library calls train.
        training_files = ",".join(by_split.get(train, ()))
        draft.set(f"{OPTIONS}data", training_files or str(folder), origin)
        rows_of_evaluation = ",".join(by_split.get(held_out, ()))
    if rows_of_evaluation and is_evaluated:
        draft.set(
            f"{OPTIONS}eval_data", rows_of_evaluation, draft.origin("dataset", "validation_split")
        )
    elif is_evaluated:
        draft.note_fact("none", "validation_split", f"{folder} has no such files")


def _files_by_split(folder: Path) -> dict[str, list[str]]:
    """Return the data files of a folder by split, which words in their names say.

    The library ``datasets`` takes them so, too.
    """
    if folder.is_file():
        return {"train": [str(folder)]}
    files = _data_files(folder) or _data_files(folder / "data")
    by_split: dict[str, list[str]] = {}
    for file in files:
        by_split.setdefault(_split_of(file), []).append(str(file))
    files_without_split = by_split.pop("", [])
    if files_without_split and "train" not in by_split:
        by_split["train"] = files_without_split
    return by_split


def _data_files(folder: Path) -> list[Path]:
    """Return the data files directly in a folder, in order; none if it is not there."""
    return sorted(path for path in folder.glob("*") if DATA_FILE.search(path.name))


def _split_of(file: Path) -> str:
    """Return the split that a word in a file's name says; empty: none does."""
    words = set(re.split(r"[^a-z0-9]+", file.name.lower()))
    for split, names in SPLIT_WORDS.items():
        if words & set(names):
            return split
    return ""


def _files(draft: Draft) -> None:
    """Set the files of training, evaluation and test that the script is given."""
    draft.note_fact("idle", "dataset_config", "there is no dataset_name")
    for name, option in (("train_file", "data"), ("validation_file", "eval_data")):
        file = draft.take(name)
        if file:
            draft.set(f"{OPTIONS}{option}", str(file), draft.origin(name))
    test = draft.take("test_file")
    if test and draft.take("do_predict", True):
        draft.set(f"{OPTIONS}test_data", str(test), draft.origin("test_file"))
        draft.note_fact(
            "differs", "test_file", "its rows need labels; for rows without, distcore predict RUN"
        )
    elif test:
        draft.note_fact("idle", "test_file", "do_predict is off")


def columns(draft: Draft, task: str | None) -> None:
    """Set the columns that the script looks up in its file, or takes by their position."""
    file = draft.facts.get("train_file")
    in_file = None
    if file is not None and "dataset" not in draft.facts:
        in_file = columns_of(str(file.value))
    if task == "text-classification":
        _text_columns(draft, in_file)
    elif task in ("causal-lm", "masked-lm"):
        column = draft.take("text_column")
        # Without a column named text, the scripts take the first one.
        if not column and in_file and "text" not in in_file:
            column = in_file[0]
        if column:
            origin = draft.origin("text_column") or "the first column"
            draft.set(f"{OPTIONS}columns.text", str(column), origin)
    elif task == "seq2seq":
        _seq2seq_columns(draft, in_file)
    elif task == "token-classification":
        _tagged_columns(draft, in_file)


def _text_columns(draft: Draft, in_file: list[str] | None) -> None:
    """Set the columns of one text or two; ``in_file``: those of a file that can be read here."""
    if draft.take("regression"):
        draft.set(f"{OPTIONS}problem_type", "regression", draft.origin("regression"))
    else:
        draft.note_fact("off", "regression")
    named = draft.take("text_columns")
    if named is not None:
        words = [word.strip() for word in str(named).split(",")]
        # Not strict, here and below: a row may have one text, and further ones are reported.
        for column, word in zip(("text", "text_pair"), words, strict=False):
            draft.set(f"{OPTIONS}columns.{column}", word, draft.origin("text_columns"))
        if len(words) > 2:
            draft.note_fact(
                "none", "text_columns", "a row has one text or two: join the others in the file"
            )
    elif in_file is not None:
        texts = [name for name in in_file if name not in ("label", "idx", "id")]
        if {"sentence1", "sentence2"} <= set(texts):
            texts = ["sentence1", "sentence2"]
        origin = "the columns of train_file, as the script takes them"
        for column, word in zip(("text", "text_pair"), texts, strict=False):
            draft.set(f"{OPTIONS}columns.{column}", word, origin)
    elif "train_file" in draft.facts or "dataset" in draft.facts:
        draft.note(
            "open",
            "columns.text",
            "the script takes the columns beside label, which cannot be read here: say "
            "columns.text, and columns.text_pair for pairs",
        )


MULTILINGUAL = ("mbart", "m2m", "nllb", "plbart")
"""Parts of the names of models whose tokenizers write languages."""


def _seq2seq_columns(draft: Draft, in_file: list[str] | None) -> None:
    """Set source and target: of a translation by its languages, else by names or position."""
    if draft.facts.keys() & {"source_lang", "target_lang"}:
        languages = []
        for name in ("source_lang", "target_lang"):
            # mBART's en_XX is the column en.
            code, _, _ = str(draft.take(name, "")).partition("_")
            languages.append(code)
        is_flat = set(languages) <= set(in_file or [])
        # In datasets of translations, a row has one column with a text in each language.
        prefix = "" if is_flat else "translation."
        source, target = (f"{prefix}{language}" for language in languages)
        _set_pair(draft, (source, target), draft.origin("source_lang", "target_lang"))
        _codes(draft)
    elif draft.facts.keys() & {"source_column", "target_column"} or in_file:
        first, second, *_ = [*(in_file or []), "source", "target"]
        source = draft.take("source_column") or first
        target = draft.take("target_column") or second
        origin = draft.origin("source_column", "target_column") or "the first two columns"
        _set_pair(draft, (source, target), origin)
    elif f"{OPTIONS}columns.source" not in draft.values:
        draft.note(
            "open",
            "columns.source, columns.target",
            "the script takes the first two columns; say which",
        )


def _codes(draft: Draft) -> None:
    """Set the languages of a multilingual model; for another one they name columns alone."""
    model = str(draft.values.get(f"{OPTIONS}model", ""))
    model_type = model.lower()
    # Without a readable config it is a name of the hub, or a folder that train will refuse.
    with suppress(OSError, ValueError, AttributeError):
        text = (Path(model) / "config.json").read_text(encoding="utf-8")
        model_type = str(json.loads(text).get("model_type"))
    if not any(word in model_type for word in MULTILINGUAL):
        return
    for name in ("source_lang", "target_lang"):
        if name in draft.facts:
            language = str(draft.facts[name].value)
            draft.set(f"{OPTIONS}{name}", language, draft.origin(name))


def _set_pair(draft: Draft, pair: tuple[str, str], origin: str) -> None:
    """Set the columns of source and target."""
    for column, word in zip(("source", "target"), pair, strict=True):
        draft.set(f"{OPTIONS}columns.{column}", word, origin)


def _tagged_columns(draft: Draft, in_file: list[str] | None) -> None:
    """Set the columns of words and tags: those with the usual names, else the first two."""
    names = in_file or ["tokens", "ner_tags"]
    tokens = "tokens" if "tokens" in names else names[0]
    second = names[1] if len(names) > 1 else "tags"
    tags = "ner_tags" if "ner_tags" in names else second
    for column, word in (("tokens", tokens), ("tags", tags)):
        if f"{OPTIONS}columns.{column}" not in draft.values:
            draft.set(f"{OPTIONS}columns.{column}", word, "the column that the script takes")


def options(draft: Draft, task: str | None) -> None:
    """Set the task's other options: lengths, generation, label smoothing, the best metric."""
    if task == "causal-lm" and f"{OPTIONS}max_seq_len" not in draft.values:
        block = draft.take("block_size")
        draft.set(
            f"{OPTIONS}max_seq_len",
            block or 1024,
            draft.origin("block_size") or "block_size (default)",
        )
    if task == "masked-lm":
        _lines(draft)
    smoothing = draft.take("label_smoothing")
    if smoothing and task == "seq2seq":
        draft.set(f"{OPTIONS}label_smoothing", smoothing, draft.origin("label_smoothing"))
    else:
        draft.note_fact(
            "none" if smoothing else "off",
            "label_smoothing",
            "the loss of a task of your own may do it",
        )
    _generation(draft, task)
    _best(draft, task)


def _lines(draft: Draft) -> None:
    """Set whether a long text becomes several rows, and the length of a row."""
    if draft.take("line_by_line"):
        draft.set(f"{OPTIONS}split_texts", False, draft.origin("line_by_line"))
        return
    draft.note_fact("off", "line_by_line")
    draft.note(
        "differs",
        "line_by_line, not given",
        "the script joins all texts and cuts blocks; here a long text "
        "becomes several rows, and none is joined to another",
    )
    if f"{OPTIONS}max_seq_len" not in draft.values:
        draft.set(f"{OPTIONS}max_seq_len", 512, "max_seq_length (default)")


def _generation(draft: Draft, task: str | None) -> None:
    """Set the length of generated answers, if an evaluation generates any."""
    generate = draft.take("generate")
    length = draft.take("generation_length")
    longest_target = draft.values.get(f"{OPTIONS}max_target_len", 128)
    if generate and task in (None, "seq2seq"):
        origin = draft.origin("generate", "generation_length")
        draft.set(f"{OPTIONS}max_new_tokens", length or longest_target, origin)
        draft.note_fact(
            "differs", "generate", "scored by exact match, BLEU and chrF; some scripts have ROUGE"
        )
    else:
        draft.note_fact("none" if generate else "off", "generate", "an option of the task seq2seq")
        draft.note_fact(
            "idle",
            "generation_length",
            "evaluation generates nothing without predict_with_generate",
        )


def _best(draft: Draft, task: str | None) -> None:
    """Set the metric of the best checkpoint, if the task has it."""
    name = draft.take("best_metric")
    if name is None:
        return
    metric = str(name).removeprefix("eval_")
    metrics = METRICS.get(task or "text-classification", ("loss",))
    if metric in metrics:
        draft.set("checkpoints.best", metric, draft.origin("best_metric"))
    else:
        draft.note_fact(
            "none", "best_metric", f"metrics of this task: {', '.join(metrics)}; the loss is taken"
        )
