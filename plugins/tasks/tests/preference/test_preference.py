"""Preference tuning: its losses are the published formulas, the same under every strategy;
it predicts and exports.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from row_cases import row_of
from torch import Tensor
from torch.nn.functional import logsigmoid

from distcore import RunConfig, train
from distcore.checkpoint import Checkpoint
from distcore.cli.main import main
from distcore.errors import CheckpointError
from distcore_tasks.preference.losses import kto_losses, row_losses
from distcore_tasks.preference.options import PreferenceOptions
from distcore_tasks.preference.task import Preference

PAIRS = Path(__file__).with_name("pairs.jsonl")
BETA = 0.3


def task_of(**options: Any) -> Preference:
    from distcore_tasks.preference.options import Tokenizer

    settings: dict[str, Any] = {
        "data": str(PAIRS),
        "max_seq_len": 40,
        "tokenizer": Tokenizer(vocab_size=400),
    }
    return Preference(**settings | {"beta": BETA} | options)


def plain(model: Any, prompt: np.ndarray, answer: np.ndarray) -> Tensor:
    """The log likelihood of one answer, alone."""
    tokens = torch.tensor(np.concatenate([prompt, answer]), dtype=torch.long)[None]
    logs = model(input_ids=tokens).logits.log_softmax(-1)[0, :-1]
    each = logs.gather(-1, tokens[0, 1:, None])[:, 0]
    total: Tensor = each[len(prompt) - 1 :].sum()
    return total


def models(task: Preference) -> tuple[Any, Any, Any]:
    data: Any = task.prepare(RunConfig())
    built = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        built.append(task.build_model(RunConfig(), data).eval())
    return data.train, *built


def formula(kind: str, chosen: Tensor, rejected: Tensor, lengths: tuple[int, int]) -> Tensor:
    match kind:
        case "dpo":
            return -logsigmoid(BETA * (chosen - rejected))
        case "ipo":
            return (chosen / lengths[0] - rejected / lengths[1] - 1 / (2 * BETA)) ** 2
        case _:
            return (1 - BETA * (chosen - rejected)).clamp(min=0)


@pytest.mark.parametrize("kind", ["dpo", "ipo", "hinge"])
def test_loss_and_gradient_are_the_formula_of_answers_alone(kind: str) -> None:
    task = task_of(loss=kind)
    rows, model, reference = models(task)
    indices = np.arange(8)
    with torch.no_grad():
        batch = task.consult({"reference": reference}, rows.batch(indices))
    task.row_loss(model, batch, lambda *_: None).sum().backward()
    given = torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )
    model.zero_grad()
    losses = []
    for index in indices:
        prompt, *answers = (row_of(rows, name, index) for name in ("prompt", "chosen", "rejected"))
        gains = []
        for answer in answers:
            with torch.no_grad():
                base = plain(reference, prompt, answer)
            gains.append(plain(model, prompt, answer) - base)
        losses.append(formula(kind, gains[0], gains[1], (len(answers[0]), len(answers[1]))))
    torch.stack(losses).sum().backward()
    expected = torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )
    with torch.no_grad():
        assert torch.allclose(
            task.row_loss(model, batch, lambda *_: None), torch.stack(losses), rtol=1e-5, atol=1e-6
        )
    assert float((given - expected).norm() / expected.norm()) <= 1e-5


def test_kto_is_its_formula_over_the_whole_batch_however_it_is_cut() -> None:
    task = task_of(loss="kto")
    rows, model, reference = models(task)
    gains: dict[str, list[Tensor]] = {"chosen": [], "rejected": [], "mismatched": []}
    for index in range(8):
        prompt = row_of(rows, "prompt", index)
        answers = {name: row_of(rows, name, index) for name in ("chosen", "rejected")}
        answers["mismatched"] = row_of(rows, "chosen", index + 1)
        for name, answer in answers.items():
            with torch.no_grad():
                gains[name].append(plain(model, prompt, answer) - plain(reference, prompt, answer))
    chosen, rejected, mismatched = (torch.stack(gains[name]) for name in gains)
    apart = mismatched.mean().clamp(min=0)
    expected = torch.cat(
        [1 - torch.sigmoid(BETA * (chosen - apart)), 1 - torch.sigmoid(BETA * (apart - rejected))]
    ).mean()
    with torch.no_grad():
        cuts = [
            task.embed(model, task.consult({"reference": reference}, rows.batch(part)))
            for part in np.array_split(np.arange(8), 3)
        ]
        every = {name: torch.cat([cut[name] for cut in cuts]) for name in cuts[0]}
        loss = task.batch_loss(every, torch.arange(8), lambda *_: None)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def run(out: Path, **changes: Any) -> list[dict[str, float]]:
    options = {
        "data": str(PAIRS),
        "max_seq_len": 40,
        "tokenizer": {"vocab_size": 400},
        "beta": BETA,
    }
    options |= changes.pop("task_options", {})
    config: dict[str, Any] = {
        "task": "preference",
        "task_options": options,
        "out": str(out),
        "max_steps": 3,
        "global_batch_size": 8,
        "lr": 0.01,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "optimizer": {"eps": 1e-2},
        "schedule": {"name": "constant"},
    }
    train(RunConfig.model_validate(config | changes))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


@cache
def alone(folder: Path, loss: str) -> list[dict[str, float]]:
    return run(
        folder / f"alone-{loss}", micro_batch_size=8, task_options={"loss": loss, "dropout": 0.1}
    )


WAYS = [("ddp", {}), ("fsdp", {}), ("deepspeed", {"stage": 3}), ("mesh", {"shard": 2})]


@pytest.mark.ranks
@pytest.mark.parametrize("loss", ["dpo", "kto"])
@pytest.mark.parametrize(("strategy", "options"), WAYS)
def test_two_ranks_have_the_losses_of_one(
    strategy: str, options: dict[str, Any], loss: str, tmp_path: Path
) -> None:
    one = alone(tmp_path.parent, loss)
    two = run(
        tmp_path / "run", strategy=strategy, nproc=2, strategy_options=options, micro_batch_size=2,
        task_options={"loss": loss, "dropout": 0.1}, gradient_checkpointing=True,
    )  # fmt: skip
    for name in ("train/loss", "train/accuracy", "train/margin", "train/grad_norm"):
        assert [line[name] for line in two] == pytest.approx(
            [line[name] for line in one], rel=2e-5, abs=1e-6
        )


@pytest.mark.programs
def test_the_first_loss_beside_the_model_as_it_began_is_log_2(tmp_path: Path) -> None:
    assert run(tmp_path / "run")[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_the_base_is_the_reference_with_lora(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    nproc = 1 if strategy == "single" else 2
    lines = run(
        tmp_path / "run", lora={"rank": 2}, strategy=strategy, nproc=nproc, micro_batch_size=2
    )
    one = lora_alone(tmp_path.parent)
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert [line["train/loss"] for line in lines] == pytest.approx(
        [line["train/loss"] for line in one], rel=2e-5
    )
    assert lines[2]["train/loss"] != lines[0]["train/loss"]
    state = Checkpoint(tmp_path / "run/checkpoints/step-00000003").job_state()
    assert state["frozen"]["reference"] == state["base"]


@cache
def lora_alone(folder: Path) -> list[dict[str, float]]:
    return run(folder / "lora-alone", lora={"rank": 2}, micro_batch_size=8)


@pytest.mark.programs
def test_a_run_predicts_exports_and_takes_a_folder_as_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "run")
    lines = [
        json.loads(line) for line in (tmp_path / "run/predictions.jsonl").read_text().splitlines()
    ]
    assert {line["prefers"] for line in lines} <= {"chosen", "rejected"}
    judged = tmp_path / "judged.jsonl"
    assert main(["predict", str(tmp_path / "run"), "--data", str(PAIRS), "--out", str(judged)]) == 0
    every = [json.loads(line) for line in judged.read_text().splitlines()]
    assert len(every) == 40
    assert all(line["chosen_reward"] != line["rejected_reward"] for line in every)
    command = ["checkpoint", "export", str(tmp_path / "run"), "--to", str(tmp_path / "model")]
    assert main(command) == 0
    model = {"model": str(tmp_path / "model")}
    assert run(tmp_path / "on", task_options=model)[0]["train/loss"] == pytest.approx(
        math.log(2), rel=1e-6
    )
    other = run(tmp_path / "other", task_options={"reference": str(tmp_path / "model")})
    assert other[0]["train/loss"] != pytest.approx(math.log(2), rel=1e-4)
    frozen = Checkpoint(tmp_path / "other/checkpoints/step-00000003").job_state()["frozen"][
        "reference"
    ]
    assert frozen["what"] == f"the weights in {tmp_path / 'model'}"
    with pytest.raises(CheckpointError, match=r"as its frozen model 'reference'"):
        run(tmp_path / "other", resume="auto", task_options={"reference": None})


def test_a_row_whose_answers_are_cut_off_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "far too long, " * 99, "chosen": "a", "rejected": "b"}] * 4
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["train", "--task", "preference", "--data", str(file), "--out", str(tmp_path / "run")]
    assert main(command) == 2
    assert "row 1: the answers are cut off entirely" in capsys.readouterr().err


def test_an_answer_of_one_token_counts_as_one_in_ipo() -> None:
    options = PreferenceOptions(loss="ipo", beta=0.5)
    chosen, rejected = torch.tensor([2.0, 4.0]), torch.tensor([1.0, 9.0])
    losses = row_losses(options, chosen, rejected, torch.tensor([1, 2, 1, 3]))
    assert losses.tolist() == [(2.0 / 1 - 1.0 / 1 - 1) ** 2, (4.0 / 2 - 9.0 / 3 - 1) ** 2]


def test_kto_weighs_each_answer_against_the_divergence() -> None:
    chosen, rejected, divergence = (
        torch.tensor([2.0, -1.0]),
        torch.tensor([0.5, 3.0]),
        torch.tensor(0.25),
    )
    expected = (
        1 - (0.5 * (chosen - divergence)).sigmoid() + 1 - (0.5 * (divergence - rejected)).sigmoid()
    ) / 2
    torch.testing.assert_close(kto_losses(0.5, chosen, rejected, divergence), expected)
