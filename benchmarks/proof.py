"""The cost of the proof of the first steps: runs with it and without, in turns.

    python benchmarks/proof.py [--rounds 3] [--strategies single,ddp,fsdp,deepspeed,mesh]

bert-tiny, resnet-18 and llama-tiny on the built-in data of their tasks, in fp32, one thread
per process; all strategies
but ``single`` on two ranks. Each run ends after its third step. Columns: seconds of the replay, as
the report has them; seconds from the beginning of a run to the end of its third step, with less
without, which adds the copy, the evaluated rows and the weights that are gathered; memory of the
main rank at its highest, beyond that of its own steps, as the report has it; and the largest
difference of loss and norm from one plain process. Where the proof is not made, the row says why.

Bounds: every run is proved, and its replay takes at most 5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcore import Progress, Run, hookimpl

STEPS = 3
COST = "cost.json"
"""File in a run's folder, which the extension ``Cost`` writes."""
JOBS = {
    "bert-tiny": "--model bert-tiny --max-seq-len 64 --global-batch-size 16",
    "resnet-18": "--task image-classification --model resnet-18 --global-batch-size 16",
    "llama-tiny": "--task causal-lm --model llama-tiny --max-seq-len 64 --global-batch-size 16",
}
"""Arguments of each job."""
BOUND = 5.0
"""Most seconds of a replay."""
STRATEGIES = "single,ddp,fsdp,deepspeed,mesh"


class Cost:
    """An extension that writes the seconds to the end of the last step."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress) -> None:
        """Write them on the main rank, after the last step."""
        if progress.step == STEPS and run.world.is_main:
            cost = {"seconds": time.perf_counter() - self._began}
            Path(str(run.config.out), COST).write_text(json.dumps(cost), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run took."""

    seconds: float
    """From its beginning to the end of the last step."""
    proof: dict[str, Any]
    """The entry ``proof`` of the report."""


def main() -> int:
    """Run all jobs and print the table, in Markdown; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--jobs", default=",".join(JOBS))
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    print("| job | strategy | replay, s | first steps, s | memory, MiB | difference |")
    print("|---|---|---|---|---|---|")
    held = True
    with tempfile.TemporaryDirectory(prefix="proof-") as folder:
        for job in arguments.jobs.split(","):
            for strategy in arguments.strategies.split(","):
                rounds = [
                    in_turn(Path(folder), job, strategy, number)
                    for number in range(arguments.rounds)
                ]
                print(row(job, strategy, rounds), flush=True)
                proofs = [with_proof.proof for with_proof, _ in rounds]
                held = held and all(
                    not proof["why"] and proof["seconds"] <= BOUND for proof in proofs
                )
    print("bounds", "held" if held else "BROKEN")
    return 0 if held else 1


def in_turn(folder: Path, job: str, strategy: str, number: int) -> tuple[Measured, Measured]:
    """Return what a run took with the proof and without, begun with the other one
    in each second round.
    """
    measured: dict[str, Measured] = {}
    for prove in ("on", "off") if number % 2 == 0 else ("off", "on"):
        measured[prove] = measure(
            folder / f"{job}-{strategy}-{number}-{prove}", job, strategy, prove
        )
    return measured["on"], measured["off"]


def measure(out: Path, job: str, strategy: str, prove: str) -> Measured:
    """Train for the first steps. Exits with the output of a run that fails."""
    ranks = "1" if strategy == "single" else "2"
    command = [
        sys.executable,
        "-m",
        "distcore",
        "train",
        *JOBS[job].split(),
        "--strategy",
        strategy,
        "--nproc",
        ranks,
    ]
    command += [
        "--precision",
        "fp32",
        "--device",
        "cpu",
        "--max-steps",
        str(STEPS),
        "--prove",
        prove,
        "--out",
        str(out),
    ]
    command += ["--set", "eval_at_epoch_end=false", "--set", f"extensions.{__file__}:Cost=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    cost = json.loads((out / COST).read_text(encoding="utf-8"))
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return Measured(seconds=cost["seconds"], proof=report["proof"])


def row(job: str, strategy: str, rounds: list[tuple[Measured, Measured]]) -> str:
    """Return a line of the table: medians over the rounds."""
    proof = rounds[0][0].proof
    if proof["why"]:
        return f"| {job} | {strategy} | {proof['why']} | | | |"
    replay = statistics.median(with_proof.proof["seconds"] for with_proof, _ in rounds)
    seconds = statistics.median(
        with_proof.seconds - without.seconds for with_proof, without in rounds
    )
    memory = statistics.median(with_proof.proof["bytes"] for with_proof, _ in rounds) / 2**20
    apart = max(max(with_proof.proof["loss"], with_proof.proof["norm"]) for with_proof, _ in rounds)
    return f"| {job} | {strategy} | {replay:.2f} | {seconds:.2f} | {memory:.0f} | {apart:.1e} |"


if __name__ == "__main__":
    sys.exit(main())
