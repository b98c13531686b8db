"""lm-eval's tasks in a run: the numbers that lm-eval itself gets of the exported model,
and the same training.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distcore import ConfigError
from distcore.checkpoint import Checkpoint, find
from distcore_tasks.lm_evaluation.extension import LmEval

pytest.importorskip("lm_eval", reason="needs lm-eval")

WORDS = [
    "red",
    "green",
    "blue",
    "cat",
    "dog",
    "bird",
    "runs",
    "sleeps",
    "sings",
    "fast",
    "slow",
    "often",
]
TASKS = ("my_choice", "my_texts", "my_writing")
YAML = {
    "my_choice": (
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: gold\n"
        "doc_to_choice: '{{choices}}'\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    ),
    "my_texts": (
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{page}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n"
    ),
    "my_writing": (
        "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs: {until: [' sleeps sleeps', ' green green green'], max_gen_toks: 12}\n"
        "metric_list: [{metric: exact_match}]\n"
    ),
}
HARNESS = """
import json, sys
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
model = HFLM(pretrained="export", device="cpu", dtype="float32", batch_size=4)
measured = lm_eval.simple_evaluate(
    model=model, tasks=sys.argv[1:], task_manager=TaskManager(include_path="tasks"),
    bootstrap_iters=0)
texts = [sample["resps"][0][0] for sample in measured["samples"].get("my_writing", [])]
open("harness.json", "w").write(json.dumps([measured["results"], texts]))
"""
JOB = (
    "train --task causal-lm --data docs.jsonl --model llama-tiny --max-seq-len 64 --max-steps 20"
    " --lr 0.003"
)


def run(folder: Path, *words: str) -> str:
    settings = {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    settings |= {"HF_DATASETS_OFFLINE": "1", "DISTCORE_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(*more: str) -> str:
    return f"extensions.lm_eval={{tasks: [{', '.join(TASKS)}], folder: tasks{''.join(more)}}}"


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    file = folder / f"tasks/{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
    )
    (folder / f"tasks/{name}.yaml").write_text(f"task: {name}\n{data}{YAML[name]}")


def assert_same(here: dict[str, dict[str, float]], expected: dict[str, dict[str, Any]]) -> None:
    assert here.keys() == expected.keys()
    for task, metrics in expected.items():
        wanted = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert wanted
        assert {name: here[task][name.removesuffix(",none")] for name in wanted} == pytest.approx(
            wanted, rel=1e-5
        )


def harness(
    folder: Path, *tasks: str, export: str = "export"
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What lm-eval says of the exported model, and the texts that this writes."""
    run(folder, "-c", HARNESS.replace('"export"', repr(export)), *tasks)
    results, texts = json.loads((folder / "harness.json").read_text())
    return results, texts


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks, a trained run, and its export. Every second answer is
    what the model writes.
    """
    folder, draw = tmp_path_factory.mktemp("lm-eval"), random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))

    (folder / "tasks").mkdir()
    (folder / "docs.jsonl").write_text(
        "".join(json.dumps({"text": text(5, 30)}) + "\n" for _ in range(60))
    )
    choices = [
        {"q": text(1, 9), "choices": [text(1, 1), text(2, 3), "cat"], "gold": n % 3}
        for n in range(23)
    ]
    write(folder, "my_choice", choices)
    write(
        folder, "my_texts", [{"page": text(3, 90)} for _ in range(8)] + [{"page": text(1500, 1500)}]
    )
    questions = [{"q": text(1, 9), "a": "nothing"} for _ in range(11)]
    write(folder, "my_writing", questions)
    run(folder, "-m", "distcore", *JOB.split(), "--out", "run")
    run(folder, "-m", "distcore", "checkpoint", "export", "run", "--to", "export")
    _, texts = harness(folder, "my_writing")
    for row, answer in [*zip(questions, texts, strict=True)][::2]:
        row["a"] = answer
    write(folder, "my_writing", questions)
    return folder


def lines(folder: Path, out: str) -> dict[str, dict[str, float]]:
    """The last line of each task."""
    text = (folder / out / "lm_eval.jsonl").read_text()
    return {line["task"]: line for line in map(json.loads, text.splitlines())}


@pytest.mark.slow
@pytest.mark.ranks
def test_every_strategy_gets_the_numbers_of_lm_eval_itself(trained: Path) -> None:
    expected, _ = harness(trained, *TASKS)
    assert 0.2 < expected["my_writing"]["exact_match,none"] < 0.8
    for strategy, ranks in (("single", "1"), ("ddp", "2"), ("fsdp", "2")):
        words = [
            "run/config.yaml",
            "--resume",
            "run/checkpoints/step-00000020",
            "--strategy",
            strategy,
        ]
        out = f"again-{strategy}"
        run(
            trained,
            "-m",
            "distcore",
            "train",
            *words,
            "--nproc",
            ranks,
            "--set",
            measured(),
            "--out",
            out,
        )
        assert_same(lines(trained, out), expected)


PAIRS = (
    "train --task preference --data pairs.jsonl --model export --max-seq-len 64 --max-steps 10 --lr"
    " 0.001"
)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("job", [f"{JOB} --ema 0.9", PAIRS])
def test_averaged_weights_and_preferences_are_measured_as_their_exports(
    job: str, trained: Path
) -> None:
    row = {"prompt": "red", "chosen": " cat dog bird", "rejected": " runs fast"}
    (trained / "pairs.jsonl").write_text((json.dumps(row) + "\n") * 24)
    out = f"other-{'ema' in job}"
    flags = ["--strategy", "fsdp", "--nproc", "2", "--set", measured(), "--out", out]
    run(trained, "-m", "distcore", *job.split(), *flags)
    run(trained, "-m", "distcore", "checkpoint", "export", out, "--to", f"{out}-export")
    assert_same(lines(trained, out), harness(trained, *TASKS, export=f"{out}-export")[0])


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_that_measures_trains_the_same_weights_and_measures_again_after_a_resume(
    trained: Path,
) -> None:
    job = [
        *JOB.split(),
        "--set",
        measured(", every: 5"),
        "--save-every",
        "10",
        "--set",
        "checkpoints.keep_last=9",
    ]
    run(trained, "-m", "distcore", *job, "--out", "measured")
    states = [
        Checkpoint(path) for out in ("run", "measured") if (path := find("auto", trained / out))
    ]
    one, other = ({name: state[name] for name in state} for state in states)
    assert one.keys() == other.keys()
    assert [name for name in one if not one[name].equal(other[name])] == []
    file = trained / "measured/lm_eval.jsonl"
    before = file.read_text()
    assert [json.loads(line)["step"] for line in before.splitlines()] == [
        n for n in (5, 10, 15, 20) for _ in TASKS
    ]
    resume = ["--out", "measured", "--resume", "measured/checkpoints/step-00000015"]
    run(trained, "-m", "distcore", "train", "measured/config.yaml", *resume)
    assert file.read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            "--set extensions.lm_eval=true",
            "extensions.lm_eval.tasks is empty; name some, such as [hellaswag]",
        ),
        (
            "--set extensions.lm_eval.tasks=[no_such]",
            "no task 'no_such' in lm-eval, or in folder = None",
        ),
        (
            "--set extensions.lm_eval.tasks=[hellaswag] --task masked-lm --model bert-tiny",
            "not task 'masked-lm'",
        ),
    ],
)
def test_a_task_that_cannot_be_measured_is_refused_in_one_line(
    trained: Path, more: str, says: str
) -> None:
    command = [sys.executable, "-m", "distcore", *JOB.split(), *more.split(), "--out", "refused"]
    done = subprocess.run(command, cwd=trained, capture_output=True, text=True, check=False)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 2
    assert last.startswith("error: extension lm_eval: ")
    assert says in last


def test_a_run_without_lm_eval_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python's own way to say that it cannot be imported
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"lm-eval is not installed.*pip install 'distcore-tasks"):
        LmEval(tasks=["my_choice"])
