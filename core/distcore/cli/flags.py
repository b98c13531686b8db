"""The flags of ``distcore train``, written out so that ``--help`` imports neither the
config class nor torch.

A test compares their names, defaults and choices with the fields of RunConfig.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Container, Sequence
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from distcore.errors import ConfigError


class Flag(NamedTuple):
    """One flag of the command line."""

    name: str
    """With its two hyphens."""
    takes: str
    """Placeholder of the value in ``--help``: a word in capitals, or the choices; empty:
    the flag takes none.
    """
    default: str
    """The default in words."""
    help: str
    """The line about the flag in ``--help``."""
    path: str = ""
    """Dotted config key; with a dot at its end: the name, with underscores, follows;
    empty: the name alone.
    """

    @property
    def key(self) -> str:
        """The dotted config key that the flag sets."""
        name = self.name.removeprefix("--").replace("-", "_")
        return f"{self.path}{name}" if not self.path or self.path.endswith(".") else self.path


OPTION = "task_options."
"""Path of the flags of a task, which set its options: see ``task_flags``."""
TRAINING = (
    "checkpoints",
    "clip",
    "epochs",
    "eval_every",
    "lr",
    "max_steps",
    "patience",
    "save_every",
    "schedule",
)
"""Keys that a trained model does not ask for."""
LEVELS = "debug|info|warning|error"

GROUPS: dict[str, list[Flag]] = {
    "what is trained": [
        Flag("--task", "NAME", "auto", "one of distcore tasks, or file.py:Class; auto: the default")
    ],
    "ranks": [
        Flag(
            "--strategy",
            "NAME[:VALUE]",
            "single",
            "how the model is spread over ranks; see distcore strategies",
        ),
        Flag(
            "--max-restarts", "N", "0", "times to restart a failed job from its newest checkpoint"
        ),
        Flag(
            "--nproc", "N", "auto", "processes to start here; auto: one per accelerator, else one"
        ),
        Flag(
            "--device",
            "KIND",
            "auto",
            "cpu or an accelerator, by torch's name; auto: what torch sees here",
        ),
    ],
    "training": [
        Flag("--epochs", "N", "1", "passes over the training rows"),
        Flag("--max-steps", "N", "--epochs", "optimizer steps; overrides --epochs"),
        Flag("--global-batch-size", "ROWS", "32", "rows of one optimizer step, over all ranks"),
        Flag(
            "--length-grouping",
            "batch|window|auto",
            "batch",
            "window: sort across batches; auto: if faster",
            "loader.",
        ),
        Flag(
            "--micro-batch-size",
            "ROWS",
            "auto",
            "most rows of one forward pass on one rank; auto: by tokens",
        ),
        Flag(
            "--micro-batch-tokens",
            "TOKENS",
            "by device",
            "most tokens of one forward pass on one rank",
        ),
        Flag(
            "--padding-free",
            "auto|on|off",
            "auto",
            "compute rows without padding; auto: where exact and faster",
        ),
        Flag("--packing", "auto|on|off", "auto", "earlier name of --padding-free", "packing"),
        Flag("--freeze", "REGEX", "none", "parameters whose name has a match are not trained"),
        Flag(
            "--lora",
            "RANK",
            "none",
            "train a LoRA adapter of this rank; the model's own weights stay",
            "lora.rank",
        ),
        Flag(
            "--optimizer",
            "NAME",
            "adamw",
            "adam, sgd, any that is installed, or file.py:Class",
            "optimizer.name",
        ),
        Flag("--lr", "RATE", "auto", "peak learning rate; auto: what the task suggests"),
        Flag(
            "--schedule",
            "NAME",
            "linear",
            "how the rate falls: cosine, constant …, or file.py:function",
            "schedule.name",
        ),
        Flag(
            "--warmup",
            "STEPS",
            "auto",
            "warm-up in steps, or below 1 as a part of all",
            "schedule.warmup_steps",
        ),
        Flag(
            "--weight-decay",
            "X",
            "auto",
            "weight decay; auto: the optimizer's own",
            "optimizer.weight_decay",
        ),
        Flag(
            "--clip-norm", "X", "1.0", "gradients are clipped to this norm; off: never", "clip.norm"
        ),
        Flag(
            "--ema",
            "DECAY",
            "none",
            "keep, evaluate and export a moving average of the weights",
            "ema.decay",
        ),
        Flag(
            "--precision",
            "fp32|bf16|fp16|auto",
            "fp32",
            "dtype of the forward pass; auto: bf16 where it is fast",
        ),
        Flag(
            "--eval-precision",
            "same|fp32|bf16|fp16",
            "same",
            "dtype of evaluations and predictions",
        ),
        Flag(
            "--compile",
            "off|on|regions",
            "off",
            "torch.compile the model, or each of its repeated blocks",
        ),
        Flag(
            "--preset",
            "fast",
            "none",
            "values to start from; fast: --length-grouping auto and --precision auto",
        ),
        Flag("--seed", "N", "0", "random seed: the same seed gives the same run"),
        Flag("--deterministic", "", "False", "only algorithms that repeat themselves bit for bit"),
        Flag("--exact", "BLOCKS", "none", "the same bits at any number of ranks up to BLOCKS"),
        Flag(
            "--prove",
            "auto|on|off",
            "auto",
            "compare the first steps with one plain process; auto: own tasks",
        ),
    ],
    "run folder": [
        Flag("--out", "DIR", "a new one under runs/", "run folder"),
        Flag("--overwrite", "", "False", "begin anew in --out; the run that is there is set aside"),
        Flag(
            "--resume",
            "auto|PATH",
            "none",
            "go on from the newest checkpoint in --out, or this one",
        ),
        Flag(
            "--resume-changed",
            "KEYS",
            "none",
            "resume although these keys have changed, such as lr,epochs",
        ),
        Flag(
            "--save-every", "STEPS", "0", "optimizer steps between checkpoints; 0: at the end only"
        ),
        Flag(
            "--keep-last",
            "N",
            "2",
            "newest checkpoints to keep, beside the best one",
            "checkpoints.",
        ),
        Flag(
            "--eval-every",
            "STEPS",
            "0",
            "evaluate every STEPS optimizer steps, too, not only at epoch ends",
        ),
        Flag(
            "--patience",
            "N",
            "0",
            "evaluations without a better one after which a run ends; 0: never",
        ),
        Flag("--log-every", "STEPS", "10", "optimizer steps between log lines"),
        Flag("--log-level", LEVELS, "info", "log level of rank 0"),
        Flag("--log-level-replica", LEVELS, "warning", "log level of the other ranks"),
    ],
}

FLAGS = [flag for group in GROUPS.values() for flag in group]
COMMON = frozenset(
    {
        "--task",
        "--strategy",
        "--nproc",
        "--device",
        "--epochs",
        "--max-steps",
        "--global-batch-size",
        "--optimizer",
        "--lr",
        "--schedule",
        "--warmup",
        "--weight-decay",
        "--clip-norm",
        "--precision",
        "--seed",
        "--out",
        "--resume",
        "--save-every",
        "--eval-every",
    }
)
"""Flags that ``--help`` explains; the others are under ``--help all``."""


def refuse_several(
    argv: Sequence[str], known: Container[str], of_task: Sequence[Flag] = ()
) -> None:
    """Raise ConfigError where a flag has several values, as in ``--lr 0.001 0.003`` or
    ``--data a.csv --data b.csv``.

    ``known`` are the flags of the command, ``of_task`` those of the task among them; only a command
    that has ``--sweep`` knows what to do with several values.
    """
    # A flag that takes NAME=FILE adds one file each time.
    flags_of_one_value = [flag.name for flag in of_task if "=" not in flag.takes]
    for name in (*flags_of_one_value, "--data"):
        typed = _values_of(name, argv)
        if len(set(typed)) > 1 and all(Path(value).suffix for value in typed):
            raise ConfigError(
                f"{name}: given {len(typed)} times; several files are one value: {','.join(typed)}"
            )
    groups = [flags for title, flags in GROUPS.items() if title != "run folder"]
    swept = chain(*groups, of_task) if "--sweep" in known else ()
    keys = {flag.name: flag.key.removeprefix(OPTION) for flag in swept}
    for index, word in enumerate(argv):
        following = argv[index + 1 :]
        values = list(takewhile(lambda value: not value.startswith("-"), following))
        # The config file of the run may stand behind the last value.
        if values and is_config(values[-1]):
            values.pop()
        if word in keys and len(values) > 1:
            sweep = f"--sweep {keys[word]}={','.join(values)}"
            raise ConfigError(
                f"{word} {' '.join(values)}: takes one value; for a run with each: {sweep}"
            )


def _values_of(name: str, argv: Sequence[str]) -> list[str]:
    """Return the values of a flag, typed as ``--flag=value`` or ``--flag value``, in order."""
    values = []
    for word, next_word in pairwise([*argv, ""]):
        flag, _, value = word.partition("=")
        if flag == name:
            values.append(value or next_word)
    return values


def is_config(word: str) -> bool:
    """Return True for a word of a command line that names a config file."""
    return Path(word).suffix in (".yaml", ".yml") or Path(word).is_file()


def with_flags(
    message: str, known: Container[str], argv: Sequence[str], of_task: Sequence[Flag] = ()
) -> str:
    """Return an error message with the flag in place of ``--set KEY=NAME``, where ``known`` has
    one for that key.

    A key of the command line is its flag, if that is in ``argv``. ``of_task`` are the
    flags of the task.
    """
    typed = {word.partition("=")[0] for word in argv}
    for flag in (*FLAGS, *of_task):
        if flag.name not in known:
            continue
        key = flag.key.removeprefix(OPTION)
        message = message.replace(f"--set {key}=NAME", f"{flag.name} NAME")
        # With the key in argv, too, it was --set that gave the value.
        if flag.name in typed and key not in typed:
            key_of_message = rf"^(command line: |task '[^']*': ){re.escape(key)} = "
            message = re.sub(key_of_message, f"{flag.name} ", message)
    return message


def ranks(text: str) -> int:
    """Read a number of ranks; raises ArgumentTypeError for anything less than 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of ranks, 1 or more")
    return int(text)


def add_ranks(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the run, and the flags that say how its weights are used again;
    ``verb`` names the use.
    """
    parser.add_argument(
        "target", metavar="RUN_OR_CHECKPOINT", help="a run (its newest checkpoint) or step-NNNNNNNN"
    )
    add_choice(parser)
    parser.add_argument(
        "--strategy",
        metavar="NAME",
        default="single",
        help=f"strategy to {verb} with (default: single)",
    )
    parser.add_argument(
        "--nproc", type=ranks, default=1, metavar="N", help="ranks to start here (default: 1)"
    )
    parser.add_argument(
        "--task",
        metavar="NAME",
        help="name or file.py:Class of a task that train() got as an object",
    )
    parser.add_argument(
        "--set", dest="set", action="append", default=[], metavar="KEY=VALUE",
        help="set any config key, such as strategy_options.NAME=VALUE; repeatable",
    )  # fmt: skip


def changes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the changes of the flags of ``add_ranks`` to a run's config, by
    dotted key; raises ConfigError.
    """
    from distcore.config import parse_settings

    settings = parse_settings(arguments.set)
    if idle := [key for key in settings if key.partition(".")[0] in TRAINING]:
        raise ConfigError(
            f"--set {idle[0]}: belongs to training, and changes nothing here; leave it out"
        )
    return (
        {"strategy": arguments.strategy}
        | settings
        | ({"task": arguments.task} if arguments.task else {})
    )


def add_choice(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """Add ``--best`` and ``--step``, which choose a checkpoint of a run folder;
    ``prefix`` begins their help.
    """
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--best", action="store_true", help=f"{prefix}the best checkpoint (default: the newest)"
    )
    which.add_argument("--step", type=int, metavar="N", help=f"{prefix}the checkpoint of this step")
