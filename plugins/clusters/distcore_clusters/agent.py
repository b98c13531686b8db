"""torchelastic's agent with torchrun's flags, ready to use: ``python
-m distcore_clusters.agent FLAGS …``.

It does the chores that torchrun leaves to the user: a new store for every attempt, an address of
this machine for the others, and a host for the rendezvous. It ends with the exit status of the
first failed rank, without tracebacks of its own. With ``--lifeline`` the end of its stdin counts as
SIGTERM, so agents end with the ssh that started them. Ranks die with their agent, even a killed
one, and an agent ends once it cannot reach the others.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser

from distcore import ConfigError, RankError
from distcore.launchers import AGENT_VARIABLE
from distcore.launchers.processes import silence_torchelastic
from distcore.rank_environment import address_toward, is_here, port_for_ranks
from distcore_clusters.planning import LIFELINE

LOOK = 5.0
"""Seconds between two looks at the machine where nodes meet, and that one may take."""
GONE = "no agent hosts it, or the machine of that agent or the link to it is gone"


def main(argv: Sequence[str]) -> int:
    """Run the agent to its end; return the exit status."""
    words = list(argv)
    if LIFELINE in words[:1]:
        del words[0]
        threading.Thread(target=_end_with_stdin, name="distcore-lifeline", daemon=True).start()
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    with silence_torchelastic():
        try:
            arguments = _parse(words)
            _watch(arguments)
            config, command, command_arguments = config_from_args(arguments)
            with port_for_ranks(
                arguments.master_port, "(start the run again: each has a port of its own)"
            ):
                elastic_launch(config, command)(*command_arguments)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _status(rank, failure.exitcode)
        except SignalException as error:
            return 128 + int(error.sigval)
        except (RendezvousError, TimeoutError) as error:
            endpoint = arguments.rdzv_endpoint or arguments.master_addr
            print(f"error: the nodes did not meet at {endpoint}: {_cause(error)}", file=sys.stderr)
            return RankError.exit_code
    return 0


def _parse(words: list[str]) -> Namespace:
    """Return torchrun's arguments, completed with the values of this machine."""
    parser = get_args_parser()
    parser.allow_abbrev = False  # the words after the module are flags of its own
    actions = parser._option_string_actions
    # an older torch has 30 seconds, fixed
    if "--shutdown-timeout" in words and "--shutdown-timeout" not in actions:
        at = words.index("--shutdown-timeout")
        del words[at : at + 2]
    arguments: Namespace = parser.parse_args(words)
    if "OMP_NUM_THREADS" not in os.environ:
        from distcore.launchers.processes import threads_per_rank

        os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(int(arguments.nproc_per_node)))
    if arguments.rdzv_backend == "c10d":
        # Else torch keeps one store: a later attempt reads the addresses of the one before, and a
        # node that joins later looks for a store that nobody announces to it.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        host, _, port = arguments.rdzv_endpoint.rpartition(":")
        if arguments.nnodes == "1":  # no other agent can host it
            with port_for_ranks(port, "(--launcher torchrun:HOST:PORT)"):
                _bind(int(port))
        hosts_it = is_here(host) and _is_free(int(port))
        # else torch joins another agent here that was faster
        if not (hosts_it and _matches_machine_hostname(host)):
            arguments.rdzv_conf = ",".join(
                filter(None, [arguments.rdzv_conf, f"is_host={int(hosts_it)}"])
            )
        arguments.local_addr = arguments.local_addr or address_toward(host)
    return arguments


def _watch(arguments: Namespace) -> None:
    """End this process when it loses the rendezvous, if that is on another machine.

    torch would wait for an answer over a dead link until the system gives the connection up, a
    quarter of an hour.
    """
    host, _, port = arguments.rdzv_endpoint.rpartition(":")
    if arguments.rdzv_backend == "c10d" and not is_here(host):
        # Ranks give up first, and say so.
        patience = float(getattr(arguments, "shutdown_timeout", 30)) + LOOK
        address = (host.strip("[]"), int(port))
        watch = threading.Thread(target=_end_without, args=(*address, patience), daemon=True)
        watch.start()


def _end_without(host: str, port: int, patience: float) -> None:
    """End this process, and with it its ranks, once ``host:port`` was out of
    reach for ``patience`` seconds.
    """
    reached = None
    while True:
        try:
            socket.create_connection((host, port), timeout=LOOK).close()
            reached = time.monotonic()
        except OSError:
            if reached is not None and time.monotonic() - reached > patience:
                line = (
                    f"error: {socket.gethostname()} has lost {host}:{port}, where the nodes meet:"
                    f" {GONE}"
                )
                print(line, file=sys.stderr, flush=True)
                os._exit(RankError.exit_code)
        time.sleep(LOOK)


def _is_free(port: int) -> bool:
    """Return True unless another agent of this machine already hosts the meeting point."""
    try:
        _bind(port)
    except OSError:
        return False
    return True


def _bind(port: int) -> None:
    """Raise OSError if a program of this machine listens on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


def _status(rank: int, code: int) -> int:
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    print(f"error: rank {rank} on {socket.gethostname()} was killed by {name}", file=sys.stderr)
    return RankError.exit_code


def _cause(error: Exception) -> str:
    """Return in one line why nodes did not meet; torch speaks of a store
    and of an inner exception.
    """
    if isinstance(error, RendezvousConnectionError):
        return GONE
    return " ".join(str(error).split())


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
