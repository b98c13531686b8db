"""``--launcher ray[:ADDRESS]``: a placement group of one bundle per machine, and an actor per rank."""

from __future__ import annotations

from distcore.fronts import (
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


class RayFront:
    """Starts ranks on as many machines of a Ray cluster as there are, from MIN to MAX, and again if one is lost."""

    def plan(self, spec: Spec) -> Plan:
        """Return the command of the driver; raises ConfigError for what cannot start again, and for chosen machines."""
        chosen = {"--hostfile": spec.hosts, "--include": spec.include, "--exclude": spec.exclude}
        refuse("ray", chosen, "Ray has its own machines, and chooses among them")
        nproc = need_nproc("ray", spec)
        least, most = spec.nodes or (1, 1)
        check_restarts(spec, nproc)
        settings = [f"--env={name}={value}" for name, value in variables_elsewhere(spec).items()]
        driver = (
            *("--address", spec.value or "auto", "--nodes", str(least), str(most), "--nproc", str(nproc)),
            *("--max-restarts", str(spec.max_restarts), "--timeout", str(int(spec.timeout))),
            *(() if spec.device in ("cpu", "auto") else ("--gpus",)),
            *settings,
        )
        words = (spec.here.python, "-m", "distcore_ray.driver", *driver, "--", *train_command(spec))
        return Plan(commands=(Command(words=words),), patience=spec.timeout)

    def run(self, plan: Plan) -> int:
        """Become the driver."""
        return run_command(plan)
