"""``--launcher ray[:HOST:PORT]``: ranks on a running Ray cluster. This module
does not import Ray.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from distcore import ConfigError
from distcore.launchers import Command, LaunchPlan, LaunchSpec, refuse, run_command, train_command
from distcore.registry import is_installed
from distcore_clusters import check_restarts, need_nproc, variables_elsewhere

DRIVER = "distcore_ray.driver"
"""Module that reserves nodes from Ray, and starts ranks on them."""
SWEEP = "distcore_ray.sweep"
"""Module that has Ray start such a driver for each of several runs."""


class RayLauncher:
    """Start ranks as children of Ray actors. With ``--nodes MIN:MAX`` the run adapts to the
    number of alive nodes.

    The only command of the plan is ``distcore_ray.driver``.
    """

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return the driver's command.

        Raises ConfigError for settings that are Ray's own, and for invalid restarts.
        """
        chosen = {"--hostfile": spec.hosts, "--include": spec.include, "--exclude": spec.exclude}
        refuse(
            "ray",
            chosen,
            "Ray has its own nodes, and places ranks by the CPUs and GPUs that are free",
        )
        if spec.value and not re.fullmatch(r"[^:]+:[1-9]\d{0,4}", spec.value):
            raise ConfigError(
                f"--launcher ray:{spec.value}: expected ray:HOST:PORT, the address of the head node"
            )
        nproc = need_nproc("ray", spec)
        check_restarts(spec, nproc)
        least, most = spec.nodes or (1, 1)
        flags = [
            *(
                "--address",
                spec.value or "auto",
                "--nodes",
                f"{least}:{most}",
                "--nproc",
                str(nproc),
            )
        ]
        if spec.device not in ("cpu", "auto"):
            flags.append("--gpus")
        if spec.max_restarts:
            flags += ["--max-restarts", str(spec.max_restarts)]
        for name, value in variables_elsewhere(spec).items():
            flags += ["--env", f"{name}={value}"]
        _, *words = train_command(spec)
        driver = (
            spec.here.python,
            "-m",
            DRIVER,
            *flags,
            "--patience",
            f"{spec.timeout:g}",
            "--",
            *words,
        )
        return LaunchPlan(commands=(Command(words=driver),), patience=spec.timeout)

    def plan_sweep(self, specs: Mapping[str, LaunchSpec]) -> LaunchPlan:
        """Return the command of ``distcore_ray.sweep``, and its file: a task for the
        driver of each run.

        Raises ConfigError as ``plan`` does.
        """
        first, *_ = specs.values()
        runs = {
            name: {"driver": self.plan(spec).commands[0].words[3:], "log": f"{spec.out}.log"}
            for name, spec in specs.items()
        }
        file = f"{first.log_dir or first.here.folder}/{first.here.job}.json"
        words = (first.here.python, "-m", SWEEP, "--address", first.value or "auto", file)
        return LaunchPlan(
            commands=(Command(words=words),),
            files={file: json.dumps(runs, indent=1)},
            patience=first.timeout,
        )

    def run(self, plan: LaunchPlan) -> int:
        """Run the driver. Raises ConfigError if Ray is not installed."""
        if not is_installed("ray"):
            raise ConfigError(
                "--launcher ray: Ray is not installed: pip install ray, on all its nodes"
            )
        return run_command(plan)
