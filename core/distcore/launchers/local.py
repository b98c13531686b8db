"""``--launcher local``: distcore's own supervisor, on this machine; the default."""

from __future__ import annotations

from distcore.launchers.contract import Command, LaunchPlan, LaunchSpec
from distcore.launchers.planning import gpus_of, only_host, rank_variables, refuse, run_command


class LocalLauncher:
    """Starts ranks on this machine."""

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return the command without the launcher's flags, and the variables that replace them."""
        refuse("local", {"value": spec.value}, "leave out what follows the colon")
        refuse(
            "local",
            {"--nodes": spec.nodes},
            "it starts ranks here; --launcher ssh starts them on other machines",
        )
        host = only_host("local", spec)
        nproc = host.slots if host and host.chosen is not None else spec.nproc
        ranks = ("--nproc", str(nproc)) if nproc is not None else ()
        words = (spec.here.python, "-m", "distcore", "train", *spec.train, *ranks)
        environment = {**rank_variables(spec), **gpus_of(host)}
        command = Command(words=words, environment=environment)
        return LaunchPlan(commands=(command,))

    def run(self, plan: LaunchPlan) -> int:
        """Become the supervisor."""
        return run_command(plan)
