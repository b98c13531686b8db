"""Random faults over two machines: ``python tests/machines/chaos.py --faults N --seed S``; prints a table.

Each run is elastic (``--launcher torchrun --nodes 1:2``), under one of four strategies. Then something breaks.
What must hold: no run lasts longer than its timeout and a start allow; a run ends with one line that says ``error:`` or
``stopped after step``, or it goes on; one that has ended goes on with the same command; and the weights at the end are
those of a run that nothing has disturbed, within 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import machine_job as job
from machines import Machine, machines, wait_for

from distcore.checkpoint.distance import distance

STEPS = 40
TIMEOUT = 20
"""Config key ``timeout`` of the runs, in seconds."""
START = 90
"""Seconds for two starts of ranks on cores that are busy."""
STRATEGIES = ("ddp", "fsdp", "deepspeed", "accelerate")
CLOSE = 1e-5


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    strategy: str
    fault: str
    node: str
    step: int
    """The last step before the fault."""
    went_on: bool
    """Whether the run ended well without being started again."""
    lines: list[str]
    """What it said of its end, if it ended."""
    seconds: float
    """From the fault to the end of the run, or of what was left of it."""
    largest: float
    """Largest difference of two weights at the end."""

    @property
    def is_good(self) -> bool:
        """Return True if everything held."""
        return (self.went_on or bool(self.lines)) and self.largest <= CLOSE


def kill_rank(node: Machine, run: Path) -> None:
    """SIGKILL to a rank."""
    _signal(node.ranks(), signal.SIGKILL)


def kill_agent(node: Machine, run: Path) -> None:
    """SIGKILL to an agent."""
    _signal(node.find("distcore.fronts.agent"), signal.SIGKILL)


def kill_node(node: Machine, run: Path) -> None:
    """No power."""
    node.kill()


def cut_for_short(node: Machine, run: Path) -> None:
    """The link is gone for three seconds."""
    node.cut()
    time.sleep(3)
    node.heal()


def cut_for_long(node: Machine, run: Path) -> None:
    """The link is gone for longer than the timeout."""
    node.cut()
    time.sleep(TIMEOUT + 10)
    node.heal()


def stop_for_short(node: Machine, run: Path) -> None:
    """A rank stands still for three seconds."""
    pids = node.ranks()
    _signal(pids, signal.SIGSTOP)
    time.sleep(3)
    _signal(pids, signal.SIGCONT)


def stop_for_long(node: Machine, run: Path) -> None:
    """A rank stands still for longer than the timeout."""
    pids = node.ranks()
    _signal(pids, signal.SIGSTOP)
    time.sleep(TIMEOUT + 10)
    _signal(pids, signal.SIGCONT)


def fill_disk(node: Machine, run: Path) -> None:
    """No room for a checkpoint."""
    with suppress(OSError), (run.parent / "ballast").open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()


def term_rank(node: Machine, run: Path) -> None:
    """SIGTERM to a rank."""
    _signal(node.ranks(), signal.SIGTERM)


def term_agent(node: Machine, run: Path) -> None:
    """SIGTERM to an agent."""
    _signal(node.find("distcore.fronts.agent"), signal.SIGTERM)


FAULTS: tuple[Callable[[Machine, Path], None], ...] = (
    kill_rank, kill_agent, kill_node, cut_for_short, cut_for_long, stop_for_short, stop_for_long, fill_disk, term_rank,
    term_agent,
)  # fmt: skip


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def start(node: Machine, folder: Path, strategy: str, log: Path) -> subprocess.Popen[str]:
    """Start the agent of a machine; it appends to ``log``."""
    words = (
        f"{job.FLAGS} --launcher torchrun:node0:29500 --nodes 1:2 --nproc 1 --max-restarts 3 --strategy {strategy} "
        f"--max-steps {STEPS} --out run --resume auto --set timeout={TIMEOUT} --set task_options.seconds=0.2"
    )
    with log.open("a") as file:
        return node.start(sys.executable, "-m", "distcore", "train", *words.split(), folder=folder, stdout=file)


def disturb(nodes: tuple[Machine, ...], folder: Path, pick: random.Random, calm: dict[str, Path]) -> Outcome:
    """Run once with a fault, and again if that ended the run; return what became of it."""
    strategy, fault, node = pick.choice(STRATEGIES), pick.choice(FAULTS), pick.choice(nodes)
    after, run, log = pick.randint(6, STEPS - 15), folder / "run", folder / "log"
    agents = [start(each, folder, strategy, log) for each in nodes]
    wait_for(lambda: _step(run) >= after, *agents, seconds=4 * START)
    step, begun = _step(run), time.monotonic()
    fault(node, run)
    ended = _all_end(agents, begun + (STEPS * 0.5 + 3 * TIMEOUT + 2 * START))
    seconds = time.monotonic() - begun
    for each in nodes:
        each.end()
        each.turn_on()
    (folder / "ballast").unlink(missing_ok=True)
    went_on = ended and (run / "report.json").exists()
    said = log.read_text().splitlines()
    lines = [line for line in said if line.startswith("error:") or "stopped after step" in line] if ended else []
    if not went_on:
        agents = [start(each, folder, strategy, log) for each in nodes]
        _all_end(agents, time.monotonic() + 4 * START)
    last = f"checkpoints/step-{STEPS:08}"
    largest = distance(run / last, calm[strategy] / last).largest if (run / last).exists() else float("inf")
    return Outcome(strategy, fault.__name__, node.name, step, went_on, sorted(set(lines))[:4], seconds, largest)


def _step(run: Path) -> int:
    return max(job.losses(run), default=0) if (run / "metrics.jsonl").exists() else 0


def _all_end(agents: list[subprocess.Popen[str]], deadline: float) -> bool:
    """Return True once all have ended; False after ``deadline``."""
    while any(agent.poll() is None for agent in agents):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system with room for some checkpoints."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def calm_runs(folder: Path, strategies: tuple[str, ...]) -> dict[str, Path]:
    """Train undisturbed, in one process per strategy; return the run folders."""
    found = {}
    for strategy in strategies:
        out = folder / f"calm-{strategy}"
        words = f"{job.FLAGS} --strategy {strategy} --nproc 1 --max-steps {STEPS} --out {out}"
        command = [sys.executable, "-m", "distcore", "train", *words.split()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        found[strategy] = out
    return found


def main() -> int:
    """Run the faults; return 0 if everything held in each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        calm = calm_runs(top, STRATEGIES)
        for number in range(asked.faults):
            folder, pick = top / f"run-{number}", random.Random(f"{asked.seed}-{number}")
            (top / f"files-{number}").mkdir()
            with small_disk(folder), machines(top / f"files-{number}") as nodes:
                outcomes.append(disturb(nodes, folder, pick, calm))
            print(row(outcomes[-1]), flush=True)
            if asked.json:
                asked.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def row(outcome: Outcome) -> str:
    """Return a row of the table."""
    end = "went on" if outcome.went_on else "; ".join(outcome.lines) or "no line"
    words = (outcome.strategy, f"{outcome.fault}, {outcome.node}", outcome.step, end)
    return f"| {' | '.join(map(str, words))} | {outcome.seconds:.0f} s | {outcome.largest:.1e} |"


if __name__ == "__main__":
    raise SystemExit(main())
