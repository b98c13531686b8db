"""``--launcher local``: distcore's own supervisor, on this machine; the default."""

from __future__ import annotations

from distcore.errors import ConfigError
from distcore.launchers.contract import Command, Host, LaunchPlan, LaunchSpec
from distcore.launchers.planning import gpus_of, rank_variables, refuse
from distcore.launchers.running import run_command


class LocalLauncher:
    """Starts ranks on this machine."""

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return the command without the launcher's flags, and the variables that replace them."""
        refuse("local", {"value": spec.value}, "leave out what follows the colon")
        refuse("local", {"--nodes": spec.nodes}, "it starts ranks here; --launcher ssh starts them on other machines")
        host = only_host("local", spec)
        nproc = host.slots if host and host.chosen is not None else spec.nproc
        ranks = ("--nproc", str(nproc)) if nproc is not None else ()
        words = (spec.here.python, "-m", "distcore", "train", *spec.train, *ranks)
        return LaunchPlan(commands=(Command(words=words, environment={**rank_variables(spec), **gpus_of(host)}),))

    def run(self, plan: LaunchPlan) -> int:
        """Become the supervisor."""
        return run_command(plan)


def only_host(name: str, spec: LaunchSpec) -> Host | None:
    """Return the machine of a launcher that starts ranks here; raises ConfigError for several."""
    if spec.hosts and len(spec.hosts) > 1:
        names = ", ".join(host.name for host in spec.hosts)
        raise ConfigError(f"--launcher {name} starts ranks here, not on {names}; --launcher ssh starts them there")
    return spec.hosts[0] if spec.hosts else None
