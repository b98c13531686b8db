"""Data and models of the jobs of benchmarks/peers.py."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CLASSES, IMAGES = 6, 400
"""Classes of texts and images, and images of each class."""
MODELS = {
    "rows": "bert-small",
    "lm": "llama-mini",
    "mlm": "bert-mini",
    "seq2seq": "t5-tiny",
    "images": "resnet-18",
}
"""Built-in model of each job."""
TASKS = {
    "rows": ["--task", "text-classification", "--max-seq-len", "128"],
    "lm": [
        "--task",
        "causal-lm",
        "--max-seq-len",
        "512",
        "--set",
        "task_options.tokenizer.vocab_size=4000",
    ],
    "mlm": ["--task", "masked-lm", "--max-seq-len", "256"],
    "seq2seq": ["--task", "seq2seq", "--prefix", "", "--max-seq-len", "128"],
    "images": ["--task", "image-classification", "--image-size", "64"],
}


def texts(file: Path) -> list[tuple[str, int]]:
    """Return texts and labels. Raises OSError or ValueError, one line, if the file has others."""
    try:
        return [
            (str(text), range(CLASSES).index(label))
            for text, label in json.loads(file.read_text("utf-8"))
        ]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{file}: not a list of [text, label] with labels 0 to {CLASSES - 1} ({error})"
        ) from None


def data(job: str, read: Sequence[tuple[str, int]], count: int, folder: Path) -> Path:
    """Write ``count`` rows of ``job``, made of texts; for images a folder of random ones."""
    if job == "images":
        return images(folder / "images")
    file = folder / "rows.jsonl"
    rows = {"rows": classified, "lm": prompts, "mlm": passages, "seq2seq": pairs}[job](
        read, random.Random(0)
    )
    lines = (json.dumps(row) + "\n" for row, _ in zip(rows, range(count), strict=False))
    file.write_text("".join(lines), encoding="utf-8")
    return file


def classified(read: Sequence[tuple[str, int]], choose: random.Random) -> Iterator[dict[str, Any]]:
    """Yield texts with their labels."""
    while True:
        text, label = choose.choice(read)
        yield {"text": text, "label": label}


def prompts(read: Sequence[tuple[str, int]], choose: random.Random) -> Iterator[dict[str, Any]]:
    """Yield prompts of 1 to 12 texts each, completed by another text."""
    while True:
        *prompt, completion = (text for text, _ in choose.sample(read, choose.randint(2, 13)))
        yield {"prompt": " ".join(prompt) + "\n", "completion": completion}


def passages(read: Sequence[tuple[str, int]], choose: random.Random) -> Iterator[dict[str, Any]]:
    """Yield 1 to 6 texts in one."""
    while True:
        yield {"text": " ".join(text for text, _ in choose.sample(read, choose.randint(1, 6)))}


def pairs(read: Sequence[tuple[str, int]], choose: random.Random) -> Iterator[dict[str, Any]]:
    """Yield sources of 1 to 4 texts, with the first one as target."""
    while True:
        source = [text for text, _ in choose.sample(read, choose.randint(1, 4))]
        yield {"source": " ".join(source), "target": source[0]}


def images(folder: Path) -> Path:
    """Write images of random pixels."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / str(label)).mkdir(parents=True)
        for number in range(IMAGES):
            pixels = draw.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / str(label) / f"{number}.png")
    return folder


def model(job: str, name: str, rows: Path, folder: Path) -> Path:
    """Return a Hugging Face folder with a built-in model, and a tokenizer trained on ``rows``."""
    run = folder / "untrained"
    evaluated = ["--eval-data", str(rows)] if job == "lm" else []
    given = [
        *TASKS[job],
        "--model",
        name,
        "--data",
        str(rows),
        *evaluated,
        "--max-steps",
        "1",
        "--out",
        str(run),
    ]
    quiet([sys.executable, "-m", "distcore", "train", *given, "--global-batch-size", "8"])
    quiet(
        [
            sys.executable,
            "-m",
            "distcore",
            "checkpoint",
            "export",
            str(run),
            "--to",
            str(folder / "model"),
        ]
    )
    return folder / "model"


def quiet(command: Sequence[str]) -> None:
    """Run ``command``, and exit with its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
