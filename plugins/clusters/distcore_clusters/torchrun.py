"""``--launcher torchrun[:HOST:PORT]``: torchelastic's agent on this machine; the same command
on every other one.
"""

from __future__ import annotations

import re

from distcore import ConfigError
from distcore.launchers import LaunchPlan, LaunchSpec, only_host, run_command
from distcore_clusters.planning import agent_command, check_restarts, need_nproc

LAST_CALL = 10
"""Seconds that nodes wait for further nodes once the minimum is there."""


class TorchrunLauncher:
    """Starts torchelastic's agent. Agents on several machines meet at HOST:PORT, on one of them."""

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return the agent's command; raises ConfigError for flags without which agents
        cannot restart or meet.
        """
        host = only_host("torchrun", spec)
        least, most = spec.nodes or (1, 1)
        nproc = host.slots if host and host.chosen is not None else need_nproc("torchrun", spec)
        _check_endpoint(spec.value, most)
        check_restarts(spec, nproc)
        flags = (
            *(
                "--nnodes",
                str(most) if least == most else f"{least}:{most}",
                "--nproc-per-node",
                str(nproc),
            ),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", spec.value or "127.0.0.1:0"),
            *("--rdzv-id", "distcore", "--rdzv-conf", f"last_call_timeout={LAST_CALL}"),
            *(
                "--max-restarts",
                str(spec.max_restarts),
                "--shutdown-timeout",
                str(int(spec.timeout)),
            ),
        )
        return LaunchPlan(commands=(agent_command(spec, flags, host),), patience=spec.timeout)

    def run(self, plan: LaunchPlan) -> int:
        """Become the agent."""
        return run_command(plan)


def _check_endpoint(endpoint: str, most: int) -> None:
    if not endpoint and most > 1:
        raise ConfigError(
            "--launcher torchrun: say where the nodes meet, an address of one of them and a free"
            " port: --launcher torchrun:HOST:PORT"
        )
    if endpoint and not re.fullmatch(r"[^:]+:[1-9]\d{0,4}|\[.+\]:[1-9]\d{0,4}", endpoint):
        raise ConfigError(f"--launcher torchrun:{endpoint}: expected torchrun:HOST:PORT")
