"""All sources together: read, completed, and made into one config that loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distcore import ConfigError, RunConfig
from distcore_migrate import (
    deepspeed_config,
    fsdp_config,
    lora_rules,
    preferences,
    steps,
    task_data,
    training_arguments,
)
from distcore_migrate.command_line import parse
from distcore_migrate.draft import OFF, Draft, Tree
from distcore_migrate.llama_factory_data import CHOOSE
from distcore_migrate.migration_page import nested, page
from distcore_migrate.reading import read_arguments, read_files, together
from distcore_migrate.scripts import Script, finish_no_trainer, rows_of
from distcore_migrate.starting import place, read_launcher

SAY_WHICH = "SAY-WHICH"
"""In place of a task that no source says; ``distcore train`` refuses it."""
UNKNOWN = (
    "a script that is not known. What it trains is a task: a shipped one, by --task, --model and"
    " --data, or your own, --task file.py:Class (docs/tasks.md). Arguments of a Trainer it may"
    " print by TrainingArguments.to_json_string()"
)
"""Answer to a script that no table has."""
OF_ROWS = ("text-classification", "image-classification")
"""Tasks whose loss is a mean over rows."""
PER_TOKEN = ("causal-lm", "masked-lm", "seq2seq", "token-classification")
"""Tasks whose loss is a mean over tokens."""


@dataclass(frozen=True, slots=True)
class Migration:
    """A config that does what the sources say."""

    text: str
    """The config file: YAML, with comments."""
    config: RunConfig
    """The config that the file loads as."""
    no_equal: tuple[str, ...]
    """The keys that have no equal, with their values."""
    instead: tuple[str, ...]
    """The keys whose equal is to be asked for in another way, with their values."""
    differs: tuple[str, ...]
    """The keys that mean something else."""
    start: tuple[str, ...] = ()
    """Flags of ``distcore train`` that start the ranks, and that a config cannot have."""
    choices: tuple[str, ...] = ()
    """Keys that no source says, and that a run needs: ``distcore train`` refuses the config
    before they are set.
    """
    rows: dict[Path, list[Tree]] = field(default_factory=dict)
    """Rows that the config names files for, which are to be written, by file."""


def migrate(
    files: Sequence[str], words: Sequence[str], nproc: int | None = None, out: Path | None = None
) -> Migration:
    """Translate files and a command line, as the words that a shell would give, into one config.

    ``nproc``: the processes on all machines, where no source says them. ``out``: the file of the
    config, beside which rows are written that no file has as a task reads them. Raises ConfigError,
    one line.
    """
    if not files and not words:
        raise ConfigError(
            "migrate: give files, or a command line behind --, such as -- python run_glue.py"
            " --do_train"
        )
    draft, command = Draft(), parse(words) if words else None
    sources = [*([f"the command line of {command.name}"] if command else []), *files]
    arguments, script = read_files(draft, files, command)
    script = (command.script if command else None) or script
    # Lightning's
    says_ranks = script is not None and any(key.startswith("trainer.") for key in script.rows)
    if command is not None and not says_ranks:
        read_launcher(draft, command)
    if command is not None:
        given = command.arguments  # of an unknown script as they are: so are its abbreviations
        arguments = together(
            arguments, training_arguments.in_full(given, rows_of(script)) if script else given
        )
    has_trainer = read_arguments(draft, arguments, command, script)
    if command is not None and says_ranks:
        read_launcher(draft, command)
    script = preferences.settled(draft, script)
    if command is None:
        place(draft, "")
    if script is None and (command is not None or _names_what_it_trains(draft, has_trainer)):
        draft.set(
            "task", SAY_WHICH, "no source says what is trained; distcore tasks lists the tasks"
        )
    _complete(draft, script, has_trainer, nproc)
    if command is not None and script is None:
        draft.note("open", command.name, UNKNOWN)
    elif script is not None and script.needs_task:
        draft.note(
            "open",
            "task",
            f"no shipped task trains this: write {script.task} (distcore new, docs/tasks.md), "
            "with the loss of a row; the rest of the file stands",
        )
    elif script is None and not {"task_options.model", "task_options.data"} & draft.values.keys():
        draft.note(
            "open", "task, model, data", "say them in the file, or by --task, --model and --data"
        )
    for name, fact in draft.facts.items():
        if name not in draft.translated:
            draft.note("idle", fact.origin, "says nothing by itself here")
    if "task_options.data" not in draft.values and not (script is not None and script.needs_task):
        draft.set("task_options.data", CHOOSE, "no source says it: name files here, or by --data")
        draft.note(
            "open", f"data = {CHOOSE}", "no source says the rows: name files here, or by --data"
        )
    rows = _place_rows(draft, out)
    config = RunConfig.model_validate(nested(draft), context={"source": "migrate", "changes": ()})
    return Migration(
        text=page(draft, sources),
        config=config,
        no_equal=draft.about("none"),
        instead=draft.about("instead"),
        differs=draft.about("differs"),
        start=tuple(draft.start),
        choices=tuple(
            key
            for key in ("task", "task_options.data", "task_options.eval_data")
            if _is_open(draft, key)
        ),
        rows=rows,
    )


def _is_open(draft: Draft, key: str) -> bool:
    """Return True for a key that the user has to choose."""
    return draft.values.get(key) in (CHOOSE, SAY_WHICH)


def _place_rows(draft: Draft, out: Path | None) -> dict[Path, list[Tree]]:
    """Name the files of the rows that are to be written, beside the config; without a file
    of that, say how.
    """
    placed: dict[Path, list[Tree]] = {}
    for key, rows in draft.rows.items():
        name = key.rpartition(".")[2]
        if out is None:
            remedy = "with --out FILE they are written beside the config"
            draft.note("open", f"{name} = {CHOOSE}", f"its rows have another form here: {remedy}")
            continue
        file = out.with_name(f"{out.stem}.{name}.jsonl")
        draft.values[key] = str(file)
        placed[file] = rows
        written_rows = f"{len(rows)} rows of {draft.origins[key]}, written as distcore reads them"
        draft.note("differs", f"{name} = {file}", written_rows)
    return placed


def _names_what_it_trains(draft: Draft, has_trainer: bool) -> bool:
    """Return True for arguments with a model or data of another task than
    distcore's default one, perhaps.
    """
    return has_trainer and bool(draft.facts.keys() & {"model", "dataset", "train_file"})


def _complete(draft: Draft, script: Script | None, has_trainer: bool, nproc: int | None) -> None:
    """Make keys of all facts, in the order of a config's reader: task,
    strategy, batches, steps, evaluation.
    """
    task = script.task if script else None
    if script is not None and task is not None:
        draft.set("task", task, "what the source trains")
        for key, value in script.sets.items():
            draft.set(key, value, "the script")
    with_arguments = script is not None or has_trainer
    task_data.model(draft, task)
    task_data.data(draft, script)
    task_data.columns(draft, task)
    task_data.options(draft, task)
    steps.precision(draft)
    reads_batch = with_arguments or "deepspeed" in draft.facts
    ranks = steps.batch(draft, nproc, reads_batch)
    # Without a number that is said, the sizes of the batch imply it.
    counted = (
        "--nproc"
        if nproc
        else draft.origin("global_batch", "per_device", "accumulation") or "--nproc"
    )
    _strategy(draft, ranks, draft.origin("processes") or counted, script, with_arguments)
    steps.ddp(draft)
    total = steps.length(draft)
    steps.schedule(draft, total)
    steps.betas(draft)
    if script is not None and script.lora is not None:
        lora_rules.choose(draft, script.lora)
    steps.optimizer_options(draft)
    if script is not None and not script.trainer:
        finish_no_trainer(draft, script)
    elif with_arguments:
        steps.evaluation(draft, total)
    _remarks(draft, script, with_arguments)


def _strategy(
    draft: Draft, ranks: int, of_ranks: str, script: Script | None, with_arguments: bool
) -> None:
    kind, launched = draft.take("kind"), draft.take("launched_kind")
    strategy = script.strategy if script else None
    if kind == "deepspeed" or _asks(draft, "deepspeed"):
        deepspeed_config.choose(draft, draft.origin("deepspeed", "kind"), with_arguments)
    elif kind == "fsdp" or _asks(draft, "fsdp"):
        fsdp_config.choose(draft, draft.origin("kind", "fsdp"))
    elif strategy is not None:
        draft.set("strategy", strategy, "the script")
    elif kind == "single" and ranks == 1:
        draft.set("strategy", "single", draft.origin("kind"))
    elif launched == "horovod":
        draft.set("strategy", "horovod", draft.origin("launched_kind"))
    elif ranks > 1 or kind == "ddp" or launched or "elsewhere" in draft.facts:
        draft.set(
            "strategy",
            "ddp",
            draft.origin("kind", "processes", "launched_kind")
            or draft.origin("elsewhere")
            or of_ranks,
        )
    is_said = ranks > 1 or ("processes" in draft.facts and draft.values.get("strategy"))
    if (
        is_said
        and "elsewhere" not in draft.facts
        and draft.values.get("strategy") not in ("single", "dp")
    ):
        draft.set("nproc", ranks, of_ranks)
    if "nproc" not in draft.values and "elsewhere" not in draft.facts:
        draft.note_fact("idle", "processes", "one process, or one for each device")


def _asks(draft: Draft, name: str) -> bool:
    return name in draft.facts and draft.facts[name].value not in OFF


def _remarks(draft: Draft, script: Script | None, with_arguments: bool) -> None:
    """Note the facts that no key holds: differences in training, and open questions."""
    if (
        script is not None
        and script.trainer
        and script.lora is None
        and not _asks(draft, "do_train")
    ):
        draft.note(
            "differs", "do_train, not given", "the script would train nothing; this config trains"
        )
    steps_of_one = draft.facts["accumulation"].value if "accumulation" in draft.facts else 1
    if script is not None and script.trainer and script.task in OF_ROWS and steps_of_one > 1:
        many = f"{steps_of_one} times"
        draft.note(
            "differs",
            draft.origin("accumulation"),
            "the Trainer of transformers 5 adds up the losses of the micro-batches of such a"
            f" model: its logged loss and gradient norm are {many} those here, and max_grad_norm"
            " clips there what it does not clip here",
        )
    if script is not None and script.task == "seq2seq":
        draft.note(
            "differs",
            "tokenizer",
            "an end token follows each target, also where the tokenizer writes none",
        )
    for text in script.differs if script else ():
        draft.note("differs", "the script", text)
    draft.note_fact(
        "idle", "do_predict", "a run ends with the test of test_data, or of the evaluation rows"
    )
    draft.note_fact("idle", "do_train", "that is what distcore train does")
    draft.note_fact("idle", "average_tokens", "a mean is always over all ranks")
    if script.task in PER_TOKEN if script else with_arguments:
        draft.note(
            "differs",
            "loss of tokens",
            "here the exact mean over all tokens of the global batch. That of the Trainer is so in"
            " training from 4.46 on, over ranks with average_tokens_across_devices; before, in"
            " evaluation, and in loops of one's own, it is a mean of the means of batches and"
            " ranks",
        )
    if with_arguments or _asks(draft, "deepspeed"):
        draft.note(
            "differs",
            "rows",
            "each is trained on once in an epoch and evaluated once, also where a "
            "DistributedSampler would repeat some; dropout is the model's own, drawn per rank",
        )
