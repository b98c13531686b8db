"""The export of a run with LoRA: a folder that peft loads, or the merged model, and a
card that says how.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    ResNetConfig,
    ResNetForImageClassification,
)

from distcore.cli.main import main
from distcore_tasks.image_classification.preprocessing import Preprocessing
from distcore_tasks.shared.pretrained import load_tokenizer

pytestmark = pytest.mark.programs

TRAINING = (
    "--lora 2 --max-seq-len 16 --lr 0.02 --global-batch-size 16 --max-steps 4 --dropout 0 "
    "--set schedule.name=constant --set extensions.progress=false --set device=cpu"
)


@pytest.fixture(scope="module")
def trained(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``base``, a BERT without pooler and head, and a ``run`` on it;
    not to be written to.
    """
    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=200, intermediate_size=48, **small)).save_pretrained(
        folder / "base"
    )
    load_tokenizer("the run's", run_folder).save_pretrained(folder / "base")
    job = (
        f"--model {folder}/base --data {run_folder.parent}/rows.jsonl {TRAINING} --out {folder}/run"
    )
    assert main(["train", *job.split()]) == 0
    return folder


def test_a_folder_for_peft_and_a_merged_one_answer_as_predict_does(
    trained: Path, run_folder: Path, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForSequenceClassification, PeftModel

    data = run_folder.parent / "rows.jsonl"
    assert main(f"predict {trained}/run --data {data} --out {tmp_path}/lines.jsonl".split()) == 0
    assert main(["checkpoint", "export", f"{trained}/run", "--to", f"{tmp_path}/adapter"]) == 0
    command = ["checkpoint", "export", f"{trained}/run", "--to", f"{tmp_path}/merged", "--merged"]
    assert main(command) == 0
    expected = [
        json.loads(line)["scores"] for line in (tmp_path / "lines.jsonl").read_text().splitlines()
    ]
    base = AutoModelForSequenceClassification.from_pretrained(trained / "base")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    models = (
        merged,
        AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=2),
        PeftModel.from_pretrained(base, str(tmp_path / "adapter")),
    )
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    tokens = AutoTokenizer.from_pretrained(tmp_path / "adapter")(
        texts, padding=True, return_tensors="pt"
    )
    for model in models:
        with torch.no_grad():
            scores = model.eval()(**tokens).logits.softmax(-1).tolist()
        for row, line in zip(scores, expected, strict=True):
            assert row == pytest.approx([line[merged.config.id2label[n]] for n in (0, 1)], abs=2e-6)
    with safe_open(tmp_path / "merged/model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "lora" in name or "base_layer" in name]  # noqa: SIM118


def test_the_card_of_an_adapter_says_how_to_load_it(trained: Path, tmp_path: Path) -> None:
    assert main(["checkpoint", "export", f"{trained}/run", "--to", f"{tmp_path}/adapter"]) == 0
    card = ModelCard.load(tmp_path / "adapter/README.md")
    assert (card.data.library_name, card.data.tags) == ("peft", ["distcore", "lora"])
    assert "It is a LoRA adapter, of rank 2 and alpha 4; `base` is its base:" in card.text
    assert str(trained) not in str(card)
    code = (
        card.text.split("```python\n")[1]
        .split("```")[0]
        .replace('"adapter"', repr(str(tmp_path / "adapter")))
    )
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert namespace["model"].config.num_labels == 2


def test_an_adapter_has_the_running_statistics_that_its_training_moved(tmp_path: Path) -> None:
    """The proof of the export computes the run's loss by peft, on the base
    whose statistics are others.
    """
    shape: Any = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"
    )
    torch.manual_seed(0)
    ResNetForImageClassification(shape).save_pretrained(tmp_path / "base")
    Preprocessing(16).save(tmp_path / "base")
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "i.npz",
        images=rng.integers(90, 256, (32, 16, 16, 3), dtype=np.uint8),
        labels=np.arange(32) % 2,
    )
    job = (
        f"train --task image-classification --data {tmp_path}/i.npz --model {tmp_path}/base --lora"
        " 2 --max-steps 4"
    )
    job += f" --set lora.targets=.*convolution --lr 0.01 --global-batch-size 8 --out {tmp_path}/run"
    assert main([*job.split(), "--set", "extensions.progress=false", "--set", "device=cpu"]) == 0
    assert main(["checkpoint", "export", f"{tmp_path}/run", "--to", f"{tmp_path}/adapter"]) == 0
    card = (tmp_path / "adapter/README.md").read_text()
    assert re.search(
        r"Read back by peft, its loss on \d evaluation rows is (\d\.\d+); that of the run is \1\.",
        card,
    )
    with safe_open(tmp_path / "adapter/adapter_model.safetensors", "pt") as file:
        moved = [name for name in file.keys() if name.endswith("running_mean")]  # noqa: SIM118
        assert moved
        assert all(file.get_tensor(name).abs().max() > 0 for name in moved)
