"""Train by the scripts of transformers' examples, and by the config that ``distcore migrate``
makes of their command.

    python benchmarks/parity_with_scripts.py [run_glue …] [--transformers
                                             VERSION] [--scripts FOLDER] [--work
                                             FOLDER] [--page docs/coming-from.md]

The scripts are those of one version of transformers, unchanged, by default of the version that
distcore has here. They are fetched into the work folder, where ``--scripts`` names no folder that
has them, and run in an environment of their own, which is made in the work folder and has no
distcore. Modules of one file stand in for ``evaluate`` and ``nltk``,
which would ask a hub for metrics: none is computed, as nothing is evaluated.

Models are small and without dropout, and every step has all rows, so no order and no mask can
differ. Compared are the losses of each step and the weights at the end. ``--page`` writes the table
below the heading ``HEADING`` of that page.

Bound: losses within 1e-5, beside the rounding of the Trainer before 5.0, and weights within 1e-3.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch
import transformers as hf
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

ROWS, STEPS = 24, 6
LOSS_BOUND, WEIGHT_BOUND = 1e-5, 1e-3
ROUNDING = 5e-5
"""The Trainer before 5.0 logs four decimals."""
HEADING = "### The same losses as the scripts"
NEEDS = ("datasets", "accelerate", "sentencepiece", "protobuf", "scikit-learn")
"""Further packages of the scripts' own environment."""
SOURCE = (
    "https://raw.githubusercontent.com/huggingface/transformers/v{version}/examples/pytorch/{path}"
)
TINY: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
COMMON = (
    f"--learning_rate 5e-3 --weight_decay 0.1 --seed 1 --per_device_train_batch_size {ROWS}"
    " --max_source_length 32 --max_seq_length 32"
)
TRAINER = (
    f"--do_train --max_steps {STEPS} --warmup_steps 2 --logging_steps 1 --save_strategy no"
    " --use_cpu --report_to none"
)
LOOP = f"--max_train_steps {STEPS} --num_warmup_steps 2"
STAND_INS = {
    "evaluate.py": (
        "class Metric:\n    add_batch = compute = lambda self, **given: {}\n\n\n"
        "def load(*names, **options):\n    return Metric()\n"
    ),
    "nltk.py": "class data:\n    find = staticmethod(lambda name: name)\n",
}


@dataclass(frozen=True)
class Job:
    """A script, and its command line beside ``COMMON``."""

    path: str
    """Below transformers' examples/pytorch."""
    words: str
    """Arguments of the data and the kind of loop."""
    lacks: tuple[str, ...] = ()
    """Arguments of ``COMMON`` that the script has not."""


JOBS = {
    "run_glue": Job(
        "text-classification/run_glue.py",
        f"--model_name_or_path bert --train_file glue.csv --validation_file glue.csv {TRAINER}",
        ("max_source_length",),
    ),
    "run_classification": Job(
        "text-classification/run_classification.py",
        f"--model_name_or_path bert --train_file glue.csv --validation_file glue.csv {TRAINER} "
        "--text_column_names sentence1 --label_column_name label",
        ("max_source_length",),
    ),
    "run_ner": Job(
        "token-classification/run_ner.py",
        f"--model_name_or_path ner --train_file ner.json --validation_file ner.json {TRAINER}",
        ("max_source_length",),
    ),
    "run_summarization": Job(
        "summarization/run_summarization.py",
        "--model_name_or_path t5 --train_file news.json --validation_file news.json"
        f" --max_target_length 16 {TRAINER}",
        ("max_seq_length",),
    ),
    "run_translation": Job(
        "translation/run_translation.py",
        "--model_name_or_path t5 --train_file en-ro.json --validation_file en-ro.json"
        f" --max_target_length 16 --source_lang en --target_lang ro {TRAINER}",
        ("max_seq_length",),
    ),
    "run_glue_no_trainer": Job(
        "text-classification/run_glue_no_trainer.py",
        "--model_name_or_path bert --train_file glue.csv --validation_file glue.csv --max_length"
        f" 32 {LOOP}",
        ("max_source_length", "max_seq_length"),
    ),
}


def lay_out(folder: Path) -> None:
    """Write rows, models and the modules that stand in for others."""
    words = [f"w{number}" for number in range(40)]
    lines = [" ".join(words[(7 * row + at * at) % 40] for at in range(10)) for row in range(ROWS)]
    pairs = [f"{line},{lines[-row]},{row % 3}" for row, line in enumerate(lines)]
    (folder / "glue.csv").write_text("\n".join(["sentence1,sentence2,label", *pairs]) + "\n")
    rows: dict[str, Callable[[int, str], dict[str, Any]]] = {
        "ner.json": lambda row, line: {
            "tokens": line.split(),
            "ner_tags": [("A", "B", "O")[n % 3] for n in range(10)],
        },
        "news.json": lambda row, line: {"article": line, "highlights": lines[-row][:11]},
        "en-ro.json": lambda row, line: {"translation": {"en": line, "ro": lines[-row][:14]}},
    }
    for name, of in rows.items():
        (folder / name).write_text(
            "".join(json.dumps(of(row, line)) + "\n" for row, line in enumerate(lines))
        )
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    base = Tokenizer(
        WordLevel({word: n for n, word in enumerate([*special, *words])}, unk_token="[UNK]")
    )
    base.pre_tokenizer = Whitespace()
    fast: Any = hf.PreTrainedTokenizerFast
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    plain = fast(tokenizer_object=base, **named, eos_token="[SEP]", model_max_length=64)
    base.post_processor = TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", special.index("[SEP]"))]
    )
    # as T5's own
    ended = fast(tokenizer_object=base, **named, eos_token="[SEP]", model_max_length=64)
    torch.manual_seed(0)
    of_t5: Any = hf.T5Config
    t5 = of_t5(
        vocab_size=48, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=3,
    )  # fmt: skip
    tags = {"id2label": {0: "A", 1: "B", 2: "O"}, "label2id": {"A": 0, "B": 1, "O": 2}}
    models: dict[str, Any] = {
        "bert": hf.BertForSequenceClassification(hf.BertConfig(**TINY)),
        "ner": hf.BertForTokenClassification(hf.BertConfig(**TINY | tags)),
        "t5": hf.T5ForConditionalGeneration(t5),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        (ended if name == "t5" else plain).save_pretrained(folder / name)
        settings = folder / name / "tokenizer_config.json"  # with the name that every version knows
        read = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings.write_text(json.dumps(read))
    (folder / "stand-ins").mkdir()
    for name, text in STAND_INS.items():
        (folder / "stand-ins" / name).write_text(text)


def own_environment(work: Path, version: str) -> str:
    """Return the interpreter of an environment with this torch and that version
    of transformers; raises OSError.
    """
    python = work / "environment" / "bin" / "python"
    wanted = [
        "install",
        "-q",
        f"torch=={torch.__version__.partition('+')[0]}",
        f"transformers=={version}",
        *NEEDS,
    ]
    for command in (
        [sys.executable, "-m", "venv", str(work / "environment")],
        [str(python), "-m", "pip", *wanted],
    ):
        if subprocess.run(command, timeout=1800).returncode:
            raise OSError(f"the scripts' environment cannot be made: {' '.join(command)}")
    return str(python)


def script_of(job: Job, scripts: Path | None, work: Path, version: str) -> Path:
    """Return the script, from the folder of scripts or fetched; raises OSError."""
    if scripts is not None:
        return next(
            (file for file in scripts.rglob(Path(job.path).name)), scripts / Path(job.path).name
        )
    file = work / Path(job.path).name
    with urlopen(SOURCE.format(version=version, path=job.path), timeout=60) as answer:  # https
        file.write_bytes(answer.read())
    return file


def run(words: list[str], work: Path, log: str) -> str:
    """Run a program in the work folder; return the last line of its output if
    it fails, else nothing.
    """
    path = os.pathsep.join(
        filter(None, [str(work / "stand-ins"), os.environ.get("PYTHONPATH", "")])
    )
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(work / "home"),
        "PYTHONPATH": path,
    }
    with (work / log).open("w") as output:
        done = subprocess.run(
            words, cwd=work, env=os.environ | offline, stdout=output, stderr=output, timeout=900
        )
    lines = [line for line in (work / log).read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:150] if done.returncode else ""


def measure(
    name: str, python: str, scripts: Path | None, work: Path, version: str
) -> tuple[str, bool]:
    """Train by one script and by distcore; return the row of the table, and
    whether the bound holds.
    """
    job = JOBS[name]
    try:
        script = script_of(job, scripts, work, version)
        if not script.is_file():
            return f"| `{name}` | not run: no {script.name} in {scripts} | |", True
    except (OSError, URLError) as error:
        return f"| `{name}` | not run: cannot be fetched: {error} | |", True
    theirs, ours, config = f"{name}-there", f"{name}-here", f"{name}.yaml"
    common = re.sub(
        "".join(rf"--(?:{lacked}) \S+ ?|" for lacked in job.lacks).rstrip("|") or "$^", "", COMMON
    )
    words = [str(script), *job.words.split(), *common.split(), "--output_dir", theirs]
    distcore = [sys.executable, "-m", "distcore"]
    for program in (
        [python, *words],
        [*distcore, "migrate", "--out", config, "--", "python", script.name, *words[1:]],
        [*distcore, "train", config, "--out", ours, "--log-every", "1", "--set", "device=cpu"],
        [*distcore, "checkpoint", "export", ours, "--to", f"{name}-export"],
    ):
        if failed := run(program, work, f"{name}.log"):
            return f"| `{name}` | not run: {failed} | |", False
    here = [json.loads(line) for line in (work / ours / "metrics.jsonl").read_text().splitlines()]
    mine = [line["train/loss"] for line in here if "train/loss" in line]
    state = work / theirs / "trainer_state.json"
    loss, rounding = max_loss(state, mine) if state.exists() else (None, 0.0)
    weight = max_weight(
        work / theirs / "model.safetensors", work / f"{name}-export/model.safetensors"
    )
    said = (
        f"{len(mine)} of {len(mine)} within {loss:.1e}"
        if loss is not None
        else "the script logs none"
    )
    holds = (loss is None or loss <= LOSS_BOUND + rounding) and weight <= WEIGHT_BOUND
    return f"| `{name}` | {said} | {weight:.1e} |", holds


def max_loss(state: Path, mine: list[float]) -> tuple[float, float]:
    """Return the largest difference of the losses of a step, and how much of it may be the
    rounding of the log.
    """
    theirs: list[float] = [
        line["loss"] for line in json.loads(state.read_text())["log_history"] if "loss" in line
    ]
    rounding = ROUNDING if all(round(loss, 4) == loss for loss in theirs) else 0.0
    return max(abs(a - b) for a, b in zip(theirs, mine, strict=True)), rounding


def max_weight(theirs: Path, mine: Path) -> float:
    """Return the largest difference of two elements of the weights."""
    one, other = load_file(theirs), load_file(mine)
    if one.keys() != other.keys():
        return float("inf")
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def main() -> int:
    """Measure, print the table, and return 0 if the bound holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*JOBS, []], default=[])
    parser.add_argument("--transformers", default=hf.__version__, metavar="VERSION")
    parser.add_argument("--scripts", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp())
    work.mkdir(exist_ok=True)
    if any(work.iterdir()):
        parser.error(f"--work {work}: is not empty")
    lay_out(work)
    scripts = arguments.scripts.resolve() if arguments.scripts else None
    try:
        python = own_environment(work.resolve(), arguments.transformers)
    except OSError as error:
        parser.error(str(error))
    head = ["| script | losses of the steps | weights at the end |", "|---|---|---|"]
    asked = arguments.names or list(JOBS)
    measured = [
        measure(name, python, scripts, work.resolve(), arguments.transformers) for name in asked
    ]
    table = "\n".join([*head, *(row for row, _ in measured)])
    print(table)
    if arguments.page:
        page = arguments.page.read_text(encoding="utf-8")
        new = re.sub(
            rf"({re.escape(HEADING)}\n.*?\n)\|.*?\n(?!\|)",
            lambda m: f"{m[1]}{table}\n",
            page,
            count=1,
            flags=re.S,
        )
        arguments.page.write_text(new, encoding="utf-8")
    return 0 if all(holds for _, holds in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
