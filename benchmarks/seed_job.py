"""The job that the design comes from, against a plain script that does what the published ones do.

    python benchmarks/seed_job.py --data emotion.json [--nproc 1 2] [--seeds 0 1 2] [--model bert-small] [--steps 50]

The first 10,000 rows shuffled with seed 123, 92 % to train on, 32 rows a rank, AdamW 3e-5, weight decay 0.01 but not on
biases and norms, one epoch, at most 128 tokens; a pretrained BERT with a new head for each seed. ``--model`` is a local
folder or a hub name; a built-in model is pretrained here first, two epochs on the rows of the file that are left
over. From random weights there would be nothing to compare: at the published 5e-4 a BERT 512 wide stays at the
majority class.

For each number of ranks and seed, three runs from the same weights, in an order that rotates: the script
(benchmarks/native/seed_script.py), distcore with the same arithmetic (fp32; padding to the longest row of a
micro-batch), and ``--preset fast``. The learning rate is constant as published, but under the preset it decays, as it
does in distcore unless told otherwise: length windows want that (docs/speed.md). The ratio is of samples a second in
training, from before the first batch to after the last step; start-up and evaluation are in neither. Accuracy is
judged for all three by the same code, on the 800 rows kept and on 10,000 rows that nothing was trained on. With
``--steps`` only speed is looked at, over those steps; the first few are not as long as the epoch's, and pay for the
start.

Bounds: 3 times the script's samples a second, 8 times with the preset; mean accuracy at most 0.5 point below.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcore.errors import DistcoreError

ROWS, TRAINING, SEED, UNSEEN, CLASSES = 10_000, 0.92, 123, 10_000, 6
BOUNDS = {"same arithmetic": 3.0, "preset fast": 8.0}
POINTS = 0.5
BIN = Path(sys.executable).parent
DISTCORE = str(BIN / "distcore")
OURS = {
    "same arithmetic": ("--micro-batch-size", "8", "--set", "schedule.name=constant"),
    "preset fast": ("--preset", "fast"),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the three runs of a seed have in common."""

    folder: Path
    model: Path
    seed: int
    nproc: int
    lr: float
    steps: int | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run did: samples a second of training, and accuracy in percent on the kept and the unseen rows."""

    speed: float
    kept: float | None = None
    unseen: float | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="JSON: a list of [text, label], labels 0 to 5")
    parser.add_argument("--model", default="bert-small", help="a built-in model, a folder or a hub name")
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--steps", type=int, help="stop after so many steps; accuracy is not looked at")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seed-job-") as name:
        folder = Path(name)
        os.environ.update(TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1", DISTCORE_CACHE=str(folder / "cache"))
        try:
            split(arguments.data, folder)
            model = pretrained(folder, arguments.model, arguments.steps)
        except (OSError, ValueError, DistcoreError) as error:
            parser.error(str(error))
        held = [compare(folder, model, arguments, nproc) for nproc in arguments.nproc]
    print("bounds", "held" if all(held) else "BROKEN")
    return 0 if all(held) else 1


def split(data: Path, folder: Path) -> None:
    """Write train.json, kept.json, unseen.json, and all that is left over as others.json.

    Raises OSError or ValueError, one line, where ``data`` is not there or does not have the rows for it.
    """
    try:
        read = json.loads(data.read_text(encoding="utf-8"))
        rows = [(str(text), range(CLASSES).index(label)) for text, label in read]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{data}: not a list of [text, label] with labels 0 to {CLASSES - 1} ({error})") from None
    if len(rows) <= ROWS + UNSEEN:
        raise ValueError(f"{data}: {len(rows)} rows, and the job needs more than {ROWS + UNSEEN}")
    job, rest = rows[:ROWS], rows[ROWS:]
    for part in (job, rest):
        random.Random(SEED).shuffle(part)
    cut = round(TRAINING * len(job))
    parts = {"train": job[:cut], "kept": job[cut:], "unseen": rest[:UNSEEN], "others": rest[UNSEEN:]}
    for name, part in parts.items():
        (folder / f"{name}.json").write_text(json.dumps(part, ensure_ascii=False), encoding="utf-8")


def pretrained(folder: Path, model: str, steps: int | None) -> Path:
    """A Hugging Face folder to fine-tune: ``model`` itself, or a built-in one trained on the rows left over."""
    from distcore.tasks.text_classification.models import BUILT_IN_MODELS, model_folder

    if model not in BUILT_IN_MODELS:
        return model_folder(model)
    run = folder / "pretraining"
    job = ["--model", model, "--data", str(folder / "others.json"), "--eval-fraction", "0.05", "--out", str(run)]
    rate = ["--epochs", "2", "--lr", "1e-4", "--set", "checkpoints.best=null"]
    end = ["--max-steps", "1"] if steps else []  # weights do not matter to speed
    quiet([DISTCORE, "train", "--preset", "fast", *job, *rate, *end])
    quiet([DISTCORE, "checkpoint", "export", str(run), "--to", str(folder / "pretrained")])
    return folder / "pretrained"


def compare(folder: Path, start: Path, arguments: argparse.Namespace, nproc: int) -> bool:
    """Run all three for every seed on ``nproc`` ranks, print the table, and say whether the bounds hold."""
    outcomes: dict[str, list[Outcome]] = {"script": [], **{name: [] for name in OURS}}
    names = list(outcomes)
    for number, seed in enumerate(arguments.seeds):
        model = with_new_head(folder, start, seed)
        job = Job(folder=folder, model=model, seed=seed, nproc=nproc, lr=arguments.lr, steps=arguments.steps)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            outcomes[name].append(outcome(job, name))
            print(f"  {nproc} ranks, seed {seed}, {name}: {outcomes[name][-1]}", file=sys.stderr, flush=True)
    print(f"{arguments.model}, {nproc} rank{'s' * (nproc > 1)}, seeds {arguments.seeds}")
    print(f"{'':<18}{'samples/s':>10}{'ratio (range)':>24}{'kept rows %':>26}{'unseen rows %':>26}")
    held = [show(name, outcomes[name], outcomes["script"]) for name in names]
    return all(held)


def show(name: str, found: Sequence[Outcome], script: Sequence[Outcome]) -> bool:
    """Print one line of the table; True if the line keeps its bounds."""
    ratios = [ours.speed / theirs.speed for ours, theirs in zip(found, script, strict=True)]
    ratio = statistics.median(ratios)
    speed = statistics.median(outcome.speed for outcome in found)
    spread = f"{ratio:.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
    kept, unseen = (against(found, script, rows) for rows in ("kept", "unseen"))
    print(f"{name:<18}{speed:>10.1f}{spread:>24}{kept[0]:>26}{unseen[0]:>26}", flush=True)
    return ratio >= BOUNDS.get(name, 0) and unseen[1] >= -POINTS


def against(found: Sequence[Outcome], script: Sequence[Outcome], rows: str) -> tuple[str, float]:
    """Mean accuracy on ``rows`` with its range and its distance to the script's, in points; and the distance."""
    ours, theirs = ([getattr(outcome, rows) for outcome in outcomes] for outcomes in (found, script))
    if None in ours:
        return "-", 0.0
    distance = statistics.mean(ours) - statistics.mean(theirs)
    return f"{statistics.mean(ours):.2f} ({min(ours):.1f} … {max(ours):.1f}) {distance:+.2f}", distance


def with_new_head(folder: Path, start: Path, seed: int) -> Path:
    """The pretrained model as a folder of its own, with a head of random weights for the job's classes."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    target = folder / f"start-{seed}"
    if not target.exists():
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            start, num_labels=CLASSES, ignore_mismatched_sizes=True
        )
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.classifier.weight, std=0.02)
        torch.nn.init.zeros_(model.classifier.bias)
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(start).save_pretrained(target)
    return target


def outcome(job: Job, name: str) -> Outcome:
    """Run one of the three and judge what it trained."""
    out = job.folder / f"{name.replace(' ', '-')}-{job.nproc}-{job.seed}"
    trained, speed = run_script(job, out) if name == "script" else run_ours(job, out, OURS[name])
    if job.steps is not None:
        return Outcome(speed=speed)
    kept, unseen = (accuracy(trained, job.folder / f"{rows}.json") for rows in ("kept", "unseen"))
    return Outcome(speed=speed, kept=kept, unseen=unseen)


def run_script(job: Job, out: Path) -> tuple[Path, float]:
    script = str(Path(__file__).parent / "native/seed_script.py")
    several = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={job.nproc}"]
    end = [f"--steps={job.steps}"] if job.steps else []
    files = [str(job.model), str(job.folder / "train.json"), str(out)]
    rates = [f"--seed={job.seed}", f"--lr={job.lr}"]
    quiet([*(several if job.nproc > 1 else [sys.executable]), script, *files, *rates, *end])
    timing = json.loads((out / "timing.json").read_text(encoding="utf-8"))
    return out, float(timing["samples"] / timing["seconds"])


def run_ours(job: Job, out: Path, flags: Sequence[str]) -> tuple[Path, float]:
    strategy = ["--strategy", "single" if job.nproc == 1 else "ddp", "--nproc", str(job.nproc)]
    data = ["--data", str(job.folder / "train.json"), "--eval-data", str(job.folder / "kept.json")]
    same = ["--global-batch-size", str(32 * job.nproc), "--lr", str(job.lr), "--seed", str(job.seed), "--out", str(out)]
    settings = ["--set", "clip.norm=null", "--set", "checkpoints.best=null"]
    end = ["--max-steps", str(job.steps)] if job.steps else []
    quiet([DISTCORE, "train", *strategy, "--model", str(job.model), *data, *same, *settings, *flags, *end])
    quiet([DISTCORE, "checkpoint", "export", str(out), "--to", str(out / "exported")])
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return out / "exported", float(report["samples_per_second"])


def quiet(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def accuracy(model_folder: Path, rows_file: Path) -> float:
    """Percent of the rows that the model gets right: plain transformers, fp32, rows of like length together."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(model_folder).eval()
    rows = sorted(json.loads(rows_file.read_text(encoding="utf-8")), key=lambda row: len(row[0]))
    right = 0
    with torch.inference_mode():
        for start in range(0, len(rows), 64):
            texts, labels = zip(*rows[start : start + 64], strict=True)
            tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt")
            right += int((model(**tokens).logits.argmax(-1) == torch.tensor(labels)).sum())
    return 100 * right / len(rows)


if __name__ == "__main__":
    sys.exit(main())
