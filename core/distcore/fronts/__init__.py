"""How ranks come to life, on one machine or on many, through an engine that exists.

A front is an entry point of the group ``distcore.fronts``: a class that takes no arguments, with the methods of
``Front``. ``distcore train --launcher NAME`` builds a ``Spec``, has the front plan, and prints the plan
(``--dry-run``) or has the front run it.
"""

from distcore.fronts.contract import Command, Front, Here, Host, Plan, Spec
from distcore.fronts.planning import check_restarts, need_nproc, refuse, train_command, variables_elsewhere
from distcore.fronts.running import run_command, write_files

__all__ = [
    "Command",
    "Front",
    "Here",
    "Host",
    "Plan",
    "Spec",
    "check_restarts",
    "need_nproc",
    "refuse",
    "run_command",
    "train_command",
    "variables_elsewhere",
    "write_files",
]
