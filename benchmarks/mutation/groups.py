"""Groups of the code that is mutated, each with the commands of ``distcore
check`` that concern it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutation.scratch import ROOT

QUICK_CASES = (
    "micro-batches-agree",
    "ranks-without-rows",
    "weighted-items",
    "tied-parameters",
    "parameter-groups",
    "own-steps",
    "fp16",
    "clip-by-both",
    "clip-after-accumulation",
    "every-size",
    "buffers-agree",
    "gather-unequal",
    "sum-over-ranks",
    "round-trip",
    "scalar-parameters",
    "loads-into-every-rank",
    "into-single",
    "bit-for-bit",
    "each-row-once",
    "true-world",
    "disagreement-is-named",
    "collectives-per-step",
)
"""Cases of every strategy that together look at most of it."""


@dataclass(frozen=True)
class Group:
    """Files that are mutated together."""

    folders: tuple[str, ...]
    """Folders or files below the root of the repository."""
    tests: tuple[str, ...]
    """Patterns of the test files that concern them."""
    checks: tuple[tuple[str, ...], ...]
    """Arguments of ``distcore check``, the quickest first."""
    without: tuple[str, ...] = ()
    """Names of files that do not train: they build a foreign library, or only speak."""
    warm: tuple[str, ...] = ()
    """Modules that each command of this group imports."""

    def files(self) -> list[Path]:
        """Return the files in order."""
        paths = [
            path
            for name in self.folders
            for path in ((ROOT / name).rglob("*.py") if "." not in name else [ROOT / name])
        ]
        return sorted(path for path in paths if self.has(str(path.relative_to(ROOT))))

    def has(self, file: str) -> bool:
        """Return True if this file, a path below the root of the repository, is in the group."""
        return file.startswith(self.folders) and Path(file).name not in self.without

    def quick_checks(self) -> list[tuple[str, ...]]:
        """Return the first check with the cases that notice most in little time; of a task all."""
        if self.checks[0][0] == "--task":
            return [*self.checks[:2]]
        return [(*self.checks[0], *(word for case in QUICK_CASES for word in ("--case", case)))]


def _plugin(
    name: str, *checks: str, without: Sequence[str] = (), warm: Sequence[str] = ()
) -> Group:
    commands = tuple(("--strategy", *check.split()) for check in checks)
    folder = f"plugins/{name}"
    tests = f"{folder}/tests/test_*.py", "tests/across/test_plans_of_strategies.py"
    return Group((f"{folder}/distcore_{name}",), tests, commands, tuple(without), tuple(warm))


_DDP = ("--strategy", "ddp")
GROUPS = {
    "ddp": _plugin("ddp", "ddp", "ddp --set strategy_options.find_unused=true", "dp"),
    "fsdp": _plugin("fsdp", "fsdp", "fsdp --set strategy_options.sharding=grad"),
    "deepspeed": _plugin(
        "deepspeed",
        "deepspeed --set strategy_options.stage=3",
        "deepspeed --set strategy_options.stage=1",
        warm=("deepspeed",),
    ),
    "horovod": _plugin(
        "horovod",
        "horovod",
        "horovod --set strategy_options.find_unused=true",
        without=("build.py", "build_status.py", "recipe.py", "__main__.py"),
    ),
    "accelerate": _plugin(
        "accelerate", "accelerate", without=("trackers.py",), warm=("accelerate",)
    ),
    "engine": Group(
        ("core/distcore/engine",),
        (
            "tests/engine/test_*.py",
            "tests/model/test_updates.py",
            "plugins/tasks/tests/padding_free/test_*.py",
        ),
        (_DDP,),
        ("overview.py",),
    ),
    "checkpoint": Group(
        ("core/distcore/checkpoint",),
        ("tests/checkpoint/test_*.py", "tests/engine/test_resume.py"),
        (_DDP, ("--strategy", "fsdp")),
    ),
    "sampling": Group(("core/distcore/plugin/batching",), ("tests/plugin/test_*.py",), (_DDP,)),
    "loss": Group(
        (
            "plugins/tasks/distcore_tasks/shared/chunked_cross_entropy",
            "plugins/tasks/distcore_tasks/preference/losses.py",
            "core/distcore/plugin/task/step.py",
            "core/distcore/plugin/task/phases.py",
        ),
        (
            "plugins/tasks/tests/shared/chunked_cross_entropy/test_*.py",
            "plugins/tasks/tests/preference/test_*.py",
            "tests/engine/test_phases.py",
            "tests/plugin/test_hooks.py",
        ),
        (("--task", "causal-lm"), ("--task", "preference"), _DDP),
    ),
}
"""By name."""
