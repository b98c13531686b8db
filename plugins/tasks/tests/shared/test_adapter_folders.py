"""A model folder with an adapter of peft, alone or beside weights, is refused, under
every strategy and task.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from distcore import ModelError, RunConfig
from distcore.cli.main import main
from distcore_tasks.shared.pretrained import model_folder

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A folder with whole weights and an adapter, as some trainers save it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SMALL))
    model.save_pretrained(tmp_path / "both")
    (tmp_path / "both/vocab.txt").write_text("[PAD]\n[UNK]\n")
    settings = peft.LoraConfig(
        r=2, target_modules=["query"], base_model_name_or_path="bert-of-before"
    )
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "both")
    return tmp_path / "both"


def test_an_adapter_beside_weights_is_refused(both: Path) -> None:
    with pytest.raises(ModelError) as error:
        model_folder(str(both), ())
    assert str(error.value).startswith(
        f"model {both}: an adapter of peft (adapter_config.json, LORA) lies beside the weights, and"
        " belongs to them for transformers; merge it (merge_and_unload of peft, or distcore"
        " checkpoint export RUN --merged)"
    )
    (both / "adapter_config.json").unlink()
    assert model_folder(str(both), ()) == both


def test_an_adapter_alone_is_refused_with_the_name_of_its_base(both: Path) -> None:
    settings = both / "adapter_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"base_model_name_or_path": "bert-of-before"})
    )
    (both / "model.safetensors").unlink()
    with pytest.raises(
        ModelError,
        match=r"is an adapter of peft .* without the weights of its base, bert-of-before; me",
    ):
        model_folder(str(both), ())


@pytest.mark.parametrize("strategy", ["single", "fsdp --nproc 2"])
def test_the_refusal_comes_before_ranks_start(
    both: Path, tmp_path: Path, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n' * 8
    )
    job = (
        f"train --data {tmp_path}/rows.jsonl --model {both} --strategy {strategy} --out"
        f" {tmp_path}/run"
    )
    assert main(job.split()) == 2
    [*_, line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: model {both}: an adapter of peft")
    assert "--lora RANK" in line
    assert not (tmp_path / "run").exists()
    assert RunConfig().lora.rank is None
