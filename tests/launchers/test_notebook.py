"""distcore in a Jupyter kernel: progress is one line, an error too, and an
interrupt stops in order.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
EXAMPLE = Path(__file__).parents[2] / "examples/notebook.ipynb"
LONG = "train(config.model_copy(update={'epochs': 4000, 'out': 'runs/long'}), Line())"
pytestmark = [pytest.mark.ranks, pytest.mark.needs("distcore-ddp"), pytest.mark.timeout(120)]


class Kernel:
    """A notebook that grows: each call runs one cell more in the same kernel."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def run(self, source: str) -> list[Any]:
        """Run a cell and return its outputs."""
        cells = self.client.nb.cells
        cells.append(nbformat.v4.new_code_cell(source))
        outputs: list[Any] = self.client.execute_cell(cells[-1], len(cells) - 1).outputs
        return outputs

    def interrupt(self) -> None:
        """Do what the button of a notebook does."""
        asyncio.run(self.client.km.interrupt_kernel())


def written(outputs: list[Any], stream: str) -> str:
    return "".join(output["text"] for output in outputs if output.get("name") == stream)


def error_of(outputs: list[Any]) -> list[str]:
    """The lines that a notebook shows of an exception."""
    (error,) = [output for output in outputs if output["output_type"] == "error"]
    return "\n".join(error["traceback"]).splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def example(folder: Path) -> Iterator[tuple[Kernel, Any]]:
    """The example after its last cell, with its kernel, which has what its cells defined."""
    notebook = nbformat.read(EXAMPLE, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=60, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        yield Kernel(client), notebook.cells[:]


def test_the_example_has_no_outputs_in_the_repository() -> None:
    cells = nbformat.read(EXAMPLE, as_version=4).cells
    assert not [cell for cell in cells if cell.get("outputs")]


def test_the_example_trains_and_launches(example: tuple[Kernel, Any]) -> None:
    train, launch = example[1][2], example[1][4]
    assert written(train.outputs, "stdout").startswith("loss ")
    assert "after 40 steps" in written(train.outputs, "stdout")
    assert launch.outputs[-1]["data"]["text/plain"] == "[(0, 2), (1, 2)]"


def test_progress_is_one_line_that_is_overwritten(example: tuple[Kernel, Any]) -> None:
    text = written(example[1][2].outputs, "stderr")
    lines = [line.rpartition("\r")[2] for line in text.split("\n") if line.strip()]
    overview = [
        line for line in lines if line.startswith(("task:", "rows:", "model:", "ranks:", "steps:"))
    ]
    assert len(overview) == 5
    shown = [line for line in lines if line not in overview]
    bars = re.findall(r"\r([█░]{20}) step (\d+)/40 ", text)
    assert len(bars) >= 40
    assert bars[9] == ("█" * 5 + "░" * 15, "10")
    assert bars[-1] == ("█" * 20, "40")
    assert len(shown) <= 6, shown  # two of them may be a warning of tqdm, which misses its widgets
    assert any(line.startswith("evaluation at step ") for line in shown), shown


def test_an_exception_in_a_rank_is_one_line(example: tuple[Kernel, Any]) -> None:
    lines = error_of(
        example[0].run(
            "def fail():\n    return 1 / int(os.environ['RANK'])\n\nlaunch(fail, nproc=2)"
        )
    )
    assert len(lines) == 1
    assert lines[0].startswith(
        "RankError: rank 0 of 2 failed: ZeroDivisionError: division by zero; traceback in "
    )


def test_a_wrong_value_is_one_line(example: tuple[Kernel, Any]) -> None:
    lines = error_of(
        example[0].run("train(config.model_copy(update={'lr': -1.0, 'out': 'runs/no'}), Line())")
    )
    assert lines == ["ConfigError: lr = -1.0: must be greater than 0"]


def test_an_interrupt_stops_after_a_checkpoint_and_leaves_the_kernel_usable(
    example: tuple[Kernel, Any], folder: Path
) -> None:
    kernel, metrics = example[0], folder / "runs/long/metrics.jsonl"

    def press() -> None:
        deadline = time.monotonic() + 40
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        kernel.interrupt()

    button = threading.Thread(target=press)
    button.start()
    lines = error_of(kernel.run(LONG))
    button.join()
    assert len(lines) == 1
    assert lines[0].startswith("StoppedError: ")
    steps = sorted((folder / "runs/long/checkpoints").glob("step-*"))
    assert len(steps) == 1
    reached = int(steps[0].name.removeprefix("step-"))
    changed = {
        "max_steps": reached + 5,
        "out": "runs/long",
        "resume": "auto",
        "resume_changed": ["total_steps"],
    }
    outputs = kernel.run(f"train(config.model_copy(update={changed}), Line())['steps']")
    assert outputs[-1].get("data", outputs[-1])["text/plain"] == str(reached + 5)
