"""Read the sources: files that are given or named by others, and the arguments of a script."""

from __future__ import annotations

from collections.abc import Sequence

from distcore import ConfigError
from distcore_migrate import (
    accelerate_config,
    deepspeed_config,
    fsdp_config,
    training_arguments,
)
from distcore_migrate.command_line import Command
from distcore_migrate.draft import OFF, Draft, Tree, written
from distcore_migrate.libraries import LIBRARIES, read_job
from distcore_migrate.scripts import Script, rows_of
from distcore_migrate.sources import format_of, read_tree

LOOP_DEFAULTS: Tree = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
}
"""Defaults of the arguments of the scripts without Trainer."""
OF_TRAINER = frozenset(
    {
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "num_train_epochs",
        "eval_strategy",
        "evaluation_strategy",
        "save_strategy",
        "fsdp",
        "lr_scheduler_type",
        "gradient_checkpointing",
        "logging_strategy",
    }
)
"""Arguments by which a script is known to train with the Trainer, and to have its defaults."""


def read_files(
    draft: Draft, files: Sequence[str], command: Command | None
) -> tuple[Tree, Script | None]:
    """Read the given files and the files that they name.

    Return arguments, and the script if a file implies one.
    """
    arguments: Tree = {}
    launched: Tree = {}
    script: Script | None = None
    for file in files:
        tree = read_tree(file)
        kind = format_of(tree, file)
        if kind in ("TrainingArguments", "TRL", *LIBRARIES):
            given, own = read_job(tree, kind, file)
            arguments |= given
            script = own or script
        elif kind == "accelerate config":
            launched = together(launched, tree, f"in {file}", "in another file of accelerate")
        else:
            draft.keep("deepspeed", file, file)
    if command is not None and (asked := command.flags_of("accelerate")) is not None:
        flags = dict(asked)
        if file := flags.pop("config_file", None):
            draft.note("idle", f"config_file = {file}", "read here")
            launched |= read_tree(str(file))
        elif not flags and not launched:
            draft.note("open", "accelerate's default file", "it is not read: give it, too")
        flags = accelerate_config.tree_of(flags)
        for name in flags.keys() & launched.keys():
            draft.note(
                "idle",
                written(name, launched[name]),
                "the flag of accelerate launch goes before the file",
            )
        launched |= flags
    if launched:
        accelerate_config.read(draft, launched)
    return arguments, script


def together(
    arguments: Tree, given: Tree, where: str = "on the command line", before: str = "in the file"
) -> Tree:
    """Return the keys of two sources, ``before`` and ``where``; raises ConfigError where
    they say different things.
    """
    for name in arguments.keys() & given.keys():
        if arguments[name] != given[name]:
            raise ConfigError(
                f"{name} = {given[name]!r} {where}, but {arguments[name]!r} {before}: make them"
                " equal or leave one out"
            )
    return arguments | given


def read_arguments(
    draft: Draft, arguments: Tree, command: Command | None, script: Script | None
) -> bool:
    """Put the arguments, and the defaults of who reads them, into the draft; return True if
    that is a Trainer.
    """
    rows = rows_of(script)
    if command is not None and script is None:
        arguments = _known(draft, arguments, command.name)
    has_trainer = bool(arguments) if command is None else bool(arguments.keys() & OF_TRAINER)
    training_arguments.read(draft, arguments, rows)
    _read_deepspeed(draft)
    if script is not None:
        training_arguments.fill(draft, script.defaults, rows, "the script's")
        _read_deepspeed(draft)
    if script is not None and not script.trainer:
        if script.needs_task:
            return False
        training_arguments.fill(draft, LOOP_DEFAULTS, rows, "the script's")
    elif script is not None or has_trainer:
        training_arguments.fill(draft, training_arguments.DEFAULTS, rows, "default")
    _read_fsdp(draft)
    return has_trainer


def _known(draft: Draft, arguments: Tree, name: str) -> Tree:
    """Return the arguments that a Trainer or DeepSpeed has; of an unknown script, the
    others are its own.
    """
    rows = {**training_arguments.ROWS, **rows_of(None)}
    for key in [key for key in arguments if key not in rows]:
        draft.note(
            "none",
            written(key or "argument", arguments[key]),
            f"an argument of {name}, which is not known",
        )
    return {key: value for key, value in arguments.items() if key in rows}


def _read_deepspeed(draft: Draft) -> None:
    path_or_tree = draft.take("deepspeed")
    if path_or_tree in OFF or draft.take("deepspeed_read") == path_or_tree:
        draft.note_fact("off", "deepspeed") if path_or_tree in OFF else None
        return
    draft.keep("deepspeed_read", path_or_tree, draft.origin("deepspeed"))
    tree = path_or_tree if isinstance(path_or_tree, dict) else read_tree(str(path_or_tree))
    source = path_or_tree if isinstance(path_or_tree, str) else "deepspeed"
    deepspeed_config.read(draft, tree, source)


def _read_fsdp(draft: Draft) -> None:
    words, config = draft.take("fsdp"), draft.take("fsdp_config")
    if words in OFF:
        for name in (
            "fsdp",
            "fsdp_config",
            "fsdp_min_num_params",
            "fsdp_transformer_layer_cls_to_wrap",
        ):
            draft.note_fact("off", name)
        return
    fsdp_config.read_words(draft, words)
    tree = read_tree(config) if isinstance(config, str) and config else config or {}
    beside = ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
    fsdp_config.read(
        draft, {name: draft.take(name) for name in beside if name in draft.facts}, "fsdp_"
    )
    fsdp_config.read(draft, tree, "fsdp_config.")
