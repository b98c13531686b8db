"""Compare distcore with other libraries on the job of benchmarks/seed_job.py, one process and one thread each.

    python benchmarks/peers.py --data emotion.json [--model bert-small] [--steps 40] [--rounds 3] [--python PYTHON]

Needs the dependency group ``peers``; ``--python`` is an interpreter that has it, if not this one. In each round every
library trains once, in rotating order, on the same 9,200 rows in fp32 (benchmarks/native/peer_job.py): a loop by hand,
the HF Trainer with its defaults and with ``train_sampling_strategy="group_by_length"``, Lightning, Accelerate, and
distcore with its defaults and with ``--preset fast``. The main figure is CPU seconds per 1,000 rows: other work on
the machine changes less than the time on the clock.

Bounds: the defaults 3 times as fast as the HF Trainer's, and as fast as its groups; the preset 1.1 times the best peer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import seed_job

KINDS = ("by-hand", "trainer", "trainer-grouped", "lightning", "accelerate", "distcore", "distcore-fast")
PEERS = KINDS[:5]


def main() -> int:
    """Run the rounds and print the table; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="JSON: a list of [text, label], labels 0 to 5")
    parser.add_argument("--model", default="bert-small", help="a built-in model, a folder or a hub name")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has the libraries")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        os.environ.update(TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1", DISTCORE_CACHE=str(folder / "cache"))
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            seed_job.split(arguments.data, folder)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        model = seed_job.with_new_head(folder, seed_job.pretrained(folder, arguments.model, 1), 0)
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for number in range(arguments.rounds):
            turn = number % len(KINDS)
            for kind in KINDS[turn:] + KINDS[:turn]:
                found[kind].append(run(arguments.python, kind, model, folder / "train.json", arguments.steps))
                print(f"  round {number}, {kind}: {found[kind][-1]}", file=sys.stderr, flush=True)
    held = show({kind: [one["cpu"] for one in runs] for kind, runs in found.items()})
    print("bounds", "held" if held else "BROKEN")
    return 0 if held else 1


def run(python: str, kind: str, model: Path, rows: Path, steps: int) -> dict[str, float]:
    """Return CPU and wall seconds per 1,000 rows of one run; exits with its output if it fails."""
    job = Path(__file__).parent / "native/peer_job.py"
    command = [python, str(job), kind, str(model), str(rows), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def show(found: dict[str, list[float]]) -> bool:
    """Print the table; True if the bounds hold."""
    print(f"{'':<18}{'CPU s / 1,000 rows':>20}{'range':>18}")
    for kind, spent in found.items():
        between = f"{min(spent):.2f} … {max(spent):.2f}"
        print(f"{kind:<18}{statistics.median(spent):>20.2f}{between:>18}")
    cost = {kind: statistics.median(spent) for kind, spent in found.items()}
    best = min(cost[peer] for peer in PEERS)
    ratios = {
        "defaults against the HF Trainer's": (cost["trainer"] / cost["distcore"], 3.0),
        "defaults against its groups": (cost["trainer-grouped"] / cost["distcore"], 1.0),
        "preset against the best peer": (best / cost["distcore-fast"], 1.1),
    }
    for what, (ratio, bound) in ratios.items():
        print(f"{what}: {ratio:.2f} (bound: {bound})")
    return all(ratio >= bound for ratio, bound in ratios.values())


if __name__ == "__main__":
    sys.exit(main())
