"""How ranks are started: from a launcher's flags to the number of ranks and the start command."""

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
HOST_KEYS = (
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
    """Put the launchers' variables and flags into ``draft``.

    Accelerate's flags are read with its file.
    """
    for name, value in command.environment.items():
        draft.note(
            "idle",
            f"{name} = {value}",
            "set it again where distcore train runs; --nproc auto is one rank per GPU",
        )
    *outer, (program, flags) = command.launchers or (("python", {}),)
    for outer_program, outer_flags in outer:
        for flag, value in outer_flags.items():
            draft.note(
                "idle",
                f"{outer_program} {flag} = {value}",
                f"{program} inside of it says how many ranks there are",
            )
    grammar = PROGRAMS[program]
    if program not in ("python", "accelerate"):
        known_flags = grammar.flags.switches | grammar.flags.values | grammar.flags.pairs
        translated = {}
        for name, value in flags.items():
            # A flag that the program does not know, either, is for `apply` to report.
            if name in grammar.rows or name not in known_flags:
                translated[name] = value
            else:
                draft.note("idle", f"{name} = {value}", f"only matters to {program}")
        apply(draft, grammar.rows, translated, program)
    if not draft.facts.keys() & set(COUNTS):
        _count(draft, program, command)
    _read_environment_file(draft, program, command)
    if grammar.kind:
        draft.keep("launched_kind", grammar.kind, program)
    place(draft, program)


def _read_environment_file(draft: Draft, program: str, command: Command) -> None:
    """Keep the variables of DeepSpeed's file, which it sets on each of several machines."""
    if program != "deepspeed":
        return
    named = command.environment.get("DS_ENV_FILE")
    if named:
        candidates = [Path(str(named)).expanduser()]
    else:
        candidates = [folder / ENV_FILE for folder in (Path.home(), Path.cwd())]
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        if named:
            draft.note(
                "open",
                f"DS_ENV_FILE = {named}",
                "it is not here: each of its variables is --env NAME=VALUE",
            )
        return
    variables = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if "=" in line and not line.lstrip().startswith("#"):
            variables.append(line.strip())
    draft.keep("variables", variables, str(file) if named else ENV_FILE)


def _count(draft: Draft, program: str, command: Command) -> None:
    """Set the number of processes of a launcher whose command line has none."""
    alone = PROGRAMS[program].alone
    visible = str(command.environment.get(DEVICES, "")).split(",")
    # Without the name of a UUID or MIG device, and without -1, which hides all.
    devices = [word for word in visible if word.strip().isdigit()]
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
    include = draft.take("include", "")
    exclude = draft.take("exclude", "")
    here = draft.take("processes_here")
    machines = draft.take("machines")
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
    fewest_machines = str(machines or 1).partition(":")[0]  # of MIN:MAX
    if hosts is not None:
        hosts = _select_slots(hosts, include, exclude)
        hosts = _limit_hosts(draft, hosts, machines, here)
        machines = len(hosts)
        if None not in hosts.values():
            origin = draft.origin(
                "processes_here", "hosts", "hostfile", "include", "exclude", "machines"
            )
            if total:  # of Horovod and MPI
                hosts, here = _filled(draft, hosts, total)
                machines = len(hosts)
            draft.keep("processes", sum(number or 0 for number in hosts.values()), origin)
    elif here is not None and fewest_machines.isdigit():
        origin = draft.origin("processes_here", "tasks", "tasks_here", "machines") or program
        draft.keep("processes", here * int(fewest_machines), origin)
    elif total and str(machines or "").isdigit():
        here = total // int(machines)  # Accelerate says the processes of all machines
        if here * int(machines) != total:
            raise ConfigError(
                f"{draft.origin('processes')} = {total}, {draft.origin('machines')} = {machines}:"
                " as many processes start on each machine; make the first a multiple of the second"
            )
    _start(draft, program, hosts, here, machines)


def _limit_hosts(
    draft: Draft, hosts: dict[str, int | None], machines: Any, here: int | None
) -> dict[str, int | None]:
    """Return the first ``machines`` hosts with at most ``here`` slots each; None: no limit.

    Raises ConfigError, one line, if there are fewer hosts.
    """
    if machines:
        number = whole(machines)
        if number > len(hosts):
            fact = draft.facts["machines"]
            named = "1 machine is" if len(hosts) == 1 else f"{len(hosts)} machines are"
            raise ConfigError(f"{fact.origin} = {fact.value}, but {named} named: make them equal")
        hosts = dict(list(hosts.items())[:number])
    if not here:
        return hosts
    return {name: min(slots, here) if slots else here for name, slots in hosts.items()}


def _filled(
    draft: Draft, hosts: dict[str, int | None], total: int
) -> tuple[dict[str, int | None], int | None]:
    """Return the machines that ``total`` ranks fill one after the other, with their ranks.

    The second is the number of ranks of each machine; None: it differs, or all slots are used.
    """
    used: dict[str, int | None] = {}
    left = total
    for name, slots in hosts.items():
        ranks = min(slots or 0, left)
        if ranks:
            used[name] = ranks
            left -= ranks
    if used == hosts:
        return hosts, None
    numbers_of_ranks = set(used.values())
    is_even = len(numbers_of_ranks) == 1
    if len(numbers_of_ranks) > 1:
        draft.note_fact("differs", "hostfile", "the ranks do not fill it: write another one")
        # A start by this file would fill all of its slots.
        draft.facts.pop("hostfile", None)
    draft.keep("filled", len(used), draft.origin("processes"))
    draft.translated.add("filled")
    return used, numbers_of_ranks.pop() if is_even else None


def _check(draft: Draft, here: Any, total: Any, machines: Any) -> None:
    """Raise ConfigError for numbers below 1, and for a machine beyond the last one."""
    numbers = (
        ("processes_here", here, "processes"),
        ("processes", total, "processes"),
        ("machines", machines, "machines"),
    )
    for name, number, unit in numbers:
        if str(number).isdigit() and int(number) < 1:
            raise ConfigError(
                f"{draft.origin(name)} = {number}: expected a number of {unit}, 1 or more"
            )
    # A variable of a shell or a placeholder, such as ${SLURM_NNODES} or <N>, is left as it is.
    if machines is not None and not re.fullmatch(r"\d+(:\d+)?|.*[${<].*", str(machines)):
        raise ConfigError(
            f"{draft.origin('machines')} = {machines}: expected a number of machines, or MIN:MAX"
        )
    rank = draft.take("rank_of_machine")
    most_machines = str(machines).rpartition(":")[2]  # of MIN:MAX
    has_most = most_machines.isdigit()
    if draft.take("standalone") and has_most and int(most_machines) > 1:
        raise ConfigError(
            f"standalone, {draft.origin('machines')} = {machines}: torchrun meets on this machine"
            " alone; leave one out"
        )
    draft.note_fact("idle", "standalone", "ranks on one machine need no such word")
    if rank is not None and has_most and rank >= int(most_machines):
        raise ConfigError(
            f"{draft.origin('rank_of_machine')} = {rank}, {draft.origin('machines')} = {machines}:"
            f" machines are counted from 0 to {int(most_machines) - 1}"
        )


def _tasks(draft: Draft, machines: Any) -> tuple[int, Any]:
    """Return the tasks of srun on each machine, and the machines."""
    here = draft.take("tasks_here")
    tasks = draft.take("tasks")
    number = whole(machines or 1)
    if here and tasks and here * number != tasks:
        raise ConfigError(
            f"srun: {tasks} tasks, but {here} on each of {number} machine(s): make them equal"
        )
    if tasks and tasks % number:
        raise ConfigError(
            f"srun: {tasks} tasks on {number} machines: distcore starts as many on each"
        )
    if here:
        return here, machines
    # Without any number, srun starts one task on each machine.
    return (tasks or number) // number, machines


def _hosts(draft: Draft, include: str) -> dict[str, int | None] | None:
    """Return the machines with their slots, or ``None`` if nothing names any.

    Slots that are not known are ``None``.
    """
    listed = draft.take("hosts")
    file = draft.take("hostfile")
    if file is not None:
        try:
            return _read_hostfile(Path(str(file)).expanduser())
        except FileNotFoundError:
            draft.note_fact(
                "open",
                "hostfile",
                "it is not here, so its slots are not known; --nproc N says how many "
                "processes there are on all machines",
            )
            return None
    if listed is not None:
        return _read_host_list(str(listed), "-H")
    if not include:
        return None
    hosts: dict[str, int | None] = {}
    for part in include.split("@"):
        name, _, slots = part.partition(":")
        # Slots are counted from 0: a machine has at least as many as the highest one says.
        numbers = map(int, re.findall(r"\d+", slots))
        hosts[name.strip()] = max(numbers, default=0) + 1 if slots else None
    return hosts


def _read_host_list(text: str, flag: str) -> dict[str, int | None]:
    """Return the machines of ``HOST:SLOTS,HOST:SLOTS``, the argument of ``flag``."""
    hosts: dict[str, int | None] = {}
    for part in text.split(","):
        name, _, slots = part.strip().partition(":")
        if name in hosts:
            raise ConfigError(f"{flag} {text}: {name} is listed twice")
        hosts[name] = int(slots) if slots.isdigit() else None
    return hosts


def _read_hostfile(file: Path) -> dict[str, int | None]:
    """Return the machines of a hostfile, in the form of DeepSpeed, Open MPI or MPICH."""
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        # MPICH's HOST:4 becomes the HOST slots=4 of the others.
        words = line.partition("#")[0].replace(":", " slots=").split()
        if not words:
            continue
        name, *attributes = words
        slots = re.search(r"slots\s*=\s*(\d+)", " ".join(attributes))
        if name in hosts:
            raise ConfigError(f"hostfile {file}, line {number}: {name} is listed twice")
        hosts[name] = int(slots[1]) if slots else None
    if not hosts:
        raise ConfigError(
            f"hostfile {file}: names no machine; expected lines such as: host0 slots=4"
        )
    return hosts


def _select_slots(
    hosts: dict[str, int | None], include: str, exclude: str
) -> dict[str, int | None]:
    """Return the machines with the slots that DeepSpeed's ``--include`` or ``--exclude`` leaves.

    Both are ``HOST:0,1@HOST``. Raises ConfigError for a machine or a slot that is not there.
    """
    selection = include or exclude
    if not selection:
        return hosts
    left: dict[str, int | None] = {} if include else dict(hosts)
    for part in selection.split("@"):
        name, colon, slots = part.strip().partition(":")
        if name not in hosts:
            flag = "--include" if include else "--exclude"
            raise ConfigError(f"{flag} {selection}: no machine {name!r}{nearest(name, hosts)}")
        slots_of_host = hosts[name]
        numbers = map(int, re.findall(r"\d+", slots))
        if slots_of_host is not None and any(number >= slots_of_host for number in numbers):
            raise ConfigError(f"{part.strip()}: {name} has {slots_of_host} slots, counted from 0")
        number_of_slots = len(set(slots.split(",")))
        if include:
            left[name] = number_of_slots if colon else slots_of_host
        elif not colon:
            left.pop(name, None)
        else:
            left[name] = None if slots_of_host is None else slots_of_host - number_of_slots
    return {name: slots for name, slots in left.items() if slots != 0}


def _start(
    draft: Draft,
    program: str,
    hosts: dict[str, int | None] | None,
    here: int | None,
    machines: Any,
) -> None:
    """Add the flags that start the ranks where that takes more than ``nproc``."""
    selection = _host_flags(draft, hosts)
    address = draft.take("address")
    port = draft.take("port")
    meeting = draft.take("meeting") or f"{address or 'HOST'}:{port or 29500}"
    named = draft.take("launcher")
    no_ssh = draft.take("no_ssh")
    partition = draft.take("partition")
    least = draft.take("least_machines")
    most = draft.take("most_machines")
    port_of_ssh = draft.take("ssh_port")
    nodes = f"{least}:{most}" if least and most else str(machines or 1)
    ranks_each = ["--nproc", str(here)] if here else []
    # A hostfile that is not used whole needs the number of its machines that are.
    is_part = not draft.facts.keys().isdisjoint(("machines", "filled"))
    nodes_of_part = ["--nodes", nodes] if is_part else []
    is_mpi_elsewhere = program == "mpirun" and hosts is not None and not _are_local(hosts)
    has_hostfile = "--hostfile" in selection
    if program == "srun" or named == "slurm":
        launcher = f"slurm:{partition}" if partition else "slurm"
        flags = ["--nodes", nodes, *ranks_each]
    elif named in MPI or is_mpi_elsewhere:
        launcher = "mpi"
        flags = [*selection, *nodes_of_part, *ranks_each]
    elif no_ssh or ":" in nodes or (nodes != "1" and not has_hostfile):
        launcher = f"torchrun:{meeting}"
        count = str(len(hosts)) if hosts is not None and ":" not in nodes else nodes
        flags = ["--nodes", count, *(ranks_each or _equal_slots(hosts))]
    elif has_hostfile:
        launcher = f"ssh:{port_of_ssh}" if port_of_ssh else "ssh"
        flags = [*selection, *nodes_of_part, *ranks_each]
    else:
        draft.start += selection
        _note_hosts(draft, selection)
        draft.note_fact(
            "idle", "variables", "DeepSpeed sets them on several machines, which these are not"
        )
        return
    variables = []
    for variable in draft.take("variables", []):
        variables += ["--env", variable]
    draft.note_fact("start", "variables", shlex.join(variables))
    start = ["--launcher", launcher, *flags, *variables]
    draft.start += start
    origin = draft.origin("machines", "hostfile", "hosts", "launcher") or program
    draft.keep("elsewhere", launcher, origin)
    draft.translated.add("elsewhere")
    draft.note_fact("start", "processes", shlex.join(start))
    _note_hosts(draft, start)


def _host_flags(draft: Draft, hosts: dict[str, int | None] | None) -> list[str]:
    """Return the flags that name machines; note a hostfile that is yet to be written."""
    include = draft.take("include", "")
    exclude = draft.take("exclude", "")
    flags = []
    if include:
        flags += ["--include", include]
    if exclude:
        flags += ["--exclude", exclude]
    if "hostfile" in draft.facts:
        return ["--hostfile", str(draft.take("hostfile")), *flags]
    if hosts is not None and not _are_local(hosts):
        lines = "; ".join(f"{name} slots={slots or 'N'}" for name, slots in hosts.items())
        remedy = f"write one with a line for each machine, such as {lines}"
    elif exclude:
        remedy = "none is named, and DeepSpeed's own, /job/hostfile, is not read"
    else:
        return flags
    draft.note("open", "hostfile", remedy)
    return ["--hostfile", "FILE", *flags]


def _are_local(hosts: dict[str, int | None]) -> bool:
    """Return True if all names are names of this machine."""
    return all(name in LOCAL for name in hosts)


def _note_hosts(draft: Draft, flags: list[str]) -> None:
    """Note the fate of each key that names machines."""
    for name in HOST_KEYS:
        if flags:
            draft.note_fact("start", name, shlex.join(flags))
        else:
            draft.note_fact("idle", name, "for several machines, which these are not")


def _equal_slots(hosts: dict[str, int | None] | None) -> list[str]:
    """Return the flag for the number of slots if it is known and equal on all machines."""
    slots = set(hosts.values()) if hosts else set()
    if len(slots) == 1 and None not in slots:
        return ["--nproc", str(slots.pop())]
    return []
