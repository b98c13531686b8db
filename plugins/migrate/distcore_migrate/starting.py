"""How ranks are started: from a launcher's flags to strategy, number of ranks, and the command
that starts the run.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from distcore import ConfigError, nearest
from distcore_migrate.command_line import Command
from distcore_migrate.draft import Draft, apply, whole
from distcore_migrate.launcher_flags import ONE_EACH, PROGRAMS

LOCAL = ("localhost", "127.0.0.1")
MPI = ("openmpi", "mpich", "impi", "mvapich")
"""DeepSpeed's launchers that start ranks by mpirun."""
DEVICES = "CUDA_VISIBLE_DEVICES"
ENV_FILE = ".deepspeed_env"
"""File in the home or the current folder, with variables that DeepSpeed sets on each machine."""
PLACES = (
    "hosts",
    "hostfile",
    "include",
    "exclude",
    "machines",
    "meeting",
    "address",
    "port",
    "launcher",
    "no_ssh",
    "partition",
    "least_machines",
    "most_machines",
    "ssh_port",
)
COUNTS = (
    "processes",
    "processes_here",
    "hosts",
    "hostfile",
    "include",
    "exclude",
    "tasks",
    "tasks_here",
)


def read_launcher(draft: Draft, command: Command) -> None:
    """Put the launchers' variables and flags into ``draft``; Accelerate's flags are
    read with its file.
    """
    for name, value in command.environment.items():
        draft.note(
            "idle",
            f"{name} = {value}",
            "set it again where distcore train runs; --nproc auto is one rank per GPU",
        )
    *outer, (program, flags) = command.launchers or (("python", {}),)
    for name, given in outer:
        for flag, value in given.items():
            draft.note(
                "idle",
                f"{name} {flag} = {value}",
                f"{program} inside of it says how many ranks there are",
            )
    known = PROGRAMS[program]
    if program not in ("python", "accelerate"):
        others = known.flags.switches | known.flags.values | known.flags.pairs
        asked = {
            name: value for name, value in flags.items() if name in known.rows or name not in others
        }
        for name in [name for name in flags if name not in asked]:
            draft.note("idle", f"{name} = {flags[name]}", f"only matters to {program}")
        apply(draft, known.rows, asked, program)
    if not draft.facts.keys() & set(COUNTS):
        _count(draft, program, command)
    _read_environment_file(draft, program, command)
    if known.kind:
        draft.keep("launched_kind", known.kind, program)
    place(draft, program)


def _read_environment_file(draft: Draft, program: str, command: Command) -> None:
    """Keep the variables that DeepSpeed sets on each of several machines, from the file where
    it looks for them.
    """
    if program != "deepspeed":
        return
    named = command.environment.get("DS_ENV_FILE")
    places = (
        [Path(str(named)).expanduser()]
        if named
        else [folder / ENV_FILE for folder in (Path.home(), Path.cwd())]
    )
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        if named:
            draft.note(
                "open",
                f"DS_ENV_FILE = {named}",
                "it is not here: each of its variables is --env NAME=VALUE",
            )
        return
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    variables = [
        line.strip() for line in lines if "=" in line and not line.lstrip().startswith("#")
    ]
    draft.keep("variables", variables, str(file) if named else ENV_FILE)


def _count(draft: Draft, program: str, command: Command) -> None:
    """Set the number of processes of a launcher whose command line has none."""
    alone = PROGRAMS[program].alone
    devices = [
        word
        for word in str(command.environment.get(DEVICES, "")).split(",")
        if word.strip().isdigit()
    ]
    if program == "deepspeed" and devices:
        draft.keep("processes_here", len(devices), DEVICES)
    elif program == "deepspeed" or "several" in draft.facts:
        draft.note("open", f"{program} without a number of processes", ONE_EACH)
        draft.keep("launched_kind", "ddp", program)
    elif alone:
        draft.keep("processes_here", alone, f"{program} (default)")
    draft.translated.add("several")


def place(draft: Draft, program: str) -> None:
    """Set the number of ranks on all machines, and their launcher. Raises ConfigError, one line."""
    include, exclude = draft.take("include", ""), draft.take("exclude", "")
    here, machines = draft.take("processes_here"), draft.take("machines")
    total = draft.facts["processes"].value if "processes" in draft.facts else None
    if include and exclude:
        raise ConfigError(
            f"--include {include} with --exclude {exclude}: DeepSpeed takes one of them; leave"
            " one out"
        )
    if (include or exclude) and program == "deepspeed" and (here or machines):
        raise ConfigError(
            f"{draft.origin('processes_here', 'machines')} with --include or --exclude: DeepSpeed"
            " takes one of them; leave one out"
        )
    _check(draft, here, total, machines)
    if program == "srun":
        here, machines = _tasks(draft, machines)
    hosts = _hosts(draft, include)
    if hosts is not None:
        hosts = _chosen(hosts, include, exclude)
        if machines and whole(machines) > len(hosts):
            given, there = (
                draft.facts["machines"],
                "1 machine is" if len(hosts) == 1 else f"{len(hosts)} machines are",
            )
            raise ConfigError(f"{given.origin} = {given.value}, but {there} named: make them equal")
        hosts = dict(list(hosts.items())[: whole(machines) if machines else None])
        if here:
            hosts = {name: min(slots, here) if slots else here for name, slots in hosts.items()}
        machines = len(hosts)
        if None not in hosts.values():
            origin = draft.origin(
                "processes_here", "hosts", "hostfile", "include", "exclude", "machines"
            )
            if total:  # of Horovod and MPI
                hosts, here = _filled(draft, hosts, total)
                machines = len(hosts)
            draft.keep("processes", sum(number or 0 for number in hosts.values()), origin)
    elif here is not None and (fewest := str(machines or 1).partition(":")[0]).isdigit():
        origin = draft.origin("processes_here", "tasks", "tasks_here", "machines") or program
        draft.keep("processes", here * int(fewest), origin)
    elif total and str(machines or "").isdigit():
        here = total // int(machines)  # Accelerate says the processes of all machines
        if here * int(machines) != total:
            raise ConfigError(
                f"{draft.origin('processes')} = {total}, {draft.origin('machines')} = {machines}:"
                " as many processes start on each machine; make the first a multiple of the second"
            )
    _start(draft, program, hosts, here, machines)


def _filled(
    draft: Draft, hosts: dict[str, int | None], total: int
) -> tuple[dict[str, int | None], int | None]:
    """Return the machines that ``total`` ranks fill, one after the other, and the ranks of each if
    all have as many.
    """
    used: dict[str, int | None] = {}
    for name, slots in hosts.items():
        if taken := min(slots or 0, total - sum(number or 0 for number in used.values())):
            used[name] = taken
    if used == hosts:
        return hosts, None
    each = set(used.values())
    if len(each) > 1:
        draft.note_fact("differs", "hostfile", "the ranks do not fill it: write another one")
        draft.facts.pop("hostfile", None)
    draft.keep("filled", len(used), draft.origin("processes"))
    draft.translated.add("filled")
    return used, each.pop() if len(each) == 1 else None


def _check(draft: Draft, here: Any, total: Any, machines: Any) -> None:
    """Raise ConfigError for a number of processes or machines below 1, and for a machine
    beyond the last one.
    """
    for name, number, what in (
        ("processes_here", here, "processes"),
        ("processes", total, "processes"),
        ("machines", machines, "machines"),
    ):
        if str(number).isdigit() and int(number) < 1:
            raise ConfigError(
                f"{draft.origin(name)} = {number}: expected a number of {what}, 1 or more"
            )
    if machines is not None and not re.fullmatch(r"\d+(:\d+)?|.*[${<].*", str(machines)):
        raise ConfigError(
            f"{draft.origin('machines')} = {machines}: expected a number of machines, or MIN:MAX"
        )
    rank, most = draft.take("rank_of_machine"), str(machines).rpartition(":")[2]
    if draft.take("standalone") and most.isdigit() and int(most) > 1:
        raise ConfigError(
            f"standalone, {draft.origin('machines')} = {machines}: torchrun meets on this machine"
            " alone; leave one out"
        )
    draft.note_fact("idle", "standalone", "ranks on one machine need no such word")
    if rank is not None and most.isdigit() and rank >= int(most):
        raise ConfigError(
            f"{draft.origin('rank_of_machine')} = {rank}, {draft.origin('machines')} = {machines}:"
            f" machines are counted from 0 to {int(most) - 1}"
        )


def _tasks(draft: Draft, machines: Any) -> tuple[int, Any]:
    """Return the tasks of srun on each machine, and the machines."""
    here, tasks = draft.take("tasks_here"), draft.take("tasks")
    number = whole(machines or 1)
    if here and tasks and here * number != tasks:
        raise ConfigError(
            f"srun: {tasks} tasks, but {here} on each of {number} machine(s): make them equal"
        )
    if tasks and tasks % number:
        raise ConfigError(
            f"srun: {tasks} tasks on {number} machines: distcore starts as many on each"
        )
    return here or (tasks or number) // number, machines


def _hosts(draft: Draft, include: str) -> dict[str, int | None] | None:
    """Return the machines with their slots, ``None`` for slots that are not known; ``None``
    if nothing names any.
    """
    listed, file = draft.take("hosts"), draft.take("hostfile")
    if file is not None:
        try:
            return _of_file(Path(str(file)).expanduser())
        except FileNotFoundError:
            draft.note_fact(
                "open",
                "hostfile",
                "it is not here, so its slots are not known; --nproc N says how many "
                "processes there are on all machines",
            )
            return None
    if listed is not None:
        return _of_list(str(listed), "-H")
    hosts: dict[str, int | None] = {}
    for part in include.split("@") if include else ():
        name, _, slots = part.partition(":")
        hosts[name.strip()] = (
            max(map(int, re.findall(r"\d+", slots)), default=0) + 1 if slots else None
        )
    return hosts or None


def _of_list(text: str, where: str) -> dict[str, int | None]:
    hosts: dict[str, int | None] = {}
    for part in text.split(","):
        name, _, slots = part.strip().partition(":")
        if name in hosts:
            raise ConfigError(f"{where} {text}: {name} stands there twice")
        hosts[name] = int(slots) if slots.isdigit() else None
    return hosts


def _of_file(file: Path) -> dict[str, int | None]:
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].replace(":", " slots=").split()
        if not words:
            continue
        slots = re.search(r"slots\s*=\s*(\d+)", " ".join(words[1:]))
        if words[0] in hosts:
            raise ConfigError(f"hostfile {file}, line {number}: {words[0]} stands there twice")
        hosts[words[0]] = int(slots[1]) if slots else None
    if not hosts:
        raise ConfigError(
            f"hostfile {file}: names no machine; expected lines such as: host0 slots=4"
        )
    return hosts


def _chosen(hosts: dict[str, int | None], include: str, exclude: str) -> dict[str, int | None]:
    left: dict[str, int | None] = {} if include else dict(hosts)
    for part in (include or exclude).split("@") if include or exclude else ():
        name, colon, slots = part.strip().partition(":")
        if name not in hosts:
            flag = "--include" if include else "--exclude"
            raise ConfigError(
                f"{flag} {include or exclude}: no machine {name!r}{nearest(name, hosts)}"
            )
        count, known = len(set(slots.split(","))), hosts[name]
        if known is not None and any(int(slot) >= known for slot in re.findall(r"\d+", slots)):
            raise ConfigError(f"{part.strip()}: {name} has {known} slots, counted from 0")
        if include:
            left[name] = count if colon else known
        elif not colon:
            left.pop(name, None)
        else:
            left[name] = None if known is None else known - count
    return {name: slots for name, slots in left.items() if slots != 0}


def _start(
    draft: Draft, program: str, hosts: dict[str, int | None] | None, here: int | None, machines: Any
) -> None:
    """Add the flags that start the ranks where that takes more than ``nproc``."""
    include, exclude = draft.take("include", ""), draft.take("exclude", "")
    chosen = [
        *(["--include", include] if include else []),
        *(["--exclude", exclude] if exclude else []),
    ]
    address, port = draft.take("address"), draft.take("port")
    meeting = draft.take("meeting") or f"{address or 'HOST'}:{port or 29500}"
    named, no_ssh, partition = draft.take("launcher"), draft.take("no_ssh"), draft.take("partition")
    least, most = draft.take("least_machines"), draft.take("most_machines")
    port_of_ssh = draft.take("ssh_port")
    nodes = f"{least}:{most}" if least and most else str(machines or 1)
    rank = ["--nproc", str(here)] if here else []
    is_part = not draft.facts.keys().isdisjoint(("machines", "filled"))
    is_local = hosts is not None and all(name in LOCAL for name in hosts)
    if "hostfile" in draft.facts:
        chosen = ["--hostfile", str(draft.take("hostfile")), *chosen]
    elif hosts is not None and not is_local:
        chosen = ["--hostfile", "FILE", *chosen]
        draft.note(
            "open",
            "hostfile",
            "write one with a line for each machine, such as "
            + "; ".join(f"{name} slots={slots or 'N'}" for name, slots in hosts.items()),
        )
    elif exclude:
        chosen = ["--hostfile", "FILE", *chosen]
        draft.note(
            "open", "hostfile", "none is named, and DeepSpeed's own, /job/hostfile, is not read"
        )
    if program == "srun" or named == "slurm":
        launcher, flags = f"slurm:{partition}" if partition else "slurm", ["--nodes", nodes, *rank]
    elif named in MPI or (program == "mpirun" and not is_local and hosts is not None):
        launcher, flags = "mpi", [*chosen, *(["--nodes", nodes] if is_part else []), *rank]
    elif no_ssh or ":" in nodes or (nodes != "1" and "--hostfile" not in chosen):
        count = str(len(hosts)) if hosts is not None and ":" not in nodes else nodes
        launcher, flags = f"torchrun:{meeting}", ["--nodes", count, *(rank or _same(hosts))]
    elif "--hostfile" in chosen:
        launcher, flags = (
            f"ssh:{port_of_ssh}" if port_of_ssh else "ssh",
            [*chosen, *(["--nodes", nodes] if is_part else []), *rank],
        )
    else:
        draft.start += chosen
        _say(draft, chosen)
        draft.note_fact(
            "idle", "variables", "DeepSpeed sets them on several machines, which these are not"
        )
        return
    variables = [word for variable in draft.take("variables", []) for word in ("--env", variable)]
    draft.note_fact("start", "variables", shlex.join(variables))
    flags += variables
    draft.start += ["--launcher", launcher, *flags]
    draft.keep(
        "elsewhere", launcher, draft.origin("machines", "hostfile", "hosts", "launcher") or program
    )
    draft.translated.add("elsewhere")
    draft.note_fact("start", "processes", shlex.join(["--launcher", launcher, *flags]))
    _say(draft, ["--launcher", launcher, *flags])


def _say(draft: Draft, flags: list[str]) -> None:
    """Note the fate of each key that names machines."""
    for name in PLACES:
        if flags:
            draft.note_fact("start", name, shlex.join(flags))
        else:
            draft.note_fact("idle", name, "for several machines, which these are not")


def _same(hosts: dict[str, int | None] | None) -> list[str]:
    slots = set(hosts.values()) if hosts else set()
    return ["--nproc", str(slots.pop())] if len(slots) == 1 and None not in slots else []
