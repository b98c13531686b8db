"""A queue: runs of a shared machine wait for each other."""

from __future__ import annotations

from distcore import ConfigError
from distcore.launchers import (
    Command,
    LaunchPlan,
    LaunchSpec,
    gpus_of,
    only_host,
    rank_variables,
    refuse,
    run_command,
)

EVERYBODY = "/tmp/distcore-queue.lock"
"""The file whose lock a run holds, unless another one is named."""


class Queue:
    """Starts ranks on this machine once no other run holds the lock of ``queue[:FILE]``;
    whoever ends, frees it.
    """

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return the command; raises ConfigError for what it cannot do."""
        refuse("queue", {"--nodes": spec.nodes}, "it starts ranks here")
        if spec.value.startswith("-"):
            raise ConfigError(
                f"--launcher queue:{spec.value}: a file may not begin with a hyphen; write"
                f" ./{spec.value}"
            )
        host = only_host("queue", spec)
        nproc = host.slots if host and host.chosen is not None else spec.nproc
        ranks = () if nproc is None else ("--nproc", str(nproc))
        # --no-fork: the lock is inherited by the supervisor, which also gets the signals; the
        # kernel frees it.
        lock = ("flock", "--no-fork", spec.value or EVERYBODY)
        words = (*lock, spec.here.python, "-m", "distcore", "train", *spec.train, *ranks)
        return LaunchPlan(
            commands=(Command(words=words, environment={**rank_variables(spec), **gpus_of(host)}),)
        )

    def run(self, plan: LaunchPlan) -> int:
        """Become flock, which becomes the command."""
        return run_command(plan)
