"""``--launcher slurm[:PARTITION]``: a job script for sbatch, or srun inside an allocation."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from distcore import ConfigError
from distcore.launchers import (
    Command,
    LaunchPlan,
    LaunchSpec,
    rank_variables,
    refuse,
    run_command,
    train_command,
)
from distcore_clusters.planning import (
    fixed_nodes,
    need_nproc,
    need_out,
    refuse_slots,
    variables_elsewhere,
)

NOTICE = 120
"""Seconds before its time limit at which a job gets SIGTERM, for a checkpoint."""

STEP = ("srun", "--kill-on-bad-exit=1")
"""Starts the ranks in an allocation."""
PREEMPTED = (
    "status=$?",
    (
        "# A job that ends within the time of grace of a preemption is not put back into the queue"
        " by SLURM itself."
    ),
    "if [ $status = 143 ]"
    """ && scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then""",
    """  exec scontrol requeue "$SLURM_JOB_ID\"""",
    "fi",
    "exit $status",
)
"""The end of a script, after the step."""


class SlurmLauncher:
    """Submits a job that resumes after a stop, or starts a step in the current allocation."""

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return the script and its sbatch, or an srun.

        Raises ConfigError without ``--out`` and ``--nproc``.
        """
        refuse(
            "slurm",
            {"--hostfile": spec.hosts},
            "SLURM has its own machines; --include and --exclude name some",
        )
        refuse(
            "slurm",
            {"--max-restarts": spec.max_restarts},
            "SLURM puts the job back into its queue (--requeue)",
        )
        refuse_slots("slurm", spec)
        nodes = fixed_nodes("slurm", spec) or 1
        nproc = need_nproc("slurm", spec)
        if spec.here.inside:
            reason = f"this is inside allocation {spec.here.inside}"
            refuse("slurm", {"partition": spec.value}, reason)
            size = (f"--nodes={nodes}", f"--ntasks-per-node={nproc}", *_machines(spec))
            words = (*STEP, *size, *train_command(spec))
            command = Command(words=words, environment=rank_variables(spec))
            return LaunchPlan(commands=(command,), patience=spec.timeout)
        need_out("slurm", spec, "a job that was requeued goes on in its run folder")
        if spec.here.out_exists and not spec.resume:
            raise ConfigError(
                f"out = {spec.out!r}: holds another run; choose another, set it aside with"
                " --overwrite, or go on with --resume auto"
            )
        return _batch(spec, (_step(spec),))

    def plan_sweep(self, specs: Mapping[str, LaunchSpec]) -> LaunchPlan | None:
        """Return the script of an array, with a job for each run of ``specs``, and its sbatch.

        Inside an allocation it is ``None``: there a run is a step. Raises ConfigError as ``plan``
        does.
        """
        first, *_ = specs.values()
        if first.here.inside:
            return None
        lines = ["case $SLURM_ARRAY_TASK_ID in"]
        for number, spec in enumerate(specs.values()):
            # For its refusals.
            self.plan(spec)
            lines.append(f"{number}) {_step(spec)} ;;")
        lines.append("esac")
        return _batch(first, tuple(lines), f"--array=0-{len(specs) - 1}")

    def run(self, plan: LaunchPlan) -> int:
        """Become sbatch, which returns once the job is in the queue, or srun."""
        return run_command(plan)


def _batch(spec: LaunchSpec, steps: tuple[str, ...], *flags: str) -> LaunchPlan:
    """Return the script with ``steps``, lines of a shell, and its sbatch with ``flags``."""
    script = f"{spec.log_dir or spec.here.folder}/{spec.here.job}.sh"
    text = "\n".join(_script(spec, steps, flags))
    return LaunchPlan(
        commands=(Command(words=("sbatch", script)),),
        files={script: f"{text}\n"},
        patience=spec.timeout,
        waits=False,
    )


def _step(spec: LaunchSpec) -> str:
    """Return the command of a run that goes on in its folder if it is there."""
    words = [*STEP, *train_command(spec)]
    if not spec.resume:
        # Slurm starts a preempted job again by the same script.
        words += ["--resume", "auto"]
    return shlex.join(words)


def _script(spec: LaunchSpec, steps: tuple[str, ...], flags: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a batch script with these ``steps`` and further ``flags`` of sbatch."""
    nproc = need_nproc("slurm", spec)
    yield "#!/bin/bash"
    yield f"#SBATCH --job-name={spec.here.job}"
    yield from (f"#SBATCH {flag}" for flag in flags)
    yield f"#SBATCH --nodes={fixed_nodes('slurm', spec) or 1}"
    yield f"#SBATCH --ntasks-per-node={nproc}"
    if spec.device not in ("cpu", "auto"):
        yield f"#SBATCH --gpus-per-node={nproc}"
    if spec.value:
        yield f"#SBATCH --partition={spec.value}"
    yield from (f"#SBATCH {flag}" for flag in _machines(spec))
    yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --signal=TERM@{NOTICE}"
    yield f"#SBATCH --chdir={shlex.quote(spec.here.folder)}"
    if spec.log_dir:
        yield f"#SBATCH --output={shlex.quote(spec.log_dir)}/%x-%j.log"
    yield "trap : TERM  # the step gets it, too, and saves a checkpoint"
    for name, value in variables_elsewhere(spec).items():
        yield f"export {name}={shlex.quote(value)}"
    yield from steps
    yield from PREEMPTED


def _machines(spec: LaunchSpec) -> tuple[str, ...]:
    """Return SLURM's flags for the machines that a job must or must not have."""
    flags = []
    for flag, names in (("--nodelist", spec.include), ("--exclude", spec.exclude)):
        if names:
            # distcore separates machines by @, SLURM by commas.
            flags.append(f"{flag}={names.replace('@', ',')}")
    return tuple(flags)
