"""The programs that start ranks, with their flags: whether each takes a value,
and its meaning here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from distcore import ConfigError
from distcore_migrate import accelerate_config
from distcore_migrate.draft import (
    Draft,
    Rule,
    fact,
    instead,
    no_effect,
    start_flag,
    to,
    whole,
    written,
)
from distcore_migrate.flag_parsing import Flags

ONE_EACH = "one process per device; --nproc N says how many these are"
SAME = no_effect("distcore's launchers do the same by themselves")
HERE = no_effect("it says how a script is found, and there is none here")


def _ranks(draft: Draft, name: str, value: Any) -> None:
    """Keep the number of processes on a machine, or note that it is yet to be said."""
    if str(value) in ("gpu", "auto", "cpu", "xpu"):
        draft.note("open", written(name, value), ONE_EACH)
        draft.keep("several", True, name)
    elif re.search(r"[${<]", str(value)):
        draft.note("open", written(name, value), "a word to be filled in: --nproc N says its value")
        draft.keep("several", True, name)
    elif not str(value).isdigit():
        raise ConfigError(f"{name} = {value}: expected a number of processes, such as 2")
    else:
        draft.keep("processes_here", int(value), name)


def _ranks_of_deepspeed(draft: Draft, name: str, value: Any) -> None:
    """The same; -1, DeepSpeed's default, is one process per device."""
    if value == -1:
        draft.note("off", name)
    else:
        _ranks(draft, name, value)


def _hosts(draft: Draft, name: str, value: Any) -> None:
    """Machines with their slots, ``host:2,other:2``; a bare name is a hostfile under DeepSpeed."""
    if ":" in str(value) or "," in str(value):
        draft.keep("hosts", str(value), name)
    else:
        draft.keep("hostfile", str(value), name)


def _launcher_arguments(draft: Draft, name: str, value: Any) -> None:
    """Read what DeepSpeed hands on to Slurm, mpirun or ssh: Slurm's options; say of the
    others where they go.
    """
    flags, rest = _of(SLURM_SWITCHES, SLURM_ROWS).cut(str(value or "").split())
    for key, word in flags.items():
        if key in ("p", "partition"):
            draft.keep("partition", str(word), name)
        elif key in VARIABLES:
            draft.note("instead", written(f"{name} {key}", word), _variable(key, word))
        else:
            rest = [*rest, f"{key}={word}"]
    if rest:
        draft.note(
            "none",
            written(name, value),
            "mpirun takes its options as variables too, such as OMPI_MCA_btl=tcp; "
            "ssh takes its own from ~/.ssh/config",
        )


def _variable(name: str, value: Any) -> str:
    """Return how sbatch, which ``--launcher slurm`` calls, is told an option of Slurm."""
    variable = f"SBATCH_{VARIABLES[name]}={1 if value is True else value}"
    return f"{variable} in front of distcore train, which hands in the job"


def _of_slurm(draft: Draft, name: str, value: Any) -> None:
    draft.note("instead", written(name, value), _variable(name, value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program that starts ranks."""

    flags: Flags
    """How its command line is cut."""
    rows: dict[str, Rule] = field(default_factory=dict)
    """Rules for its flags."""
    kind: str | None = None
    """The strategy of the started program, unless something else sets one."""
    alone: int | None = None
    """Processes where no flag says their number; ``None``: one per device."""


def _of(
    switches: str,
    rows: dict[str, Rule],
    values: str = "",
    pairs: str = "",
    short: str = "",
) -> Flags:
    named = frozenset(switches.split())
    return Flags(
        switches=named,
        values=frozenset(rows) - named | frozenset(values.split()),
        pairs=frozenset(pairs.split()),
        short=frozenset(short.split()),
    )


LOGS = start_flag("--log-dir", "{}")
TORCHRUN_ROWS: dict[str, Rule] = (
    {
        "nproc_per_node": _ranks,
        "nnodes": fact("machines"),
        "node_rank": accelerate_config.rank_of_machine,
        "max_restarts": to("max_restarts", whole),
        "rdzv_endpoint": fact("meeting", str),
        "master_addr": fact("address", str),
        "master_port": fact("port"),
        "log_dir": LOGS,
        "standalone": fact("standalone"),
    }
    | dict.fromkeys(
        (
            "rdzv_backend",
            "rdzv_id",
            "rdzv_conf",
            "monitor_interval",
            "start_method",
            "role",
            "redirects",
            "r",
            "tee",
            "t",
            "local_addr",
            "local_ranks_filter",
            "logs_specs",
            "numa_binding",
            "signals_to_handle",
            "event_log_handler",
            "shutdown_timeout",
            "virtual_local_rank",
            "duplicate_stdout_filters",
            "duplicate_stderr_filters",
        ),
        SAME,
    )
    | dict.fromkeys(("use_env", "module", "m", "no_python", "run_path"), HERE)
)
"""Flags of torchrun, and of the older torch.distributed.launch."""
DEEPSPEED_ROWS: dict[str, Rule] = {
    "num_gpus": _ranks_of_deepspeed,
    "num_accelerators": _ranks_of_deepspeed,
    "np": _ranks_of_deepspeed,
    "num_nodes": fact("machines", whole),
    "hostfile": _hosts,
    "H": _hosts,
    "include": fact("include", str),
    "i": fact("include", str),
    "exclude": fact("exclude", str),
    "e": fact("exclude", str),
    "master_addr": fact("address", str),
    "master_port": fact("port"),
    "no_ssh": fact("no_ssh"),
    "node_rank": accelerate_config.rank_of_machine,
    "launcher": fact("launcher", str),
    "launcher_args": _launcher_arguments,
    "min_elastic_nodes": fact("least_machines", whole),
    "max_elastic_nodes": fact("most_machines", whole),
    "autotuning": instead("distcore tune CONFIG finds the fastest setting"),
    "enable_each_rank_log": LOGS,
    "bind_cores_to_rank": start_flag("--bind-cores"),
    "bind_core_list": start_flag("--bind-core-list", "{}"),
    "ssh_port": fact("ssh_port", whole),
} | dict.fromkeys(
    ("no_ssh_check", "force_multi", "save_pid", "log_level", "q", "quiet", "elastic_training",
     "no_local_rank"), SAME,
) | dict.fromkeys(("module", "no_python", "venv_script"), HERE)  # fmt: skip
"""Flags of DeepSpeed's launcher."""
HOROVOD_ROWS: dict[str, Rule] = {
    "np": fact("processes", whole),
    "num_proc": fact("processes", whole),
    "H": _hosts,
    "hosts": _hosts,
    "hostfile": fact("hostfile", str),
    "min_np": no_effect("a checkpoint goes on at any number of ranks"),
    "max_np": no_effect("a checkpoint goes on at any number of ranks"),
    "output_filename": LOGS,
    "p": fact("ssh_port", whole),
    "ssh_port": fact("ssh_port", whole),
    "fusion_threshold_mb": to("strategy_options.fusion_mb", float),
    "cycle_time_ms": to("strategy_options.cycle_ms", float),
}
"""Flags of horovodrun that say something; the others tune Horovod."""
MPI_ROWS: dict[str, Rule] = {
    "np": fact("processes", whole),
    "n": fact("processes", whole),
    "c": fact("processes", whole),
    "H": _hosts,
    "host": _hosts,
    "hosts": _hosts,
    "hostfile": fact("hostfile", str),
    "machinefile": fact("hostfile", str),
    "f": fact("hostfile", str),
} | dict.fromkeys(("N", "npernode", "ppn"), fact("processes_here", whole))
"""Flags of mpirun and mpiexec that say something."""
VARIABLES = {
    "A": "ACCOUNT",
    "account": "ACCOUNT",
    "t": "TIMELIMIT",
    "time": "TIMELIMIT",
    "q": "QOS",
    "qos": "QOS",
    "C": "CONSTRAINT",
    "constraint": "CONSTRAINT",
    "G": "GPUS",
    "gpus": "GPUS",
    "J": "JOB_NAME",
    "job_name": "JOB_NAME",
    "c": "CPUS_PER_TASK",
    "cpus_per_task": "CPUS_PER_TASK",
    "gpus_per_node": "GPUS_PER_NODE",
    "gres": "GRES",
    "gpus_per_task": "GPUS_PER_TASK",
    "mem": "MEM_PER_NODE",
    "mem_per_cpu": "MEM_PER_CPU",
    "exclusive": "EXCLUSIVE",
    "reservation": "RESERVATION",
}
"""Options of Slurm by the variable that sbatch reads instead, without ``SBATCH_``."""
SLURM_ROWS: dict[str, Rule] = dict.fromkeys(VARIABLES, _of_slurm) | {
    "nodes": fact("machines", whole),
    "N": fact("machines", whole),
    "ntasks": fact("tasks", whole),
    "n": fact("tasks", whole),
    "ntasks_per_node": fact("tasks_here", whole),
    "partition": fact("partition", str),
    "p": fact("partition", str),
}
"""Flags of srun that say something."""
ACCELERATE_SWITCHES = (
    "quiet q cpu multi_gpu tpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic"
    " use_deepspeed use_fsdp dynamo_use_regional_compilation use_parallelism_config use_megatron_lm"
    " same_network module m no_python tpu_cluster no_tpu_cluster tpu_use_sudo downcast_bf16"
    " fp8_use_autocast_during_eval debug"
)
HOROVOD_SWITCHES = (
    "verbose disable_cache check_build gloo mpi jsrun tcp autotune no_autotune"
    " hierarchical_allreduce torus_allreduce hierarchical_allgather no_stall_check"
    " prefix_output_with_timestamp log_with_timestamp log_without_timestamp"
)
HOROVOD_VALUES = (
    "start_timeout network_interfaces network_interface config_file i ssh_identity_file"
    " cache_capacity min_num_proc max_num_proc slots_per_host elastic_timeout reset_limit mpi_args"
    " binding_args num_nccl_streams thread_affinity gloo_timeout_seconds log_level"
    " host_discovery_script timeline_filename"
)
MPI_SWITCHES = (
    "allow_run_as_root oversubscribe report_bindings tag_output bynode byslot nolocal verbose v q"
    " quiet"
)
MPI_VALUES = "x bind_to map_by rank_by output_filename wdir iface env genvall bootstrap prefix"
SLURM_SWITCHES = (
    "u unbuffered l label exclusive pty overlap Q quiet v verbose O overcommit s kill_on_bad_exit"
)
SLURM_VALUES = (
    "w nodelist x jobid o output e error export cpu_bind mpi D chdir mail_type ntasks_per_gpu nice"
)
PROGRAMS: dict[str, Program] = {
    "python": Program(flags=_of("u O OO B E s S I i v b", {}, values="W X c m")),
    "torchrun": Program(
        flags=_of(
            "standalone module m no_python run_path use_env virtual_local_rank", TORCHRUN_ROWS
        ),
        rows=TORCHRUN_ROWS,
        alone=1,
    ),
    "accelerate": Program(
        flags=_of(
            ACCELERATE_SWITCHES,
            accelerate_config.ROWS,
            values="config_file t " + " ".join(accelerate_config.SECTION_ROWS),
        ),
    ),
    "deepspeed": Program(
        flags=_of(
            "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid"
            " bind_cores_to_rank q quiet elastic_training",
            DEEPSPEED_ROWS,
        ),
        rows=DEEPSPEED_ROWS,
        kind="ddp",
    ),
    "horovodrun": Program(
        flags=_of(HOROVOD_SWITCHES, HOROVOD_ROWS, HOROVOD_VALUES), rows=HOROVOD_ROWS, kind="horovod"
    ),
    "mpirun": Program(
        flags=_of(MPI_SWITCHES, MPI_ROWS, MPI_VALUES, pairs="mca gmca genv", short="n"),
        rows=MPI_ROWS,
        kind="ddp",
    ),
    "srun": Program(
        flags=_of(SLURM_SWITCHES, SLURM_ROWS, SLURM_VALUES, short="n N c p"),
        rows=SLURM_ROWS,
        alone=1,
    ),
}
"""Programs by name."""
NAMES = {
    "mpiexec": "mpirun",
    "orterun": "mpirun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torch.distributed.elastic_launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate-launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Other names of these programs, as programs and as modules of ``python -m``."""
