"""``distcore train``: its flags. The job is imported only when it runs, to keep help fast."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Container, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import registry
from distcore.cli import launcher_flags as launcher_flags
from distcore.cli import waiting
from distcore.cli.flags import COMMON, FLAGS, GROUPS, OPTION, Flag
from distcore.cli.parser import Parser
from distcore.cli.plugin_names import check_config
from distcore.errors import ConfigError, DistcoreError

if TYPE_CHECKING:
    from distcore.config import RunConfig

SUMMARY = "train, evaluate and test a model, on as many ranks as you like"
SET = "set any config key, such as optimizer.eps=1e-6; repeatable"
SWEEP = "a run for each value, all in one folder; repeated: for each combination"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore train [CONFIG.yaml] [FLAGS]"
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG.yaml",
        default=None,
        help="config file; flags override it",
    )
    other = add_job_flags(parser)
    launcher_flags.add_launcher_flags(parser)
    profile = other.add_argument(
        "--profile", dest="set", action="append_const", const="extensions.profile=true",
        help="print where the time of a step goes, and write traces",
    )  # fmt: skip
    sweep = other.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=V,V,…", help=SWEEP
    )
    trials = other.add_argument(
        "--trials", type=int, metavar="N", help="draw N settings of --sweep KEY=LOW..HIGH"
    )
    sampler = other.add_argument(
        "--sampler", metavar="NAME", help="--trials: tpe, or random (default: tpe)"
    )
    prune = other.add_argument(
        "--prune", action="store_true", help="--trials: end runs early that fall behind"
    )
    if isinstance(parser, Parser):
        parser.short_help |= dict.fromkeys((profile, trials, sampler, prune))
        parser.short_help[sweep] = Flag("--sweep", "", "", SWEEP)
    other.add_argument(
        "--dry-run", action="store_true", default=False, help="print the resolved config and stop"
    )


def add_job_flags(
    parser: argparse.ArgumentParser, leave_out: Container[str] = ()
) -> argparse._ArgumentGroup:
    """Add the flags of ``GROUPS`` except ``leave_out``, the task's flags, and ``--set``;
    return the last group.
    """
    short_help = parser.short_help if isinstance(parser, Parser) else {}
    # a flag that is not given must not override the file
    parser.argument_default = argparse.SUPPRESS
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            if flag.name not in leave_out:
                text = f"{flag.help} (default: {flag.default})"
                how: dict[str, Any] = (
                    {"metavar": flag.takes} if flag.takes else {"action": "store_true"}
                )
                action = group.add_argument(flag.name, dest=flag.key, help=text, **how)
                short_help[action] = flag if flag.name in COMMON else None
        if title == "what is trained" and isinstance(parser, Parser):
            parser.task_group = parser.add_argument_group()
    other = parser.add_argument_group("other")
    action = other.add_argument(
        "--set", dest="set", action="append", default=[], metavar="KEY=VALUE", help=SET
    )
    short_help[action] = Flag("--set", "", "", SET)
    return other


def changes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the given flags and of ``--set``, by dotted
    config key; raises ConfigError.
    """
    from distcore.config import parse_settings

    keys = {flag.key for flag in FLAGS}
    changes = {
        key: value
        for key, value in vars(arguments).items()
        if key in keys or key.startswith(OPTION)
    }
    return changes | parse_settings(arguments.set)


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """Build the config: flags override the file, and ``--set`` overrides flags. Raises ConfigError.

    Where no file is given, ``--resume auto`` takes the config.yaml of the run folder.
    """
    from distcore.config import load_config

    changes = changes_of(arguments)
    file = Path(str(changes.get("out")), "config.yaml")
    if arguments.config is None and "out" in changes and changes.get("resume") == "auto":
        if file.is_file():
            return load_config(str(file), _reset_by(changes) | changes)
        # a slip, not what to train on
        if f"{OPTION}data" not in changes and ".py:" not in str(changes.get("task")):
            raise ConfigError(
                f"--resume auto: there is no run in {changes['out']}; to begin one there, name"
                " --data or a config file"
            )
    return load_config(arguments.config, changes)


def _reset_by(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by dotted key, the settings that a resumed run must not take from
    its config.yaml, given ``changes``.

    Every value is written out there, also those that followed from a value that now is another one.
    """
    from distcore.config import reset_by
    from distcore.rank_environment import join

    is_alone = changes.get("strategy") == "single"  # which runs in one process
    # or a launcher has chosen
    chosen = {"nproc": "auto"} if is_alone or join(os.environ) is not None else {}
    return chosen | reset_by(changes.keys() | chosen.keys())


def run(arguments: argparse.Namespace) -> int:
    """Train and return 0, or 3 if a run of a sweep failed; raises DistcoreError."""
    is_sweep = arguments.sweep or {"trials", "sampler", "prune"} & vars(arguments).keys()
    if launcher_flags.is_launcher_asked(arguments) and not is_sweep:
        return launcher_flags.start(arguments, partial(config_of, arguments))
    waiting.sleep_if_busy()
    if is_sweep:
        return int(registry.load("commands", "compare").sweep(arguments))
    changes = changes_of(arguments)
    read_config = _reader_of_config(arguments)
    from distcore.jobs import train

    plan = _planner()
    with (
        plan.explain_out_of_memory(arguments.config, changes, read_config)
        if plan
        else nullcontext()
    ):
        explain = (plan.explainer_in_a_rank(arguments.config, changes),) if plan else ()
        train.run(read_config, arguments.dry_run, *explain)
    return 0


def _reader_of_config(arguments: argparse.Namespace) -> Callable[[], RunConfig]:
    """Return a function that returns the config of the run.

    Here it is read at once, so that wrong values are told before torch is imported. In a rank that
    a launcher started it is read by the job: of several ranks only one is to print an error.
    """
    from distcore.rank_environment import join

    if join(os.environ) is not None:
        return partial(config_of, arguments)
    config = config_of(arguments)
    check_config(config)
    return lambda: config


def _planner() -> Any:
    """Return the command ``plan``, which says what a run needs that died for want of memory;
    ``None`` if none is installed that does.
    """
    if "plan" not in registry.offers("commands"):
        return None
    try:
        plan = registry.load("commands", "plan")
    except DistcoreError:
        return None
    return plan if hasattr(plan, "explain_out_of_memory") else None
