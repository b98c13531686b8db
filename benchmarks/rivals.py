"""Run laws 2, 4, 5 and 7 against other trainers, each with its documented settings:
who keeps which law?

    python benchmarks/rivals.py [fabric lightning accelerate trainer trl
    …] [--work build/rivals] [--page]

Each rival gets an environment of its own in ``--work``, with torch as here and the newest version
of its packages. Its adapter (benchmarks/rival_jobs) trains the model and the rows of ``distcore
check`` on two processes, over gloo, in
fp32: as its guides say, with the settings that they offer for a right mean, for
evaluation and for resuming.

- partitions, ragged-tail, weighted-items: parameters after 8 steps of 2 ranks × 2
  micro-batches against one process with whole batches. A ragged tail is an epoch whose rows do not
  fill the last step; items are what a mean is over, such as tokens, here one to three a row.
- every-row-once: rows missing, too many or in other places, of 11 evaluated by two ranks.
- other-world: save after step 4 on two ranks, and go on in one process, against the whole
  run in one process.
- mid-epoch, with-dropout: save after step 3 of 8, in the middle of a shuffled epoch, and go
  on in new processes, against the same run in one go.

``--page`` writes docs/rivals.json and the table in docs/laws.md.

Bounds: those of ``distcore check``, 1e-5 or exact; an error above its bound is bold in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from distcore.testing.findings import EXACT, FORWARD, FP32
from distcore.testing.reference import largest_difference

HERE = Path(__file__).parent
NUMBERS, PAGE = HERE.parent / "docs/rivals.json", HERE.parent / "docs/laws.md"
MARKS = re.compile(r"(<!-- rivals -->\n).*?(<!-- /rivals -->)", re.S)
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Rival:
    """Another trainer."""

    title: str
    """Its name in the table."""
    environment: str
    """Name of its environment; two that come in one distribution share one."""
    requirements: tuple[str, ...]
    """Its packages."""


RIVALS = {
    "fabric": Rival("Fabric", "lightning", ("lightning", "torchdata")),
    "lightning": Rival("Lightning", "lightning", ("lightning", "torchdata")),
    "accelerate": Rival("Accelerate", "accelerate", ("accelerate",)),
    "trainer": Rival("HF Trainer", "transformers", ("transformers", "accelerate")),
    "trl": Rival("TRL", "trl", ("trl", "transformers")),
}
"""By the name of the adapter."""
CASES = {
    "partitions": (2, FP32),
    "ragged-tail": (2, FP32),
    "weighted-items": (2, FP32),
    "every-row-once": (4, EXACT),
    "other-world": (5, FP32),
    "mid-epoch": (7, EXACT),
    "with-dropout": (7, EXACT),
}
"""Law and bound of each case."""


def python_of(rival: Rival, work: Path) -> Path:
    """Return the Python of the rival's environment, which is made if there is none."""
    folder = work / rival.environment
    python = folder / "bin/python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        for packages in ([TORCH], [TORCH, *rival.requirements, str(HERE.parent / "core")]):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "ready").touch()
    return python


def orders(out: Path) -> list[list[dict[str, Any]]]:
    """Return the runs of a rival, in launches with the same ranks; a resume is a launch after
    that of its save.
    """

    def order(name: str, **settings: Any) -> dict[str, Any]:
        return {"out": str(out / name), **settings}

    def halves(name: str, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        settings |= {"folder": str(out / f"{name}-saved")}
        return order(f"{name}-first", stop=3, **settings), order(name, resume=True, **settings)

    whole: dict[str, Any] = {"accumulation": 1, "batch": 6, "shuffle": True}
    first, rest = zip(
        halves("mid-epoch", **whole), halves("with-dropout", dropout=0.2, **whole), strict=True
    )
    moved: dict[str, Any] = {"folder": str(out / "moved"), "batch": 6}
    return [
        [
            order("partitions", evaluate=True),
            order("ragged-tail", rows=53),
            order("weighted-items", weighted=True),
        ],
        [
            order("other-world-first", accumulation=1, stop=4, **moved),
            *first,
            order("mid-epoch-whole", **whole),
            order("with-dropout-whole", dropout=0.2, **whole),
        ],
        [*rest],
        [order("other-world", accumulation=2, world=1, resume=True, **moved)],
    ]


def launch(
    python: str, job: str, todo: Sequence[Mapping[str, Any]], folder: Path, world: int
) -> str:
    """Run orders in ``world`` new processes; return what went wrong, or nothing."""
    file = folder / "orders.json"
    file.write_text(json.dumps(todo))
    several = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        if world > 1
        else []
    )
    variables = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [python, *several, str(HERE / f"rival_jobs/{job}_job.py"), str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=variables, check=False, timeout=900
    )
    return "" if done.returncode == 0 else done.stdout[-1000:] + done.stderr[-3000:]


def measure(rival: str, python: str, folder: Path) -> dict[str, float | str]:
    """Return the error of each case, or words where there is none."""
    references = _references(folder)
    ours = folder / rival
    ours.mkdir()
    for todo in orders(ours):
        for each in todo:
            Path(each.get("folder") or ours).mkdir(exist_ok=True)
        if said := launch(python, rival, todo, ours, todo[0].get("world", 2)):
            print(said, file=sys.stderr, flush=True)
    errors: dict[str, float | str] = {}
    for case in CASES:
        if case == "every-row-once":
            errors[case] = _misplaced(ours / "partitions.json", references / "partitions.json")
            continue
        against = (
            ours / f"{case}-whole" if case in ("mid-epoch", "with-dropout") else references / case
        )
        errors[case] = (
            largest_difference(load_file(ours / case), load_file(against))[0]
            if (ours / case).is_file()
            else "failed"
        )
    return errors


def _references(folder: Path) -> Path:
    """Return the folder of what one process reaches, which is made if there is none."""
    made = folder / "plain"
    if not made.exists():
        made.mkdir()
        names = ("partitions", "ragged-tail", "weighted-items", "other-world")
        todo = [
            each
            for launched in orders(made)
            for each in launched
            if Path(each["out"]).name in names
        ]
        if said := launch(sys.executable, "plain", todo, made, 1):
            sys.exit(said)
    return made


def _misplaced(actual: Path, expected: Path) -> float | str:
    """Return the rows that are missing, too many or in another place."""
    if not actual.is_file():
        return "failed"
    rows, right = (json.loads(file.read_text()) for file in (actual, expected))
    wrong = sum(abs(row - other) > 10 * FORWARD for row, other in zip(rows, right, strict=False))
    return float(wrong + abs(len(rows) - len(right)))


def versions(python: str, rival: Rival) -> dict[str, str]:
    """Return the versions of torch and the rival's packages."""
    names = ["torch", *rival.requirements]
    code = (
        "from importlib.metadata import version; import json; print(json.dumps({n: version(n) for"
        f" n in {names}}}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def table(numbers: Mapping[str, Any]) -> str:
    """Return the table of docs/laws.md."""
    rows = numbers["rivals"]
    lines = [
        f"| law | case | bound | {' | '.join(row['title'] for row in rows)} |",
        "|---|---|---|" + "---|" * len(rows),
    ]
    for case, (law, bound) in CASES.items():
        cells = [_cell(row["errors"][case], bound) for row in rows]
        lines.append(
            f"| {law} | {case} | {f'{bound:.0e}' if bound else 'exact'} | {' | '.join(cells)} |"
        )
    known = {f"{name} {number}": None for row in rows for name, number in row["versions"].items()}
    return "\n".join([*lines, "", f"Measured on {numbers['date']}: {', '.join(known)}.", ""])


def _cell(error: float | str, bound: float) -> str:
    if isinstance(error, str):
        return error
    shown = f"{error:.1e}" if error % 1 else f"{error:.0f}"
    return shown if error <= bound else f"**{shown}**"


def main() -> int:
    """Measure the rivals and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="RIVAL", help=f"of {', '.join(RIVALS)}; default: all"
    )
    parser.add_argument(
        "--work", type=Path, default=HERE.parent / "build/rivals", help="folder of the environments"
    )
    parser.add_argument(
        "--page", action="store_true", help="write docs/rivals.json, and the table in docs/laws.md"
    )
    arguments = parser.parse_args()
    names = arguments.names or list(RIVALS)
    if unknown := sorted(set(names) - set(RIVALS)):
        parser.error(f"no rival named {unknown[0]} (rivals: {', '.join(RIVALS)})")
    rows = []
    with tempfile.TemporaryDirectory(prefix="rivals-") as folder:
        for name in names:
            python = str(python_of(RIVALS[name], arguments.work.absolute()))
            errors = measure(name, python, Path(folder))
            rows.append(
                {
                    "title": RIVALS[name].title,
                    "versions": versions(python, RIVALS[name]),
                    "errors": errors,
                }
            )
            print(rows[-1], flush=True)
    numbers = {"date": str(date.today()), "rivals": rows}
    if arguments.page:
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
        PAGE.write_text(
            MARKS.sub(lambda marks: f"{marks[1]}{table(numbers)}{marks[2]}", PAGE.read_text())
        )
    print(table(numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
