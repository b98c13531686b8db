"""The laws on ranks that share sequences: the cases of the kit with a decoder, since its own
model has no sequences.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from distcore import RunConfig, checkpoint, train
from distcore.testing import STRATEGIES
from distcore.testing.findings import BF16, EXACT, FORWARD, FP32, Case, Measured
from distcore.testing.lab import BY_TOKENS, Job, Lab
from distcore.testing.laws.gradient import distance
from distcore.testing.problem import VOCABULARY, Problem, RandomRows
from distcore.testing.reference import build_untrained, largest_difference, solve
from distcore.testing.subject import Subject

pytestmark = pytest.mark.ranks

STEPS, HALF = 6, 3
"""Optimizer steps of a run, and those before its checkpoint."""
SCHEDULE = {"name": "linear", "warmup_steps": 2}
PLAIN: dict[str, Any] = {"optimizer": {"eps": 1e-2, "weight_decay": 0.0}}
"""The reference knows which norms of the kit's own model have no weight decay."""


class Sentences(Problem):
    """The rows of the kit, of 2 to 12 tokens, as sentences of which a small Llama
    predicts the next token.
    """

    def build_model(self, config, data):
        llama = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=24,
            pad_token_id=0,
            tie_word_embeddings=self.tied,
            attention_dropout=self.dropout,
        )
        return LlamaForCausalLM(llama)

    def loss(self, model, batch):
        return (losses_of(logits_of(model, batch), batch) * batch["items"]).sum()

    def outputs(self, model, batch):
        logits = logits_of(model, batch).float()
        losses, guesses = losses_of(logits, batch), logits[:, 0].argmax(-1)
        return {"loss": losses, "prediction": guesses, "label": batch["labels"]}


def logits_of(model, batch):
    return model(input_ids=batch["tokens"], attention_mask=(batch["tokens"] != 0).long()).logits


def losses_of(logits, batch):
    """The mean loss over the tokens of each row."""
    following = batch["tokens"][:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), following, ignore_index=0, reduction="none"
    )
    return losses.sum(1) / (following != 0).sum(1)


def compared(lab: Lab, problem: Problem, bound: float = FP32, **changes: Any) -> Measured:
    job = lab.job(problem, **PLAIN | changes)
    return distance(job.train(STEPS), solution(job), bound)


def solution(job: Job, after: int = 0):
    """The reference, without the tables of angles, which no checkpoint has; losses and
    norms of the steps ``after``.
    """
    whole = solve(job.task, job.run.config, STEPS)
    state = {name: tensor for name, tensor in whole.state.items() if "inv_freq" not in name}
    return replace(whole, state=state, losses=whole.losses[after:], norms=whole.norms[after:])


def every_size(lab: Lab) -> Measured:
    job, worst = (
        lab.job(Sentences(dropout=0.5), micro_batch_size=2, global_batch_size=2 * lab.world.size),
        0.0,
    )
    module = build_untrained(job.task, job.run.config, job.data).eval()
    for size in range(8):
        rows = RandomRows(size, seed=2)
        training = replace(job.training, data=replace(job.data, evaluation=rows))
        evaluation = replace(job, training=training).evaluate()
        assert evaluation.evaluated == size
        if size:
            with torch.no_grad():
                expected = job.task.outputs(module, rows.batch(np.arange(size)))
            assert evaluation.outputs["label"].tolist() == expected["label"].tolist()
            worst = max(worst, float((evaluation.outputs["loss"] - expected["loss"]).abs().max()))
    return Measured(error=worst, bound=2 * FORWARD)  # of losses of some 3.5


def into_single(lab: Lab) -> Measured:
    """Each rank goes on by itself from the checkpoint that all of them saved."""
    problem = Sentences(tied=True)
    first = lab.job(problem, schedule=SCHEDULE, **PLAIN)
    path = first.save(first.train(HALF).progress)
    return continued(lab.build_alone(problem, schedule=SCHEDULE, **PLAIN), path)


def from_single(lab: Lab) -> Measured:
    problem = Sentences(tied=True)
    alone = lab.build_alone(problem, schedule=SCHEDULE, **PLAIN)
    paths = lab.share(str(alone.save(alone.train(HALF).progress)))
    return continued(lab.job(problem, schedule=SCHEDULE, **PLAIN), Path(paths[0]))


def continued(job: Job, path: Path) -> Measured:
    progress, _ = checkpoint.load(job.run, job.hooks, path)
    return distance(job.train(STEPS - HALF, progress), solution(job, after=HALF))


def bit_for_bit(lab: Lab) -> Measured:
    """With dropout, a run that is resumed in the middle of an epoch equals one
    that was not interrupted.
    """
    jobs = [lab.job(Sentences(dropout=0.2), schedule=SCHEDULE, **BY_TOKENS) for _ in range(3)]
    whole = jobs[0].train(STEPS)
    progress, _ = checkpoint.load(
        jobs[2].run, jobs[2].hooks, jobs[1].save(jobs[1].train(HALF).progress)
    )
    resumed = jobs[2].train(STEPS - HALF, progress)
    error, where = largest_difference(resumed.state, whole.state)
    without = lab.job(Sentences(), schedule=SCHEDULE, **BY_TOKENS).train(1)
    assert without.losses[0] != whole.losses[0]  # else dropout was off
    return Measured(error=error + (resumed.losses != whole.losses[HALF:]), bound=EXACT, note=where)


CASES: dict[str, Callable[[Lab], Measured]] = {
    "whole": partial(compared, problem=Sentences()),
    "partitions": partial(compared, problem=Sentences(rows=26), micro_batch_size=1),
    "by-tokens": partial(compared, problem=Sentences(rows=26), **BY_TOKENS),
    "weighted-items": partial(compared, problem=Sentences(weighted=True)),
    "ranks-without-rows": partial(compared, problem=Sentences(rows=1)),
    "tied-parameters": partial(compared, problem=Sentences(tied=True)),
    "bf16": partial(compared, problem=Sentences(), bound=BF16, precision="bf16"),
    "recomputed": partial(compared, problem=Sentences(), gradient_checkpointing=True),
    "clip-by-both": partial(
        compared, problem=Sentences(), clip={"norm": 0.05, "value": 5e-3}, micro_batch_size=1
    ),
    "schedule": partial(compared, problem=Sentences(), schedule=SCHEDULE),
    "every-size": every_size,
    "into-single": into_single,
    "from-single": from_single,
    "bit-for-bit": bit_for_bit,
}
QUICK = ("clip-by-both", "every-size", "into-single", "from-single")
OTHERS = tuple(sorted(CASES.keys() - QUICK))


@cache
def findings(names: tuple[str, ...]):
    """By case, from one launch."""
    cases = tuple(Case("gradient", name, "", CASES[name]) for name in names)
    config = RunConfig(strategy="mesh", strategy_options={"cp": 2}, nproc=2)
    return {
        finding.case: finding
        for finding in STRATEGIES.measure_all([Subject(config=config, cases=cases)])[0]
    }


@pytest.mark.parametrize("case", QUICK)
def test_a_law_holds_with_cp(case):
    finding = findings(QUICK)[case]
    assert finding.held, str(finding)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_a_slow_law_holds_with_cp(case):
    finding = findings(OTHERS)[case]
    assert finding.held, str(finding)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_causal_lm_goes_from_cp_to_ddp_and_back(tmp_path):
    rows = [
        {"prompt": f"after {row}", "completion": f" comes {row + 1}" + " and on" * (row % 5)}
        for row in range(60)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job: dict[str, Any] = {
        "task": "causal-lm",
        "global_batch_size": 12,
        "micro_batch_size": 3,
        "lr": 0.01,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
        "task_options": {
            "data": str(tmp_path / "rows.jsonl"),
            "model": "llama-tiny",
            "max_seq_len": 24,
            "dropout": 0.0,
            "tokenizer": {"vocab_size": 330},
        },
    }
    whole = train(RunConfig(**job, max_steps=6, out=str(tmp_path / "whole")))
    ways: list[dict[str, Any]] = [{"cp": 2}, {}, {"cp": 2}]
    for number, options in enumerate(ways, 1):
        going_on: dict[str, Any] = (
            {"resume": "auto", "resume_changed": ["total_steps"]} if number > 1 else {}
        )
        strategy = {
            "strategy": "mesh" if options else "ddp",
            "strategy_options": options,
            "nproc": 2,
        }
        config = RunConfig(
            **job, **strategy, **going_on, max_steps=2 * number, out=str(tmp_path / "chain")
        )
        report = train(config)
    assert losses_of_steps(tmp_path / "chain") == pytest.approx(
        losses_of_steps(tmp_path / "whole"), rel=1e-5
    )
    assert report["evaluation"]["evaluated"] == whole["evaluation"]["evaluated"]
    assert report["evaluation"]["loss"] == pytest.approx(whole["evaluation"]["loss"], rel=1e-5)


def losses_of_steps(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
