"""What a loop of one's own gets beside its steps: evaluations, records, a state in checkpoints, and
a checkpoint on SIGTERM.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import distcore
from distcore import DistcoreError, StoppedError, StrategyError, TaskError, launch
from distcore.checkpoint import find, read_tensors
from distcore.errors import AgreementError

X = torch.linspace(-3, 3, 48)[:, None]
HELD_OUT = TensorDataset(X[:7] + 0.1, X[:7].cos())
STEPS = 8


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))


def squared(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).square().sum()
    return loss


def outputs(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    off = (model(batch[0]) - batch[1])[:, 0]
    return {"loss": off.square(), "distance": off.abs()}


def opened(out: Path, **changes: Any) -> distcore.Session:
    settings = {
        "out": str(out), "max_steps": STEPS, "global_batch_size": 8, "device": "cpu",
        "strategy": "single", "resume": "auto", "log_every": 2, "lr": 1e-2, **changes,
    }  # fmt: skip
    config = distcore.load_config(None, settings)
    return distcore.Session(config, build, TensorDataset(X, X.sin()))


def train(
    out: Path, after: Callable[[distcore.Session], object] = id, **changes: Any
) -> dict[str, Any]:
    """Train to the end, counting the steps in the state; ``after`` is called at the end of each
    step. Returns the state.
    """
    with opened(out, **changes) as session:
        for step in session:
            share = step.gradients(squared)
            step.apply()
            session.state["steps"] = session.state.get("steps", 0) + 1
            session.state.setdefault("losses", []).append(session.mean(share))
            after(session)
        return session.state


def at_step(number: int, action: Callable[[], object]) -> Callable[[distcore.Session], None]:
    def after(session: distcore.Session) -> None:
        if session.progress.step == number:
            action()

    return after


def saved(out: Path) -> dict[str, Tensor]:
    path = find("auto", out)
    assert path is not None
    return dict(read_tensors(path))


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise KeyError("of the loop")


def test_a_checkpoint_has_the_state_as_it_is_at_the_end_of_the_loops_body(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    assert whole["steps"] == STEPS
    with pytest.raises(KeyError):
        train(tmp_path / "parts", at_step(5, fail), save_every=2)
    # Step 5 is not saved, nor is what its body did.
    assert json.loads((tmp_path / "parts/checkpoints/step-00000004/state.json").read_text())[
        "states"
    ] == {"session": {"steps": 4, "losses": whole["losses"][:4]}}
    assert train(tmp_path / "parts", save_every=2) == whole
    for name, tensor in saved(tmp_path / "whole").items():
        assert torch.equal(tensor, saved(tmp_path / "parts")[name]), name
    # The log lines, too, are those of a run without a stop.
    logged = [[line["step"], line["train/loss"]] for line in lines(tmp_path / "whole")]
    assert [[line["step"], line["train/loss"]] for line in lines(tmp_path / "parts")] == logged


def test_after_sigterm_the_step_is_saved_and_the_session_goes_on_from_it(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    with pytest.raises(
        StoppedError, match=r"^stopped after step 3 of 8; go on with resume='auto'$"
    ):
        train(tmp_path / "parts", at_step(3, terminate))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert find("auto", tmp_path / "parts") == tmp_path / "parts/checkpoints/step-00000003"
    assert train(tmp_path / "parts") == whole
    for name, tensor in saved(tmp_path / "whole").items():
        assert torch.equal(tensor, saved(tmp_path / "parts")[name]), name


def stop_after_the_last_step(out: Path) -> None:
    with opened(out) as session:
        for step in session:
            step.gradients(squared)
            step.apply()
        terminate()
        session.evaluate(HELD_OUT, outputs)


def test_a_signal_after_the_last_step_ends_the_session_once_all_is_saved(tmp_path: Path) -> None:
    with pytest.raises(StoppedError) as stopped:
        stop_after_the_last_step(tmp_path)
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert find("auto", tmp_path) == tmp_path / "checkpoints/step-00000008"


def test_an_evaluation_is_the_mean_over_all_rows_and_is_recorded(tmp_path: Path) -> None:
    with opened(tmp_path, micro_batch_size=2) as session:
        for step in session:
            step.gradients(squared)
            step.apply()
            if session.progress.step == 4:
                session.log(temperature=0.5)
        means = session.evaluate(HELD_OUT, outputs)
        assert session.model.training
        alone = session.evaluate(HELD_OUT, lambda model, batch: outputs(model, batch)["loss"])
        session.model.eval()
        with torch.no_grad():
            off = session.model(HELD_OUT[:][0]) - HELD_OUT[:][1]
    expected = {"loss": off.square().mean().item(), "distance": off.abs().mean().item()}
    assert means == pytest.approx(expected, rel=1e-6)
    assert alone == pytest.approx({"loss": expected["loss"]}, rel=1e-6)
    records = lines(tmp_path)
    assert [line["step"] for line in records] == [2, 4, 4, 6, 8, 8, 8]
    assert {line.get("train/temperature") for line in records} == {None, 0.5}
    assert records[-2]["eval/distance"] == means["distance"]
    assert records[2]["train/lr"] == pytest.approx(1e-2 * 4 / 8)


def test_evaluations_and_records_change_no_step(tmp_path: Path) -> None:
    def look(session: distcore.Session) -> None:
        session.evaluate(HELD_OUT, outputs)
        session.log(seen=1.0)

    assert train(tmp_path / "looks", look) == train(tmp_path / "not")
    for name, tensor in saved(tmp_path / "not").items():
        assert torch.equal(tensor, saved(tmp_path / "looks")[name]), name


def test_a_loop_that_computes_gradients_in_parts_logs_no_loss(tmp_path: Path) -> None:
    with opened(tmp_path, max_steps=2) as session:
        for step in session:
            step.zero()
            for number in step.micro_batches:
                step.backward(step.forward(number, squared))
            step.apply()
    (record,) = lines(tmp_path)
    assert "train/loss" not in record
    assert record["train/grad_norm"] > 0


def test_the_loop_of_the_page_evaluates_and_remembers_its_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs/session.md"
    example = re.search(r"```python\n(# watched_loop\.py\n.*?)```", page.read_text(), re.S)
    assert example is not None
    monkeypatch.chdir(tmp_path)
    Path("watched_loop.py").write_text(example[1])
    main = runpy.run_path("watched_loop.py")["main"]
    main("single", "run")
    first = capsys.readouterr().out
    assert first.startswith("best distance: 0.")
    # Nothing is left to do: the state is that of the checkpoint.
    main("single", "run")
    assert capsys.readouterr().out == first
    assert [line for line in lines(Path("run")) if "eval/distance" in line]


LISTENER = """
from distcore import hookimpl


class Listener:
    in_any_loop = {heard}

    @hookimpl
    def on_run_start(self, run, progress):
        self.events = [f"start {{progress.step}}"]

    @hookimpl
    def on_log(self, record):
        self.events.append(f"log {{record['step']}}")

    @hookimpl
    def on_evaluation_end(self, evaluation):
        self.events.append(f"eval {{sorted(evaluation.metrics)}}")

    @hookimpl
    def on_checkpoint(self, path):
        self.events.append(f"checkpoint {{path.name}}")

    @hookimpl
    def on_run_end(self, report):
        self.events.append(f"end {{report['steps']}} {{sorted(report['evaluation'])[:2]}}")
        with open("events.txt", "w") as file:
            file.write(repr(self.events))
"""


def test_an_extension_for_any_loop_hears_what_a_session_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("listener.py").write_text(LISTENER.format(heard=True))
    with opened(tmp_path / "run", extensions={"listener.py:Listener": True}) as session:
        for step in session:
            step.gradients(squared)
            step.apply()
        session.evaluate(HELD_OUT, outputs)
    assert Path("events.txt").read_text() == repr(
        [
            "start 0", "log 2", "log 4", "log 6", "log 8", "eval ['distance', 'loss']",
            "checkpoint step-00000008", "end 8 ['dataset_size', 'distance']",
        ]
    )  # fmt: skip


def test_an_extension_that_needs_the_trainers_loop_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("listener.py").write_text(LISTENER.format(heard=False))
    with pytest.raises(
        DistcoreError, match=r"^extensions\.listener\.py:Listener = True: a Session"
    ):
        opened(tmp_path / "run", extensions={"listener.py:Listener": True})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "line"),
    [(X, r"^session: state\(\) returned no JSON value"), (float("nan"), "no JSON value")],
)
def test_a_state_that_is_no_json_value_is_one_line(value: Any, line: str, tmp_path: Path) -> None:
    def keep(session: distcore.Session) -> None:
        session.state["value"] = value

    with pytest.raises(StrategyError, match=line):
        train(tmp_path, keep)


def test_outputs_that_are_no_value_of_each_row_are_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(TaskError, match=r"outputs\(\) returned"),
        opened(tmp_path, max_steps=1) as session,
    ):
        session.evaluate(HELD_OUT, lambda model, batch: squared(model, batch))


def on_two_ranks(out: Path) -> tuple[dict[str, float], str, dict[str, Any], str]:
    """Evaluate, stop by a signal that reaches one rank, go on, and end with another state on each
    rank; return the means, both errors, and the state in between.
    """
    is_odd = os.environ["RANK"] == "1"
    stopped = apart = ""
    try:
        train(out, at_step(3, terminate if is_odd else int), strategy="ddp", timeout=20)
    except StoppedError as error:
        stopped = str(error)
    with opened(out, strategy="ddp", timeout=20) as session:
        state = dict(session.state)
        means = session.evaluate(HELD_OUT, outputs)
    try:
        with opened(out, strategy="ddp", timeout=20) as session:
            for step in session:
                step.gradients(squared)
                step.apply()
                session.state["rank"] = is_odd
    except AgreementError as error:
        apart = str(error)
    return means, stopped, state, apart


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp")
def test_ranks_evaluate_each_row_once_stop_together_and_agree_on_the_state(tmp_path: Path) -> None:
    first, second = launch(on_two_ranks, tmp_path / "run", nproc=2)
    assert first[:3] == second[:3]
    means, stopped, state, apart = first
    # Ranks agree at log lines, of which there is one every second step.
    assert stopped == "stopped after step 4 of 8; go on with resume='auto'"
    assert state["steps"] == 4
    assert "state() of session" in apart
    # The weights of step 4, whose losses one process has, too.
    assert train(tmp_path / "one")["losses"][:4] == pytest.approx(state["losses"], rel=1e-5)
    assert sorted(means) == ["distance", "loss"]
