"""Disturb runs on two machines by random faults; check that they continue, and end
with the same weights.

Machines are network namespaces, as in tests/machines, each with an agent of ``--launcher torchrun
--nodes 2``. A fault is drawn for one of the machines; an agent that ends is started again by the
same command, as a scheduler would. The run folder is a file system of 64 MiB, which one of the
faults fills. Needs root.

Bounds: a run goes on, or its agents end with one line and no traceback, within its ``timeout`` and
``MARGIN`` seconds after a fault is over; the final weights are bit for bit those of an undisturbed
run of two machines.

With ``--page`` the results go to docs/chaos.json run by run. ``--go-on`` keeps existing
results without a problem, for a benchmark that was interrupted, or stopped at a defect.

    python benchmarks/chaos.py [--faults 50] [--seed 20] [--page [--go-on]]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from distcore import checkpoint

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

import machine_job as job  # noqa: E402  # importable only now
from faults import FAULTS, TIMEOUT  # noqa: E402
from machines import Machine, machines, why_not  # noqa: E402

PAGE = ROOT / "docs/laws.md"
NUMBERS = ROOT / "docs/chaos.json"
MARKS = re.compile(r"(<!-- chaos -->\n).*?(<!-- /chaos -->)", re.S)
STRATEGIES = ("ddp", "fsdp", "deepspeed", "accelerate")
MARGIN = 90
"""Additional seconds for ranks that restart on few cores."""
STEPS = 200
PER_RUN = 5
"""Faults of one run."""
SOME = 3
"""Steps after which a run counts as going on."""


@dataclass
class Row:
    """A fault and its outcome."""

    number: int
    strategy: str
    fault: str
    machine: str
    step: int
    """The newest that was logged when it struck."""
    seconds: float = 0.0
    """From the end of the fault to the third step after it."""
    lines: list[str] = field(default_factory=list)
    """The last line of each agent that ended and was started again."""
    problems: list[str] = field(default_factory=list)


class Job:
    """A run on two machines, with an agent for each."""

    def __init__(
        self, nodes: Sequence[Machine], strategy: str, folder: Path, seconds: float
    ) -> None:
        """Start the agents; each micro-batch takes ``seconds`` of sleep."""
        self.nodes, self.folder = nodes, folder
        self.words = (
            f"-m distcore train {job.FLAGS} --strategy {strategy} --launcher torchrun:node0:29500"
            " --nodes 2 --nproc 1 --out disk/run --resume auto --max-restarts 100 --max-steps"
            f" {STEPS} --set timeout={TIMEOUT} --set task_options.seconds={seconds}"
        ).split()
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.logs: dict[str, Path] = {}
        self.started = 0
        for node in nodes:
            self.start(node)

    def start(self, node: Machine) -> None:
        """Start the agent of a machine."""
        self.started += 1
        self.logs[node.name] = self.folder / f"agent-{self.started}.log"
        with self.logs[node.name].open("w") as file:
            words = (sys.executable, *self.words)
            self.agents[node.name] = node.start(
                *words, folder=self.folder, stdout=file, environment=ENVIRONMENT
            )

    def done(self) -> bool:
        """Return True once both agents have ended with success."""
        return all(agent.poll() == 0 for agent in self.agents.values())

    def rows(self) -> list[int]:
        """Return the logged steps, in order, including repeated ones."""
        with suppress(FileNotFoundError):
            lines = (self.folder / "disk/run/metrics.jsonl").read_text().splitlines()
            return [
                int(match[1])
                for line in lines
                if "train/loss" in line and (match := STEP.search(line))
            ]
        return []

    def mend(self, row: Row) -> None:
        """Restart each ended agent, and keep its last line. A killed agent has none."""
        failed = [node for node in self.nodes if self.agents[node.name].poll() not in (None, 0)]
        for node in failed:
            said, status = self.logs[node.name].read_text(), int(self.agents[node.name].returncode)
            if status >= 0:
                last = ([line for line in said.splitlines() if SAID.search(line)] or [""])[-1]
                row.lines.append(f"{node.name}: {last}")
                row.problems += [] if last else [f"{node.name} ended with {status} and no line"]
            row.problems += (
                ["a traceback on the screen"] if "Traceback (most recent" in said else []
            )
        # also a successful one, because the other would wait for it
        for node in self.nodes if failed else ():
            if self.agents[node.name].poll() is not None:
                self.start(node)

    def end(self) -> None:
        """Kill all remaining processes."""
        for agent in self.agents.values():
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        for node in self.nodes:
            for pid in [*node.ranks(), *node.find("distcore_clusters.agent")]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
STEP = re.compile(r'"step": (\d+)')
SAID = re.compile(r"^(error: |.*stopped after step )")


def wait(run: Job, row: Row, condition: Callable[[], bool], seconds: float) -> None:
    """Wait for ``condition``, and keep the agents running. Record a
    hang in ``row``, and restart.
    """
    deadline = time.monotonic() + seconds
    while not condition() and not run.done():
        run.mend(row)
        if time.monotonic() > deadline:
            row.problems.append(f"nothing for {seconds:g} seconds")
            run.end()
            deadline += seconds
        time.sleep(0.1)


def strike(run: Job, row: Row, node: Machine, chance: random.Random) -> None:
    """Cause one fault, and wait until the run continues or has ended."""
    before = len(run.rows())
    wait(
        run,
        row,
        lambda: len(run.rows()) > before + SOME and all(n.ranks() for n in run.nodes),
        TIMEOUT + MARGIN,
    )
    time.sleep(2 * chance.random())
    if run.done():
        row.problems.append("the run was over before")
        return
    row.step = run.rows()[-1]
    seconds, undo = FAULTS[row.fault](node, run.folder / "disk")
    over = time.monotonic() + seconds
    while time.monotonic() < over:
        run.mend(row)
        time.sleep(0.1)
    undo()
    before, begun = len(run.rows()), time.monotonic()
    wait(run, row, lambda: len(run.rows()) >= before + SOME, TIMEOUT + MARGIN)
    row.seconds = round(time.monotonic() - begun, 1)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system at ``folder/disk``."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint, of model and optimizer."""
    return checkpoint.read_tensors(folder / f"disk/run/checkpoints/step-{STEPS:08d}")


def one_run(
    nodes: Sequence[Machine], folder: Path, rows: Sequence[Row], chance: random.Random
) -> None:
    """Train under one strategy with the faults of ``rows``, and compare with an undisturbed run."""
    strategy = rows[0].strategy
    final_weights: list[dict[str, torch.Tensor]] = []
    for name, pause in (("whole", 0.0), ("struck", 0.1)):
        with small_disk(folder / name):
            run = Job(nodes, strategy, folder / name, pause)
            try:
                for row in rows if pause else ():
                    strike(run, row, nodes[int(row.machine[-1])], chance)
                    print(row, flush=True)
                wait(run, rows[-1], run.done, 300)
                final_weights.append(
                    {key: value.clone() for key, value in weights(folder / name).items()}
                )
            finally:
                run.end()
    differ = [
        name
        for name in final_weights[0]
        if not torch.equal(final_weights[0][name], final_weights[1][name])
    ]
    if differ or final_weights[0].keys() != final_weights[1].keys():
        rows[-1].problems.append(f"other weights than undisturbed: {', '.join(differ[:3])}")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table of Markdown, by fault."""
    lines = ["| fault | times | continued | longest, s |", "|---|---|---|---|"]
    for fault in [*FAULTS, "all"]:
        some = [row for row in rows if fault in (row.fault, "all")]
        if not some:
            continue
        well, longest = (
            sum(not row.problems for row in some),
            max((row.seconds for row in some), default=0),
        )
        lines.append(f"| {fault} | {len(some)} | {well} | {longest:g} |")
    return "\n".join(lines) + "\n"


def sentence(rows: Sequence[Row]) -> str:
    """Return what the page says of the rows."""
    well, longest = (
        sum(not row.problems for row in rows),
        max((row.seconds for row in rows), default=0),
    )
    counts = ", ".join(f"{fault} ({sum(row.fault == fault for row in rows)})" for fault in FAULTS)
    return f"Jobs continued after {well} of {len(rows)} faults, within {longest:g} s: {counts}.\n"


def publish(rows: Sequence[Row]) -> None:
    """Write the numbers of the page, and its sentence."""
    NUMBERS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    PAGE.write_text(
        MARKS.sub(lambda match: f"{match[1]}{sentence(rows)}{match[2]}", PAGE.read_text())
    )


def keep_published(planned: Sequence[Row]) -> list[Row]:
    """Return the published rows of a run if all of them exist
    without a problem, else ``planned``.
    """
    published = {row["number"]: Row(**row) for row in json.loads(NUMBERS.read_text())}
    rows = [published.get(row.number, row) for row in planned]
    is_same = all(
        row.fault == plan.fault and row.machine == plan.machine
        for row, plan in zip(rows, planned, strict=True)
    )
    return rows if is_same and all(row.step and not row.problems for row in rows) else list(planned)


def main() -> int:
    """Run the faults, print the table and return 1 if a bound was broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument(
        "--page",
        action="store_true",
        help="write docs/chaos.json, and the sentence in docs/laws.md",
    )
    parser.add_argument(
        "--go-on", action="store_true", help="keep the runs that are there without a problem"
    )
    arguments = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    chance = random.Random(arguments.seed)
    rows = [Row(n + 1, STRATEGIES[n // PER_RUN % len(STRATEGIES)], chance.choice(list(FAULTS)),
                f"node{chance.randrange(2)}", 0) for n in range(arguments.faults)]  # fmt: skip
    runs = [rows[first : first + PER_RUN] for first in range(0, len(rows), PER_RUN)]
    runs = [keep_published(run) for run in runs] if arguments.go_on else runs
    with tempfile.TemporaryDirectory() as name, machines(Path(name)) as nodes:
        for number, run in enumerate(runs):
            if not run[-1].step:
                one_run(
                    nodes,
                    Path(name, f"run-{number}"),
                    run,
                    random.Random(f"{arguments.seed} {number}"),
                )
            rows = [row for run in runs for row in run if row.step or row.problems]
            if arguments.page:
                publish(rows)
    print(table(rows), *[row for row in rows if row.problems], sep="\n")
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
