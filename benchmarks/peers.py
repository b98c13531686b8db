"""Compare distcore with other libraries, each at the best settings that its pages name,
one thread per process.

    python benchmarks/peers.py --data emotion.json [--job
                               rows|lm|mlm|seq2seq|images] [--precision fp32|bf16] [--nproc 1|2]
                               [--model NAME] [--steps 53] [--rounds 3] [--search [30]] [--python
                               PYTHON]

``--python`` is an interpreter with the dependency group ``peers``, if this one has it not; distcore
itself runs in this one. In each round every library trains once, in rotating order, on the same
rows. Bounds are of CPU seconds per 1,000
rows, summed over ranks and the processes that they start: other work on the machine changes them
less than the seconds on the clock, which are shown beside them. The first 3 steps do not count.
Those left should be whole windows of 50
steps, in which rows are grouped by length: the HF Trainer begins each with its longest rows, so a
part of one is to its disadvantage.

``rows`` fine-tunes a BERT on texts, ``mlm`` pretrains one on passages of 1 to 6 texts, ``seq2seq``
trains a T5, ``images`` a residual network on images in memory, without augmentation. ``lm`` is a
causal language model on prompts and completions of unlike lengths; its clock runs over one epoch,
because packing changes the number of steps. Beside a loop by hand there are the HF Trainer,
Lightning and Accelerate, or for ``lm`` TRL's SFTTrainer (benchmarks/peer_runs).

``--search MINUTES`` first tries the flags that each library documents for speed, and
compares with the fastest.

Bounds: for rows in fp32 the defaults are 3 times as fast as the HF Trainer's, and as fast as its
groups; in bf16 the preset is 1.25 times as fast as the best peer, and the defaults as fast as the
HF Trainer's groups. Everywhere else the better of the two is 1.1 times as fast as the best peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

RUNS = Path(__file__).parent / "peer_runs"
sys.path.append(str(RUNS))
import make  # noqa: E402
from search import GROUPED, Flags, search  # noqa: E402

ALL = ("by-hand", "trainer", "lightning", "accelerate")
LIBRARIES = {"rows": ALL, "lm": ("by-hand", "trl"), "mlm": ALL, "seq2seq": ALL, "images": ALL}
"""The other libraries of each job."""
LIMIT = 300.0
"""Seconds of one run in a search."""


def main() -> int:
    """Run the rounds and print the table; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", required=True, type=Path, help="JSON: a list of [text, label], labels 0 to 5"
    )
    parser.add_argument("--job", choices=LIBRARIES, default="rows")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--nproc", type=int, choices=(1, 2), default=1)
    parser.add_argument("--model", help="a built-in model")
    parser.add_argument("--steps", type=int, default=53)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--search", type=float, nargs="?", const=30.0, metavar="MINUTES", help="try flags (30)"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="an interpreter that has the libraries"
    )
    arguments = parser.parse_args()
    if arguments.job == "lm" and arguments.nproc > 1:
        parser.error("--job lm: has one process")
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        os.environ.update(
            TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1", DISTCORE_CACHE=str(folder / "cache")
        )
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            read = make.texts(arguments.data)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        runs_by_kind = measure(read, folder, arguments)
    print("on", processor())
    held = show(arguments.job, arguments.precision, runs_by_kind)
    print("bounds", "held" if held else "BROKEN")
    return 0 if held else 1


def measure(
    read: Sequence[tuple[str, int]], folder: Path, arguments: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Return CPU and wall seconds per 1,000 rows of each run, by its kind."""
    job, steps = arguments.job, arguments.steps
    rows = make.data(
        job, read, 32 * (steps + 2) * arguments.nproc if job != "lm" else 32 * steps, folder
    )
    model = make.model(job, arguments.model or make.MODELS[job], rows, folder)

    def run(library: str, flags: Flags, limit: float | None = None) -> dict[str, float] | str:
        own = library == "distcore"
        program = str(RUNS / ("with_distcore.py" if own else "libraries.py"))
        given = [
            job,
            library,
            str(model),
            str(rows),
            str(steps),
            arguments.precision,
            json.dumps(flags),
        ]
        return run_once(
            sys.executable if own else arguments.python, arguments.nproc, [program, *given], limit
        )

    def cost(library: str, flags: Flags) -> float | str:
        done = run(library, flags, LIMIT)
        return done if isinstance(done, str) else done["cpu"]

    kinds = peers(job)
    if arguments.search:
        library, flags = search(job, list(LIBRARIES[job]), arguments.search, cost)
        print(f"fastest: {library} {dict(flags)}")
        kinds["searched"] = (library, flags)
    kinds |= {"distcore": ("distcore", {}), "distcore-fast": ("distcore", {"preset": "fast"})}
    runs_by_kind: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds):
        turn = number % len(kinds)
        for kind in [*kinds][turn:] + [*kinds][:turn]:
            one = run(*kinds[kind])
            if isinstance(one, str):
                sys.exit(f"{kind}: {one}")
            runs_by_kind[kind].append(one)
            print(f"  round {number}, {kind}: {one}", file=sys.stderr, flush=True)
    return runs_by_kind


def peers(job: str) -> dict[str, tuple[str, Flags]]:
    """Return what is compared with: each library's defaults, and the flags that
    mattered most in searches.
    """
    named: dict[str, tuple[str, Flags]] = {library: (library, {}) for library in LIBRARIES[job]}
    if job == "lm":
        return named | {"trl-grouped": ("trl", GROUPED), "trl-packed": ("trl", {"packing": True})}
    return named if job == "images" else named | {"trainer-grouped": ("trainer", GROUPED)}


def run_once(
    python: str, nproc: int, job: Sequence[str], limit: float | None
) -> dict[str, float] | str:
    """Return CPU and wall seconds per 1,000 rows of one run, or why there are none: its output,
    or its time limit.
    """
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command = [python, *(several if nproc > 1 else []), *job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"over {limit} s"
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"cpu"')]
    if done.returncode or len(ranks) != nproc:
        return f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return {"cpu": sum(rank["cpu"] for rank in ranks), "wall": max(rank["wall"] for rank in ranks)}


def show(
    job: str, precision: str, runs_by_kind: Mapping[str, Sequence[Mapping[str, float]]]
) -> bool:
    """Print the table; True if the bounds hold."""
    print(f"{'':<18}{'CPU s / 1,000 rows':>20}{'range':>18}{'on the clock':>15}{'range':>18}")
    cost = {}
    for kind, runs in runs_by_kind.items():
        cpu, wall = ([one[clock] for one in runs] for clock in ("cpu", "wall"))
        cost[kind] = statistics.median(cpu)
        print(
            f"{kind:<18}{cost[kind]:>20.2f}{between(cpu):>18}{statistics.median(wall):>15.2f}{between(wall):>18}"
        )
    ratios = bounds(job, precision, cost)
    if precision == "bf16" and "bf16" not in processor():
        print(f"{', '.join(ratios)}: not measured here, this processor does not multiply in bf16")
        return True
    for what, (ratio, bound) in ratios.items():
        print(f"{what}: {ratio:.2f} (bound: {bound})")
    return all(ratio >= bound for ratio, bound in ratios.values())


def processor() -> str:
    """Return the name of the processor, and its instructions for bf16 if it has any."""
    lines = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if sys.platform == "linux"
        else []
    )
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    bf16 = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in said.get("flags", "").split()]
    return ", ".join((said.get("model name") or platform.machine(), *bf16))


def between(seconds: Sequence[float]) -> str:
    """Return the range of a figure."""
    return f"{min(seconds):.2f} … {max(seconds):.2f}"


def bounds(job: str, precision: str, cost: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return how many times as fast distcore is, and how many it must be."""
    best = min(spent for kind, spent in cost.items() if not kind.startswith("distcore"))
    if job != "rows":
        return {"against the best peer": (best / min(cost["distcore"], cost["distcore-fast"]), 1.1)}
    grouped = {
        "defaults against the HF Trainer's groups": (
            cost["trainer-grouped"] / cost["distcore"],
            1.0,
        )
    }
    preset = {
        "preset against the best peer": (
            best / cost["distcore-fast"],
            1.25 if precision == "bf16" else 1.1,
        )
    }
    if precision == "bf16":
        return grouped | preset
    return (
        {"defaults against the HF Trainer's": (cost["trainer"] / cost["distcore"], 3.0)}
        | grouped
        | preset
    )


if __name__ == "__main__":
    sys.exit(main())
