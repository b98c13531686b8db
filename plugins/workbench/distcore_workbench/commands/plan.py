"""``distcore plan``: its flags. The planner is imported only when it runs, to keep help fast."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import ConfigError
from distcore.cli import add_job_flags, changes_of

if TYPE_CHECKING:
    from distcore import RunConfig
    from distcore.launchers import Failure

SUMMARY = "say what each rank holds and sends under each strategy, before anything runs"

NOT_HERE = (
    "--strategy",
    "--nproc",
    "--max-restarts",
    "--out",
    "--overwrite",
    "--resume",
    "--resume-changed",
)
"""Flags of ``distcore train`` that a plan has in another form, or none of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore plan [CONFIG.yaml] [--strategies NAMES] [--nproc N,N,…] [FLAGS]"
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG.yaml",
        default=None,
        help="config file; flags override it",
    )
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--strategies", metavar="NAMES", default="",
        help="strategies, or NAME:VALUE, separated by commas (default: the config's)",
    )  # fmt: skip
    group.add_argument(
        "--nproc",
        dest="ranks",
        metavar="N,N,…",
        default="1",
        help="numbers of ranks, up to 1024 (default: 1)",
    )
    group.add_argument(
        "--nodes",
        metavar="N,N,…",
        default="1",
        help="numbers of machines, each with --nproc ranks (default: 1)",
    )
    group.add_argument(
        "--device-memory",
        metavar="SIZES",
        default="",
        help=(
            "memory of a device, such as 24G,80G: say whether it fits; with it --device may be one"
            " that is not here"
        ),
    )
    group.add_argument(
        "--html", metavar="FILE", default=None, help="also write a page with bars and a timeline"
    )
    group.add_argument(
        "--json", action="store_true", default=False, help="print JSON, all sizes in bytes"
    )
    add_job_flags(parser, leave_out=NOT_HERE)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return 0, or 1 if nothing of it is known; raises DistcoreError."""
    from distcore_workbench.pages.file_name import check_page
    from distcore_workbench.planning import plan_table
    from distcore_workbench.planning.byte_sizes import parse_size
    from distcore_workbench.planning.plan import make_plan
    from distcore_workbench.planning.request import PlanRequest

    devices = {
        size.strip(): parse_size(size)
        for size in arguments.device_memory.split(",")
        if size.strip()
    }
    request = PlanRequest(
        config=arguments.config,
        changes=changes_of(arguments),
        strategies=arguments.strategies,
        ranks=_numbers("--nproc", "ranks", arguments.ranks),
        nodes=_numbers("--nodes", "machines", arguments.nodes),
        elsewhere=bool(devices),
    )
    if arguments.html is not None:
        check_page(Path(arguments.html))
    plan = make_plan(request)
    if arguments.html is not None:
        from distcore_workbench.pages.document import command_line
        from distcore_workbench.planning.plan_page import page

        try:
            Path(arguments.html).write_text(page(plan, devices, command_line()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--html {arguments.html}: cannot be written: {error.strerror}"
            ) from None
    if arguments.json:
        print(plan_table.as_json(plan, devices))
    else:
        plan_table.show(plan, devices)
    return 0 if any(row.memory is not None for row in plan.rows) else 1


def _numbers(flag: str, what: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(
            f"{flag} {text}: expected numbers of {what} separated by commas, such as 8,64"
        )
    return [int(word) for word in words]


def explain_out_of_memory(
    file: str | None, changes: Mapping[str, Any], read_config: Callable[[], RunConfig]
) -> AbstractContextManager[None]:
    """Return a context in which the error line of a run that dies for want of memory ends
    with the plan's advice.

    ``read_config`` reads ``file`` and ``changes``.
    """
    from distcore_workbench.planning import memory_errors

    return memory_errors.explain_out_of_memory(file, changes, read_config)


def explainer_in_a_rank(file: str | None, changes: Mapping[str, Any]) -> Callable[[Failure], str]:
    """Return the function that says how the error line of a rank ends
    that another launcher started.
    """
    from distcore_workbench.planning import memory_errors

    return memory_errors.explainer_in_a_rank(file, changes)
