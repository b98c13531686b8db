"""Axolotl: its YAML, with its own names for the acts of the Trainer."""

from __future__ import annotations

from typing import Any

from distcore_migrate import lora_rules, preferences, trl
from distcore_migrate.argument_rules import OPTIMIZERS
from distcore_migrate.draft import (
    OFF,
    Draft,
    Rule,
    Tree,
    fact,
    instead,
    no_effect,
    none,
    to,
    whole,
    written,
)
from distcore_migrate.script import LoraDefaults, Script

ALPACA = {"task_options.columns.prompt": "instruction", "task_options.columns.completion": "output"}
COLUMNS_OF_PAIRS = {
    "intel": ("question", "chosen", "rejected"),
    "icr": ("input", "chosen", "rejected"),
    "argilla": ("instruction", "chosen_response", "rejected_response"),
    "prompt_pairs": ("prompt", "chosen", "rejected"),
    "ultra": ("prompt", "chosen", "rejected"),
}
"""Last part of ``type`` of a dataset of preferences to its columns prompt, chosen and rejected."""
FIELDS = ("field_prompt", "field_chosen", "field_rejected")
DATASET_KEYS = (
    "path",
    "data_files",
    "split",
    "type",
    "field",
    "field_messages",
    "name",
    "ds_type",
)
"""Keys of one dataset that become columns or data here, or only say how its file is read."""
FILES = (".json", ".jsonl", ".csv", ".parquet", ".txt")
QUANTIZED_STATE = (
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "adamw_torch_8bit",
)
"""Optimizers of Axolotl with AdamW's mathematics and a smaller state."""


def _datasets(draft: Draft, name: str, value: Any, of_pairs: bool = False) -> None:
    """Set the first dataset, by path and form; note that the others are no data of this run."""
    first, *others = value if isinstance(value, list) and value else [{}]
    first = first if isinstance(first, dict) else {"path": first}
    path = first.get("path") or first.get("data_files")
    if not path:
        draft.note("open", name, "no path: give --data")
        return
    draft.set("task_options.data", _source(first, path), name)
    split = str(first.get("split") or "train")
    if "[" in split:
        draft.note(
            "none",
            f"{name}.split = {split}",
            "a part of a split: save_to_disk it and give FOLDER@SPLIT",
        )
    translated = set(DATASET_KEYS)
    if of_pairs:
        _columns_of_pairs(draft, name, first)
        translated.update(FIELDS)
    else:
        _form(draft, name, first)
    for key in first.keys() - translated:
        draft.note(
            "none",
            written(f"{name}.{key}", first[key]),
            "rows are taken as their columns have them",
        )
    for other in others:
        path_of_other = other.get("path") if isinstance(other, dict) else other
        draft.note(
            "none",
            f"{name}: {path_of_other}",
            "a run has one source of rows: put files side by side, --data a.jsonl,b.jsonl",
        )


def _source(dataset: Tree, path: object) -> str:
    """Return a file, or ``NAME:CONFIG@SPLIT`` of the hub, for one entry of ``datasets``."""
    files = dataset.get("data_files")
    if isinstance(files, list) and files:
        return str(files[0])
    if files or str(path).endswith(FILES):
        return str(files or path)
    config = f":{dataset['name']}" if dataset.get("name") else ""
    split, _, _ = str(dataset.get("split") or "train").partition("[")
    return f"{path}{config}@{split}"


def _form(draft: Draft, name: str, first: Tree) -> None:
    """Set the columns of a dataset by the form of its rows, Axolotl's ``type``."""
    kind = str(first.get("type", ""))
    if kind.startswith("alpaca"):
        for key, column in ALPACA.items():
            draft.set(key, column, f"{name}.type = {kind}")
        draft.note(
            "differs",
            f"{name}.type = {kind}",
            "the prompt is the instruction alone, without alpaca's sentence "
            "around it and without the column input",
        )
    elif kind.startswith("chat_template"):
        draft.set(
            "task_options.columns.messages",
            str(first.get("field_messages", "messages")),
            f"{name}.type",
        )
        draft.set("task_options.form", "messages", f"{name}.type")
    elif kind in ("completion", "pretrain"):
        draft.set("task_options.columns.text", str(first.get("field", "text")), f"{name}.type")
    else:
        draft.note(
            "none", f"{name}.type = {kind}", "rows are texts, prompts with completions, or messages"
        )


def _columns_of_pairs(draft: Draft, name: str, first: Tree) -> None:
    """Set the columns of a dataset of preferences, by their names or by the form of its rows."""
    kind = first.get("type", "")
    named = first | (kind if isinstance(kind, dict) else {})
    _, _, form = str(kind).rpartition(".")
    columns_of_form = COLUMNS_OF_PAIRS.get(form, (None, None, None))
    columns = ("prompt", "chosen", "rejected")
    for field, column, usual in zip(FIELDS, columns, columns_of_form, strict=True):
        column_in_data = named.get(field) or usual
        if column_in_data:
            origin = f"{name}.{field if field in named else 'type'}"
            draft.set(f"task_options.columns.{column}", str(column_in_data), origin)
    if columns_of_form[0] is None and not named.keys() & set(FIELDS):
        draft.note(
            "open",
            written(f"{name}.type", kind),
            "say columns.prompt, columns.chosen and columns.rejected where they have other names",
        )


def _pairs(draft: Draft, name: str, value: Any) -> None:
    _datasets(draft, name, value, of_pairs=True)


def _optimizer(draft: Draft, name: str, value: Any) -> None:
    """Set the optimizer; note those whose state is in 8 bits, and those that are not here."""
    if value in QUANTIZED_STATE:
        draft.set("optimizer.name", "adamw", name)
        draft.note(
            "differs",
            written(name, value),
            "with its whole state in fp32; --optimizer adamw8bit keeps it in 8 bits",
        )
    elif value in OPTIMIZERS or value in ("adamw", "muon", "lion", "sgd", "adafactor"):
        draft.set("optimizer.name", OPTIMIZERS.get(value, value), name)
    else:
        draft.note("none", written(name, value), "left at the default, adamw")


def _precision(word: str) -> Rule:
    """Return the rule of the keys ``bf16`` and ``fp16``, which switch a precision on."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        if value == "auto" and word == "bf16":
            draft.keep("launched_precision", "auto", name)
        elif value in (*OFF, "auto"):
            draft.note("off", name)
        else:
            draft.keep("precision", word, name)

    return rule


def _held_out(draft: Draft, name: str, value: Any) -> None:
    """Set the part of the rows that is kept for evaluation; Axolotl takes a number of rows, too."""
    if value and float(value) < 1:
        draft.set("task_options.eval_fraction", float(value), name)
    elif value:
        draft.note(
            "instead", written(name, value), "eval_fraction is a part of the rows, such as 0.1"
        )
    else:
        draft.note(
            "differs",
            written(name, value),
            "a part of the rows is kept for evaluation all the same",
        )


def _wandb(draft: Draft, name: str, value: Any) -> None:
    if value in OFF:
        draft.note("off", name)
    else:
        draft.set("extensions.wandb", True, name)


def _fsdp_config(draft: Draft, name: str, value: Any) -> None:
    """Keep the section, which alone asks for FSDP."""
    if value in OFF:
        draft.note("off", name)
        return
    draft.keep("fsdp_config", value, name)
    if "fsdp" not in draft.facts:
        draft.keep("fsdp", True, name)


def _fsdp(draft: Draft, name: str, value: Any) -> None:
    if value in OFF:
        draft.note("off", name)
    else:
        draft.facts.pop("fsdp", None)
        draft.keep("fsdp", value, name)


PER_EPOCH = instead("eval_every and save_every count optimizer steps")
ROWS: dict[str, Rule] = (
    trl.ROWS
    | {
        "base_model": fact("model"),
        "base_model_config": fact("config_name"),
        "model_type": no_effect("the model's config says its class"),
        "tokenizer_type": no_effect("the model's config says its tokenizer"),
        "processor_type": no_effect("a language model has no processor"),
        "tokenizer_config": fact("tokenizer_name"),
        "datasets": _datasets,
        "test_datasets": instead("--eval-data FILE"),
        "pretraining_dataset": _datasets,
        "dataset_prepared_path": trl.PREPARED,
        "val_set_size": _held_out,
        "sequence_len": to("task_options.max_seq_len", whole),
        "sample_packing": trl.PACKED,
        "eval_sample_packing": no_effect("evaluation counts each row once"),
        "pad_to_sequence_len": no_effect("padding takes no part in the loss"),
        "adapter": lora_rules.switch("lora", "qlora"),
        "lora_model_dir": none(
            "an adapter is trained from its beginning; a run goes on by --resume"
        ),
        "lora_target_linear": no_effect(
            "every linear layer but the head, unless lora_target_modules names some"
        ),
        "lora_modules_to_save": trl.ROWS["lora_modules_to_save"],
        "micro_batch_size": fact("per_device", whole),
        "batch_size": instead("micro_batch_size and gradient_accumulation_steps say it"),
        "num_epochs": fact("epochs", float),
        "optimizer": _optimizer,
        "lr_scheduler": fact("schedule"),
        "bf16": _precision("bf16"),
        "fp16": _precision("fp16"),
        "evals_per_epoch": PER_EPOCH,
        "saves_per_epoch": PER_EPOCH,
        "eval_table_size": no_effect("predictions.jsonl has every evaluated row"),
        "wandb_project": _wandb,
        "wandb_entity": no_effect("wandb's own variables say it"),
        "wandb_watch": no_effect("wandb's own variables say it"),
        "wandb_name": no_effect("the run folder names the run"),
        "wandb_log_model": no_effect("the tracker gets paths of checkpoints"),
        "special_tokens": none("the tokenizer is taken as it is in the model's folder"),
        "tokens": none("the tokenizer is taken as it is in the model's folder"),
        "chat_template": trl.TEMPLATE,
        "train_on_inputs": none(
            "of a prompt with its completion the completion counts, of messages the assistant's"
        ),
        "flash_attention": trl.KERNELS,
        "xformers_attention": trl.KERNELS,
        "plugins": trl.KERNELS,
        "strict": no_effect("keys without an equal are listed"),
        "rl": no_effect("the task says it"),
        "fsdp": _fsdp,
        "fsdp_config": _fsdp_config,
        "fsdp_version": no_effect("the strategy is FSDP2"),
        "unfrozen_parameters": instead("--freeze takes a pattern of the parameters that stay"),
        "early_stopping_patience": to("patience", whole),
    }
    | dict.fromkeys(
        (
            "liger_rope",
            "liger_rms_norm",
            "liger_glu_activation",
            "liger_layer_norm",
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
            "liger_fused_linear_cross_entropy",
        ),
        trl.KERNELS,
    )
)


LORA = LoraDefaults(8, 16.0)
DEFAULTS = {"num_epochs": 1.0, "lr_scheduler": "cosine", "sequence_len": 512, "micro_batch_size": 1}
"""Defaults of Axolotl that differ from those of TrainingArguments."""


def script_of(tree: Tree) -> Script:
    """Return the script that the YAML stands for."""
    kind = tree.get("rl") or ("reward" if tree.get("reward_model") else "")
    kind = str(kind).lower()
    if preferences.is_shipped(kind):
        rows = ROWS | {"datasets": _pairs, "reward_model": no_effect("the task says it")}
        defaults = DEFAULTS | {"disable_dropout": True}
        return preferences.script_of(kind, rows, LORA, defaults, ("loss_type", "rl_beta"))
    task = f"{kind}.py:{kind.upper()}" if kind else "causal-lm"
    return Script(task=task, rows=ROWS, defaults=DEFAULTS, lora=LORA, needs_task=bool(kind))
