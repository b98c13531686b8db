"""First contact of a newcomer: the end of the demo, the top of the site."""

from __future__ import annotations

import json
import random
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
from environments import folders_of

from distcore.cli.main import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


@pytest.fixture
def demo() -> list[list[str]]:
    """The words of the command that trains, of the line that says where distcore is, and of
    those to try next.
    """
    # these tests run under make
    command = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.demo", "demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    trains, _, *says = done.stdout.splitlines()
    return [shlex.split(trains), *(shlex.split(line)[-1].split() for line in says)]


def test_the_demo_says_where_distcore_is_and_three_things_to_try_with_its_run(
    demo: list[list[str]],
) -> None:
    trains, where, *tries = demo
    assert where[:3] == ["distcore", "is", ".venv/bin/distcore;"]
    assert "'source .venv/bin/activate'" in " ".join(where)
    assert len(tries) == 3
    for words in tries:
        assert words[0] == trains[0] == ".venv/bin/distcore"
        assert trains[-1] in words


@pytest.mark.ranks
def test_the_commands_that_the_demo_names_work(
    demo: list[list[str]], work_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trains, _, *tries = demo
    shorter = [
        "--max-steps",
        "2",
        "--model",
        "bert-tiny",
        "--max-seq-len",
        "16",
        "--data",
        "rows.json",
    ]
    for words in ([*trains[:2], *shorter, *trains[-2:]], *tries):
        assert main(words[1:]) == 0, capfd.readouterr().err


def test_the_demo_installs_what_the_first_pages_need_and_no_more() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "--always-make", "demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "pip install" in line]
    folders = [word for line in lines for word in line.split() if word.startswith(".")]
    installed = [folder for folder in folders if not folder.startswith(".venv")]
    assert installed == folders_of("pip install -r requirements.txt")
    assert "--group" not in done.stdout
    assert "distcore_horovod" not in done.stdout


def test_the_set_up_says_how_far_it_is() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "--always-make", "install"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    steps = re.findall(r"set-up, (\d) of (\d): ", done.stdout)
    assert [int(step) for step, _ in steps] == list(range(1, int(steps[0][1]) + 1))


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (
            "exit 1",
            (
                "error: .*python3 is no Python 3.11 or newer; name one, such as: make"
                " PYTHON=python3.12 install\n"
            ),
        ),
        ('test "$1" = -c || { echo "called: $*"; exit 1; }', r"called: -m venv \S+/venv\n"),
    ],
    ids=["an old Python", "one whose environment has no pip"],
)
def test_the_set_up_needs_a_python_that_can_make_an_environment(
    program: str, printed: str, tmp_path: Path
) -> None:
    for name, does in (("python3", program), ("venv/bin/python", "exit 1")):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{does}\n")
        file.chmod(0o755)
    command = [
        "make",
        "--no-print-directory",
        f"PYTHON={tmp_path}/python3",
        f"VENV={tmp_path}/venv",
        "install",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.search(printed, done.stdout + done.stderr)


def test_the_top_of_the_site_is_its_first_page() -> None:
    at_the_top = runpy.run_path(str(ROOT / "docs/_ext/front_page.py"))["at_the_top"]
    page = at_the_top(
        '<head>\n<link href="../_static/style.css"></head><a href="plan.html">', "docs"
    )
    assert re.search(r'<head>\s*<base href="docs/index.html">', page)
    assert "http-equiv" not in page


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_the_example_of_the_readme_learns_from_300_rows(
    work_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    words = {
        "like": ["great", "lovely", "brilliant", "moving", "funny"],
        "dislike": ["awful", "dull", "weak", "clumsy", "silly"],
    }
    rows = []
    for _ in range(300):
        label = draw.choice(["like", "like", "dislike"])
        thing, other = draw.sample(["plot", "acting", "music", "ending", "cast"], 2)
        rows.append(
            {
                "text": f"The {thing} was {draw.choice(words[label])}, and so was the {other}.",
                "label": label,
            }
        )
    (work_folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (line,) = re.findall(
        r"^distcore (train .*--data reviews\.jsonl .*--out runs/reviews)$", README.read_text(), re.M
    )
    code = main(line.split())
    out, err = capfd.readouterr()
    assert code == 0, err
    assert "largest class" not in out
    report = json.loads((work_folder / "runs/reviews/report.json").read_text())
    assert report["evaluation"]["accuracy"] > report["evaluation"]["majority_accuracy"] + 0.1
