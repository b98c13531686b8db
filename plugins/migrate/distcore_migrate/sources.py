"""Files that are given: read as JSON or YAML, and known by their keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from distcore import ConfigError
from distcore_migrate import accelerate_config, deepspeed_config, training_arguments
from distcore_migrate.draft import Tree
from distcore_migrate.fsdp_config import ROWS as FSDP_KEYS
from distcore_migrate.scripts import rows_of

SECTIONS = {"deepspeed_config", "fsdp_config"}
KEYS: dict[str, set[str]] = {
    "accelerate config": {*accelerate_config.ROWS, *SECTIONS} - {"debug"},
    "DeepSpeed JSON": set(deepspeed_config.ROWS),
    "TrainingArguments": {*training_arguments.ROWS, *rows_of(None)},
}
"""Formats, with the keys at the top of their files."""
MARKS: dict[str, set[str]] = {
    "Axolotl": {"base_model"},
    "LLaMA-Factory": {"finetuning_type", "cutoff_len", "infer_backend", "export_dir"},
    "TRL": {
        "dataset_text_field",
        "use_peft",
        "assistant_only_loss",
        "completion_only_loss",
        "dataset_train_split",
    },
}
"""Keys by which a file of another library is known, which no other one has."""


def read_tree(file: str) -> Tree:
    """Return the keys and values of a JSON or YAML file; raises ConfigError, one line."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        hint = (
            "; print TrainingArguments.to_json_string() into a file"
            if Path(file).suffix == ".bin"
            else ""
        )
        raise ConfigError(f"file {file}: cannot be read: {reason}{hint}") from None
    tree = _parsed(text, file)
    if isinstance(tree, str) and "slots=" in tree:
        raise ConfigError(
            f"file {file}: is a hostfile; give it by its command: -- deepspeed --hostfile {file} …"
        )
    if not isinstance(tree, dict):
        kinds = (
            "a DeepSpeed JSON, the YAML of accelerate, TRL, Axolotl, LLaMA-Factory or Lightning,"
            " TrainingArguments"
        )
        raise ConfigError(f"file {file}: has no keys and values; taken are {kinds}")
    return tree


def _parsed(text: str, file: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        problem = f"file {file}: not valid JSON: {error}"
    try:
        return yaml.safe_load(text)  # JSON with comments, too
    except yaml.YAMLError as error:
        if Path(file).suffix == ".json":
            raise ConfigError(problem) from None
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise ConfigError(f"file {file}{where}: neither JSON nor YAML: {problem}") from None


def format_of(tree: Tree, file: str) -> str:
    """Return the format whose keys the file has.

    Raises ConfigError if less than half of the keys are of one format.
    """
    for name, keys in MARKS.items():
        if keys & tree.keys():
            return name
    sections_of_lightning = (tree.get("trainer"), tree.get("fit"))
    if any(isinstance(section, dict) for section in sections_of_lightning):
        return "Lightning"
    if {"model_type", "architectures"} <= tree.keys():
        raise ConfigError(
            f"file {file}: describes a model; it trains by distcore train --model FOLDER, where it"
            " lies"
        )
    known_keys = {name: len(keys & tree.keys()) for name, keys in KEYS.items()}
    best = max(known_keys, key=lambda name: known_keys[name])
    keys_without_prefix = {key.removeprefix("fsdp_") for key in tree}
    if not known_keys[best] and keys_without_prefix <= FSDP_KEYS.keys():
        raise ConfigError(
            f"file {file}: has keys of FSDP alone; give it by its command: -- … --fsdp_config"
            f" {file}"
        )
    if not known_keys[best] or 2 * known_keys[best] < len(tree):
        formats = (
            "TrainingArguments as JSON, an accelerate config, a DeepSpeed JSON, YAML of TRL,"
            " Axolotl, LLaMA-Factory and Lightning"
        )
        raise ConfigError(
            f"file {file}: unknown format; known are {formats}, and behind -- a command line"
        )
    return best
