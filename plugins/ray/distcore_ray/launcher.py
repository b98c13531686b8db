"""``--launcher ray[:HOST:PORT]``: ranks on a Ray cluster that runs already. Nothing here imports Ray."""

from __future__ import annotations

import re
from importlib.util import find_spec

from distcore import ConfigError
from distcore.launchers import (
    Command,
    Plan,
    Spec,
    check_restarts,
    need_nproc,
    refuse,
    run_command,
    train_command,
    variables_elsewhere,
)

DRIVER = "distcore_ray.driver"
"""The module that asks Ray for machines, and starts ranks on them."""


class RayLauncher:
    """Starts ranks as children of Ray's actors; with ``--nodes MIN:MAX`` the run goes on with the nodes that are there.

    ``distcore_ray.driver`` does it, the one command of the plan.
    """

    def plan(self, spec: Spec) -> Plan:
        """Return the driver's command; raises ConfigError for what Ray decides by itself and what cannot restart."""
        chosen = {"--hostfile": spec.hosts, "--include": spec.include, "--exclude": spec.exclude}
        refuse("ray", chosen, "Ray has its own nodes, and places ranks by the CPUs and GPUs that are free")
        if spec.value and not re.fullmatch(r"[^:]+:[1-9]\d{0,4}", spec.value):
            raise ConfigError(f"--launcher ray:{spec.value}: expected ray:HOST:PORT, the address of the head node")
        nproc = need_nproc("ray", spec)
        check_restarts(spec, nproc)
        least, most = spec.nodes or (1, 1)
        flags = [*("--address", spec.value or "auto", "--nodes", f"{least}:{most}", "--nproc", str(nproc))]
        if spec.device not in ("cpu", "auto"):
            flags.append("--gpus")
        if spec.max_restarts:
            flags += ["--max-restarts", str(spec.max_restarts)]
        for name, value in variables_elsewhere(spec).items():
            flags += ["--env", f"{name}={value}"]
        _, *words = train_command(spec)
        driver = (spec.here.python, "-m", DRIVER, *flags, "--patience", f"{spec.timeout:g}", "--", *words)
        return Plan(commands=(Command(words=driver),), patience=spec.timeout)

    def run(self, plan: Plan) -> int:
        """Become the driver; raises ConfigError where Ray is not installed."""
        if find_spec("ray") is None:
            raise ConfigError("--launcher ray: Ray is not installed: pip install ray, on all its nodes")
        return run_command(plan)
