"""The load-balancing loss of a mixture of experts is that of transformers on the whole
global batch, however cut.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from distcore import ModelError, RunConfig, train
from distcore.errors import TaskError
from distcore_tasks.causal_lm import router
from distcore_tasks.causal_lm.router import COEFFICIENT, Router
from distcore_tasks.causal_lm.task import CausalLM

ROWS = [
    {"prompt": f"after {row}", "completion": f" comes {row + 1}" + " and on" * (row % 5)}
    for row in range(40)
]
SIZES: dict[str, Any] = {
    "vocab_size": 330,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.05,
    "num_local_experts": 4,
    "num_experts": 4,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("router") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(file)


def task_of(data: str, **options: Any) -> CausalLM:
    tokenizer: Any = {"vocab_size": 330}
    from distcore_tasks.causal_lm.options import Tokenizer

    settings: dict[str, Any] = {
        "model": "mixtral-tiny",
        "max_seq_len": 24,
        "tokenizer": Tokenizer(**tokenizer),
    }
    return CausalLM(data=data, **settings | options)


def gradient(model: nn.Module, loss: Any) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_loss_and_gradient_of_a_cut_batch_are_those_of_transformers_on_the_whole(
    kind: str, packing: Literal["off", "on"], data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(data)
    rows: Any = task.prepare(RunConfig(padding_free=packing)).train
    config: Any = AutoConfig.for_model(kind, **SIZES)
    monkeypatch.setattr(CausalLM, "router", lambda self: Router(4, 2, 0.05))
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config).train()
    assert rows.pads is (packing == "off")
    whole = (rows.padded() if packing == "on" else rows).batch(np.arange(12))
    answer = model(
        input_ids=whole["input_ids"], attention_mask=whole["attention_mask"], use_cache=False
    )
    labels = whole["labels"].flatten()
    expected = (
        cross_entropy(answer.logits.flatten(0, 1), labels, ignore_index=-100)
        + 0.05 * answer.aux_loss
    )
    wanted = gradient(model, expected)
    cuts = [task.embed(model, rows.batch(part)) for part in np.array_split(np.arange(12), 5)]
    every = {name: torch.cat([cut[name] for cut in cuts]) for name in cuts[0]}
    logged: dict[str, Tensor] = {}
    loss = task.batch_loss(
        every, torch.arange(12), lambda name, value: logged.update({name: value})
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logged["router"].item() == pytest.approx(answer.aux_loss.item(), rel=1e-6)
    assert float((gradient(model, loss) - wanted).norm() / wanted.norm()) <= 1e-5


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["ddp", "fsdp", "deepspeed:3", "mesh"])
def test_a_run_has_the_losses_of_one_process(way: str, data: str, tmp_path: Path) -> None:
    name, _, stage = way.partition(":")
    options = {"stage": int(stage)} if stage else {"shard": 2} if name == "mesh" else {}
    one = logged(data, tmp_path.parent)
    two = run(
        data, tmp_path / "run", strategy=name, nproc=2, strategy_options=options, micro_batch_size=2
    )
    for key in ("train/loss", "train/router", "train/grad_norm"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=2e-5)


@cache
def logged(data: str, folder: Path) -> list[dict[str, float]]:
    return run(data, folder / "router-alone", micro_batch_size=12)


def run(data: str, out: Path, **changes: Any) -> list[dict[str, float]]:
    options = {
        "data": data,
        "model": "mixtral-tiny",
        "max_seq_len": 24,
        "tokenizer": {"vocab_size": 330},
    }
    config: dict[str, Any] = {
        "task": "causal-lm",
        "task_options": options,
        "out": str(out),
        "max_steps": 3,
        "global_batch_size": 12,
        "lr": 0.01,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "optimizer": {"eps": 1e-2},
    }
    train(RunConfig.model_validate(config | changes))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def test_the_weight_is_the_models_own_unless_the_option_says_another(
    data: str, tmp_path: Path
) -> None:
    assert task_of(data).router_weight == COEFFICIENT
    assert task_of(data, router_loss=0.5).router_weight == 0.5
    for wanted, weight in ((True, 0.05), (False, 0.0)):
        folder = tmp_path / str(wanted)
        AutoConfig.for_model(
            "qwen3_moe", **SIZES | {"output_router_logits": wanted}
        ).save_pretrained(folder)
        assert router._router_of(folder) == Router(4, 2, weight)
    assert not task_of(data, router_loss=0.0).whole_batch
    assert not task_of(data, model="gpt2-tiny").whole_batch
    assert task_of(data, model="gpt2-tiny").logs == ()


def test_a_model_without_a_router_refuses_a_weight(data: str, tmp_path: Path) -> None:
    options = {"data": data, "model": "gpt2-tiny", "router_loss": 0.1}
    with pytest.raises(
        (ModelError, TaskError), match=r"^task_options.router_loss = 0.1: .* for model gpt2-tiny"
    ):
        train(
            RunConfig(
                task="causal-lm", task_options=options, out=str(tmp_path / "run"), device="cpu"
            )
        )
