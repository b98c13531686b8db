"""Compare distcore with other libraries, each at the best settings that its pages name, one thread per process.

    python benchmarks/peers.py --data emotion.json [--job rows|lm] [--precision fp32|bf16] [--nproc 1|2]
                               [--model bert-small] [--steps 53] [--rounds 3] [--python PYTHON]

Needs the dependency group ``peers``; ``--python`` is an interpreter that has it, if not this one. In each round every
library trains once, in rotating order, on the same rows. Bounds are of CPU seconds per 1,000 rows, summed over ranks:
other work on the machine changes them less than the seconds on the clock, which are shown beside them. The first 3
steps do not count. Those left should be whole windows of 50 steps, in which rows are grouped by length: the HF Trainer
begins each with its longest rows, so a part of one is to its disadvantage.

``rows`` is the job of benchmarks/seed_job.py (benchmarks/native/peer_job.py): a loop by hand, the HF Trainer with its
defaults and with ``train_sampling_strategy="group_by_length"``, Lightning, Accelerate, and distcore with its defaults
and with ``--preset fast``. ``lm`` is a causal language model on prompts and completions of unlike lengths, made of the
texts (benchmarks/native/lm_job.py), in one process: a loop by hand, TRL's SFTTrainer without recomputing activations:
plain, with groups of like length, and with packing.

Bounds: for rows the defaults are 3 times as fast as the HF Trainer's, and as fast as its groups; the preset is 1.1
times as fast as the best peer, in bf16 1.25 times. For a language model the better of the two is 1.1 times as fast as
the best peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import seed_job

KINDS = {
    "rows": ("by-hand", "trainer", "trainer-grouped", "lightning", "accelerate", "distcore", "distcore-fast"),
    "lm": ("by-hand", "trl", "trl-grouped", "trl-packed", "distcore", "distcore-fast"),
}
"""The compared programs of each job."""
NEW_HEAD = (
    "import pathlib, sys; sys.path.insert(0, {folder!r}); import seed_job; seed_job.save_with_new_head({names}, 0)"
)
SCRIPTS = {"rows": "peer_job.py", "lm": "lm_job.py"}


def main() -> int:
    """Run the rounds and print the table; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="JSON: a list of [text, label], labels 0 to 5")
    parser.add_argument("--job", choices=KINDS, default="rows")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--nproc", type=int, choices=(1, 2), default=1)
    parser.add_argument("--model", help="a built-in model or a folder (default: bert-small, llama-mini)")
    parser.add_argument("--steps", type=int, default=53)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has the libraries")
    arguments = parser.parse_args()
    if arguments.job == "lm" and arguments.nproc > 1:
        parser.error("--job lm: has one process")
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        os.environ.update(TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1", DISTCORE_CACHE=str(folder / "cache"))
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            seed_job.split(arguments.data, folder)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        runs_by_kind = measure(folder, arguments)
    print("on", processor())
    held = show(arguments.job, arguments.precision, runs_by_kind)
    print("bounds", "held" if held else "BROKEN")
    return 0 if held else 1


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return CPU and wall seconds per 1,000 rows of each run, by its kind."""
    distcore = (arguments.python, "-m", "distcore")
    if arguments.job == "lm":
        rows = prompts(folder / "train.json", 32 * arguments.steps)
        model = language_model(folder, arguments.model or "llama-mini", rows, distcore)
    else:
        rows = folder / "train.json"
        pretrained = seed_job.make_pretrained(folder, arguments.model or "bert-small", 1, distcore)
        names = f"pathlib.Path({str(folder)!r}), pathlib.Path({str(pretrained)!r})"
        seed_job.quiet([arguments.python, "-c", NEW_HEAD.format(folder=str(Path(__file__).parent), names=names)])
        model = folder / "start-0"
    kinds = KINDS[arguments.job]
    runs_by_kind: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds):
        turn = number % len(kinds)
        for kind in kinds[turn:] + kinds[:turn]:
            job = [str(Path(__file__).parent / "native" / SCRIPTS[arguments.job]), kind, str(model), str(rows)]
            one = run(arguments.python, arguments.nproc, [*job, str(arguments.steps), arguments.precision])
            runs_by_kind[kind].append(one)
            print(f"  round {number}, {kind}: {one}", file=sys.stderr, flush=True)
    return runs_by_kind


def prompts(texts: Path, count: int) -> Path:
    """Return a file of ``count`` prompts of 1 to 12 texts each, completed by the next text."""
    read = [text for text, _ in json.loads(texts.read_text(encoding="utf-8"))]
    choose, file = random.Random(0), texts.with_suffix(".jsonl")
    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            *prompt, completion = choose.sample(read, choose.randint(2, 13))
            out.write(json.dumps({"prompt": " ".join(prompt) + "\n", "completion": completion}) + "\n")
    return file


def language_model(folder: Path, model: str, rows: Path, distcore: Sequence[str]) -> Path:
    """Return a folder with a built-in model and a tokenizer trained on ``rows``."""
    run = folder / "untrained"
    job = ["--task", "causal-lm", "--model", model, "--data", str(rows), "--eval-data", str(rows), "--max-steps", "1"]
    job += ["--max-seq-len", "512", "--set", "task_options.tokenizer.vocab_size=4000"]
    seed_job.quiet([*distcore, "train", *job, "--out", str(run), "--global-batch-size", "4"])
    seed_job.quiet([*distcore, "checkpoint", "export", str(run), "--to", str(folder / "model")])
    return folder / "model"


def run(python: str, nproc: int, job: Sequence[str]) -> dict[str, float]:
    """Return CPU and wall seconds per 1,000 rows of one run; exits with its output if it fails."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command = [python, *(several if nproc > 1 else []), *job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"cpu"')]
    if done.returncode or len(ranks) != nproc:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return {"cpu": sum(rank["cpu"] for rank in ranks), "wall": max(rank["wall"] for rank in ranks)}


def show(job: str, precision: str, runs_by_kind: Mapping[str, Sequence[Mapping[str, float]]]) -> bool:
    """Print the table; True if the bounds hold."""
    print(f"{'':<18}{'CPU s / 1,000 rows':>20}{'range':>18}{'on the clock':>15}{'range':>18}")
    cost = {}
    for kind, runs in runs_by_kind.items():
        cpu, wall = ([one[clock] for one in runs] for clock in ("cpu", "wall"))
        cost[kind] = statistics.median(cpu)
        print(f"{kind:<18}{cost[kind]:>20.2f}{between(cpu):>18}{statistics.median(wall):>15.2f}{between(wall):>18}")
    ratios = bounds(job, precision, cost)
    if precision == "bf16" and "bf16" not in processor():
        print(f"{', '.join(ratios)}: not measured here, this processor does not multiply in bf16")
        return True
    for what, (ratio, bound) in ratios.items():
        print(f"{what}: {ratio:.2f} (bound: {bound})")
    return all(ratio >= bound for ratio, bound in ratios.values())


def processor() -> str:
    """Return the name of the processor, and its instructions for bf16 if it has any."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    bf16 = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in said.get("flags", "").split()]
    return ", ".join((said.get("model name") or platform.machine(), *bf16))


def between(seconds: Sequence[float]) -> str:
    """Return the range of a figure."""
    return f"{min(seconds):.2f} … {max(seconds):.2f}"


def bounds(job: str, precision: str, cost: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return how many times as fast distcore is, and how many it must be."""
    best = min(spent for kind, spent in cost.items() if not kind.startswith("distcore"))
    if job == "lm":
        return {"against the best peer": (best / min(cost["distcore"], cost["distcore-fast"]), 1.1)}
    if precision == "bf16":
        return {"preset against the best peer": (best / cost["distcore-fast"], 1.25)}
    return {
        "defaults against the HF Trainer's": (cost["trainer"] / cost["distcore"], 3.0),
        "defaults against its groups": (cost["trainer-grouped"] / cost["distcore"], 1.0),
        "preset against the best peer": (best / cost["distcore-fast"], 1.1),
    }


if __name__ == "__main__":
    sys.exit(main())
