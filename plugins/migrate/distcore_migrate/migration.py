"""All sources together: read, completed, and made into one config that loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distcore import ConfigError, RunConfig
from distcore_migrate import accelerate_config, deepspeed_config, fsdp_config, steps, task_data, training_arguments
from distcore_migrate.command_line import Command, parse, read_launcher
from distcore_migrate.draft import OFF, Draft, Tree, written
from distcore_migrate.migration_page import nested, page
from distcore_migrate.scripts import Script, finish_no_trainer, rows_of
from distcore_migrate.sources import format_of, read_tree

LOOP_DEFAULTS: Tree = {
    "per_device_train_batch_size": 8, "num_train_epochs": 3, "learning_rate": 5e-5, "weight_decay": 0.0,
}  # fmt: skip
"""Defaults of the arguments of the scripts without Trainer."""
PER_TOKEN = ("causal-lm", "masked-lm", "seq2seq", "token-classification")
"""Tasks whose loss is a mean over tokens."""


@dataclass(frozen=True, slots=True)
class Migration:
    """A config that does what the sources say."""

    text: str
    """The config file: YAML, with comments."""
    config: RunConfig
    """What it loads as."""
    no_equal: tuple[str, ...]
    """The keys that have no equal, with their values."""
    differs: tuple[str, ...]
    """The keys that mean something else."""


def migrate(files: Sequence[str], words: Sequence[str], nproc: int | None = None) -> Migration:
    """Translate files and a command line, as the words that a shell would give, into one config.

    ``nproc``: the processes on all machines, where no source says them. Raises ConfigError, one line.
    """
    if not files and not words:
        raise ConfigError("migrate: give files, or a command line behind --, such as -- python run_glue.py --do_train")
    draft, command = Draft(), parse(words) if words else None
    sources = [*([f"the command line of {command.name}.py"] if command else []), *files]
    script = command.script if command else None
    arguments = _read_files(draft, files, command)
    if command is not None:
        read_launcher(draft, command)
        arguments = _together(arguments, command.arguments)
    _read_arguments(draft, arguments, script)
    _complete(draft, arguments, script, nproc)
    for name, found in draft.facts.items():
        if name not in draft.translated:
            draft.note("idle", found.origin, "says nothing by itself here")
    config = RunConfig.model_validate(nested(draft), context={"source": "migrate", "changes": ()})
    return Migration(
        text=page(draft, sources),
        config=config,
        no_equal=tuple(note.about for note in draft.notes if note.kind == "none"),
        differs=tuple(note.about for note in draft.notes if note.kind == "differs"),
    )


def _read_files(draft: Draft, files: Sequence[str], command: Command | None) -> Tree:
    """Read the files that are given or named by others; return the arguments for the Trainer."""
    arguments: Tree = {}
    launched: Tree = {}
    for file in files:
        tree = read_tree(file)
        kind = format_of(tree, file)
        if kind == "TrainingArguments":
            arguments |= tree
        elif kind == "accelerate config":
            launched |= tree
        else:
            draft.keep("deepspeed", file, file)
    if command is not None and command.launcher == "accelerate":
        flags = dict(command.launcher_flags)
        if file := flags.pop("config_file", None):
            draft.note("idle", f"config_file = {file}", "read here")
            launched |= read_tree(str(file))
        elif not flags and not launched:
            draft.note("open", "accelerate's default file", "it is not read: give it, too")
        flags = accelerate_config.tree_of(flags)
        for name in flags.keys() & launched.keys():
            draft.note("idle", written(name, launched[name]), "the flag of accelerate launch goes before the file")
        launched |= flags
    if launched:
        accelerate_config.read(draft, launched)
    return arguments


def _together(arguments: Tree, given: Tree) -> Tree:
    """Return the arguments of a file and of a command line; raises ConfigError where they say different things."""
    for name in arguments.keys() & given.keys():
        if arguments[name] != given[name]:
            raise ConfigError(
                f"{name} = {given[name]!r} on the command line, but {arguments[name]!r} in the file: make them "
                "equal or leave one out"
            )
    return arguments | given


def _read_arguments(draft: Draft, arguments: Tree, script: Script | None) -> None:
    """Put the arguments, and the defaults of who reads them, into the draft."""
    own = rows_of(script)
    training_arguments.read(draft, arguments, own)
    _read_deepspeed(draft)
    if script is not None:
        training_arguments.fill(draft, script.defaults, own, "the script's")
    if script is not None and not script.trainer:
        training_arguments.fill(draft, LOOP_DEFAULTS, own, "the script's")
    elif script is not None or arguments:
        training_arguments.fill(draft, training_arguments.DEFAULTS, own, "default")
    _read_fsdp(draft)


def _read_deepspeed(draft: Draft) -> None:
    given = draft.take("deepspeed")
    if given in OFF:
        draft.note_fact("off", "deepspeed")
        return
    tree = given if isinstance(given, dict) else read_tree(str(given))
    deepspeed_config.read(draft, tree, str(given) if isinstance(given, str) else "deepspeed")


def _read_fsdp(draft: Draft) -> None:
    words, config = draft.take("fsdp"), draft.take("fsdp_config")
    if words in OFF:
        for name in ("fsdp", "fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"):
            draft.note_fact("off", name)
        return
    fsdp_config.read_words(draft, words)
    tree = read_tree(config) if isinstance(config, str) and config else config or {}
    beside = ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
    fsdp_config.read(draft, {name: draft.take(name) for name in beside if name in draft.facts}, "fsdp_")
    fsdp_config.read(draft, tree, "fsdp_config.")


def _complete(draft: Draft, arguments: Tree, script: Script | None, nproc: int | None) -> None:
    """Make keys of all facts, in the order of a config's reader: task, strategy, batches, steps, evaluation."""
    task = script.task if script else None
    if task is not None:
        draft.set("task", task, "the script")
    with_arguments = script is not None or bool(arguments)
    task_data.model(draft, task)
    task_data.data(draft, task)
    task_data.columns(draft, task)
    task_data.options(draft, task)
    steps.precision(draft)
    reads_batch = with_arguments or "deepspeed" in draft.facts
    ranks = steps.batch(draft, nproc, reads_batch)
    _strategy(draft, ranks, with_arguments)
    steps.ddp(draft)
    total = steps.length(draft)
    steps.schedule(draft, total)
    steps.betas(draft)
    steps.optimizer_options(draft)
    if script is not None and not script.trainer:
        finish_no_trainer(draft)
    elif with_arguments:
        steps.evaluation(draft, total)
    _remarks(draft, script, with_arguments)


def _strategy(draft: Draft, ranks: int, with_arguments: bool) -> None:
    kind = draft.take("kind")
    if kind == "deepspeed" or _asks(draft, "deepspeed"):
        deepspeed_config.choose(draft, draft.origin("deepspeed", "kind"), with_arguments)
    elif kind == "fsdp" or _asks(draft, "fsdp"):
        fsdp_config.choose(draft, draft.origin("kind", "fsdp"))
    elif ranks > 1 or kind == "ddp":
        draft.set("strategy", "ddp", draft.origin("kind", "processes") or "--nproc")
    if int(draft.take("machines", 1)) > 1:
        draft.note_fact("differs", "machines", "no key of the config: start with --launcher torchrun:HOST:PORT "
                        "--nodes N --nproc P on each machine, or by torchrun as before")  # fmt: skip
    elif ranks > 1:
        draft.set("nproc", ranks, draft.origin("processes") or "--nproc")
    draft.note_fact("off", "machines")


def _asks(draft: Draft, name: str) -> bool:
    return name in draft.facts and draft.facts[name].value not in OFF


def _remarks(draft: Draft, script: Script | None, with_arguments: bool) -> None:
    """Say what no key says: what differs in the way of training, and what is left open."""
    if script is None and not any(key.startswith("task_options.") for key in draft.values):
        draft.note("open", "task, model, data", "say them in the file, or by --task, --model and --data")
    if script is not None and script.trainer and not _asks(draft, "do_train"):
        draft.note("differs", "do_train, not given", "the script would train nothing; this config trains")
    for text in script.differs if script else ():
        draft.note("differs", "the script", text)
    draft.note_fact("idle", "do_predict", "a run ends with the test of test_data, or of the evaluation rows")
    draft.note_fact("idle", "do_train", "that is what distcore train does")
    draft.note_fact("idle", "average_tokens", "a mean is always over all ranks")
    if script.task in PER_TOKEN if script else with_arguments:
        draft.note("differs", "loss of tokens", "here the exact mean over all tokens of the global batch. That of the "
                   "Trainer is so from 4.46 on, over ranks with average_tokens_across_devices; before, and in loops of "
                   "one's own, it is a mean of the means of micro-batches and ranks")  # fmt: skip
    if with_arguments or _asks(draft, "deepspeed"):
        draft.note("differs", "rows", "each is trained on once in an epoch and evaluated once, also where a "
                   "DistributedSampler would repeat some; dropout is the model's own, drawn per rank")  # fmt: skip
