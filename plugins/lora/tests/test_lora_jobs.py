"""A run with LoRA leaves checkpoints of the adapter alone, which know their base, and
folders that others read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import distcore
from distcore import load_config
from distcore.checkpoint import Checkpoint
from distcore.cli.main import main

pytestmark = [pytest.mark.programs, pytest.mark.needs("distcore-tasks", "distcore-workbench")]

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
TRAINING = (
    "--lora 2 --max-seq-len 16 --lr 0.02 --global-batch-size 16 --set schedule.name=constant"
    " --log-every 1 --set extensions.progress=false --set device=cpu"
)


def base_folder(folder: Path, tokenizer: Path, seed: int = 0) -> Path:
    """A BERT that has seen no class, and so has neither pooler nor head."""
    from distcore_tasks.shared.pretrained import load_tokenizer

    torch.manual_seed(seed)
    BertForMaskedLM(BertConfig(vocab_size=200, **SMALL)).save_pretrained(folder)
    load_tokenizer("the run's", tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``base`` and a ``run`` of four steps on it; not to be written to."""
    folder = tmp_path_factory.mktemp("lora")
    base_folder(folder / "base", run_folder)
    data = run_folder.parent / "rows.jsonl"
    assert train(folder, folder / "run", data, "--max-steps 4 --save-every 3 --dropout 0") == 0
    return folder


def train(folder: Path, out: Path, data: Path, flags: str) -> int:
    return main(f"train --model {folder}/base --data {data} {TRAINING} --out {out} {flags}".split())


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "copy")


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_a_checkpoint_holds_the_adapter_and_its_optimizer_alone(trained: Path) -> None:
    checkpoint = Checkpoint(newest(trained / "run"))
    weights = {name.partition("/")[2] for name in checkpoint if name.startswith("model/")}
    stepped = {
        name.partition("/")[2].rpartition("/")[0]
        for name in checkpoint
        if name.startswith("optimizer/")
    }
    assert weights == stepped
    assert all(
        ".lora_A." in name or ".lora_B." in name or ".modules_to_save." in name for name in weights
    )
    whole = {
        name.partition(".modules_to_save.")[0] for name in weights if ".modules_to_save." in name
    }
    assert whole == {"classifier", "bert.pooler.dense"}


@pytest.mark.parametrize(
    "command",
    [
        "train --model {0}/base --data {1} "
        + TRAINING
        + " --dropout 0 --max-steps 4 --out {0}/run --resume auto",
        "eval {0}/run",
        "checkpoint export {0}/run --to {0}/adapter",
    ],
)
def test_a_resume_on_another_base_is_refused(
    command: str, copy: Path, run_folder: Path, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base_folder(copy / "other", run_folder, seed=1)
    there = trained / "base" if "train" not in command else copy / "base"
    kept = trained / "kept"
    shutil.move(there, kept)
    try:
        shutil.copytree(copy / "other", there)
        assert main(command.format(copy, run_folder.parent / "rows.jsonl").split()) == 2
    finally:
        shutil.rmtree(there)
        shutil.move(kept, there)
    [*_, line] = capfd.readouterr().err.splitlines()
    assert "step-00000004: is an adapter of the weights in " in line
    assert "; give it the model that it was trained on" in line


def test_a_base_that_moved_is_known_by_its_content(copy: Path, run_folder: Path) -> None:
    (copy / "base").rename(copy / "elsewhere")
    assert main(["eval", f"{copy}/run", "--set", f"task_options.model={copy}/elsewhere"]) == 0
    data = run_folder.parent / "rows.jsonl"
    nothing_is_left = "--max-steps 4 --dropout 0 --resume auto"
    command = f"train --model {copy}/elsewhere --data {data} {TRAINING} --out {copy}/run"
    assert main(f"{command} {nothing_is_left}".split()) == 0


def one_after_another(file: Path, out: Path) -> None:
    """Train two steps under one strategy, and from its checkpoint a step under each of two
    others; in a rank.
    """
    changes = {"out": str(out), "nproc": 2, "micro_batch_size": "auto"}
    distcore.train(load_config(str(file), changes | {"strategy": "fsdp", "max_steps": 2}))
    changes |= {"resume": "auto", "resume_changed": ["total_steps"]}
    # The ranks of a layer train on the same rows, and each computes them without a token joined
    # to another row's.
    split = {"strategy": "mesh", "strategy_options": {"tp": 2}, "padding_free": "off"}
    distcore.train(load_config(str(file), changes | split | {"max_steps": 3}))
    distcore.train(load_config(str(file), changes | {"strategy": "ddp"}))


@pytest.mark.ranks
def test_an_adapter_goes_on_under_other_strategies(trained: Path, tmp_path: Path) -> None:
    """``fsdp`` and ``mesh`` read slices of the base from the folder, which lacks the
    pooler and the head.
    """
    distcore.launch(one_after_another, trained / "run/config.yaml", tmp_path / "run", nproc=2)
    assert losses(tmp_path / "run") == pytest.approx(losses(trained / "run"), rel=1e-5)
    assert list(Checkpoint(newest(tmp_path / "run"))) == list(Checkpoint(newest(trained / "run")))


@pytest.mark.slow
def test_a_base_of_random_weights_is_known_by_its_recipe_and_exported_beside_the_adapter(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForSequenceClassification

    data = run_folder.parent / "rows.jsonl"
    command = f"train --model bert-tiny --data {data} {TRAINING} --out {tmp_path}/run"
    assert main([*command.split(), "--max-steps", "2"]) == 0
    rows = ["--data", str(data), "--out", f"{tmp_path}/predicted.jsonl"]
    assert main(["predict", f"{tmp_path}/run", *rows, "--set", "seed=1"]) == 2
    assert "is an adapter of a BertForSequenceClassification of seed 0 (" in capfd.readouterr().err
    assert main(["checkpoint", "export", f"{tmp_path}/run", "--to", f"{tmp_path}/adapter"]) == 0
    model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    saved = Checkpoint(newest(tmp_path / "run"))
    name = "bert.encoder.layer.0.attention.self.query.lora_B.default.weight"
    weights = dict(model.named_parameters())
    assert torch.equal(weights[f"base_model.model.{name}"], saved[f"model/{name}"])
    assert (tmp_path / "adapter/base/model.safetensors").is_file()


@pytest.mark.slow
def test_dropout_of_the_adapter_is_seeded_and_goes_on_where_it_was(
    trained: Path, run_folder: Path, tmp_path: Path
) -> None:
    data, dropout = (
        run_folder.parent / "rows.jsonl",
        "--dropout 0 --set lora.dropout=0.5 --max-steps",
    )
    assert train(trained, tmp_path / "a", data, f"{dropout} 4") == 0
    assert train(trained, tmp_path / "b", data, f"{dropout} 2") == 0
    assert (
        train(
            trained, tmp_path / "b", data, f"{dropout} 4 --resume auto --resume-changed total_steps"
        )
        == 0
    )
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    without = losses(trained / "run")
    assert losses(tmp_path / "a")[0] != without[0] or losses(tmp_path / "a")[1] != without[1]


@pytest.mark.slow
def test_activations_that_are_computed_again_change_nothing(
    trained: Path, run_folder: Path, tmp_path: Path
) -> None:
    flags = "--dropout 0 --max-steps 4 --set gradient_checkpointing=true"
    assert train(trained, tmp_path / "run", run_folder.parent / "rows.jsonl", flags) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(trained / "run"), rel=1e-6)


def test_a_run_that_has_all_its_weights_has_nothing_to_merge(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["checkpoint", "export", str(run_folder), "--to", str(tmp_path / "model"), "--merged"]
    assert main(command) == 2
    assert (
        "--merged is for a run with --lora; this one has all its weights already"
        in capfd.readouterr().err
    )


def in_several_files(base: Path) -> Path:
    """Save a base again as files of at most some KiB, with an index, as large models come."""
    model = BertForMaskedLM.from_pretrained(base)
    model.save_pretrained(base, max_shard_size="40KB")
    (base / "model.safetensors").unlink(missing_ok=True)
    assert len(list(base.glob("model-*.safetensors"))) > 2
    return base


@pytest.mark.parametrize(
    ("adapts", "way"),
    [
        ("--lora 2", "--micro-batch-size 4"),
        pytest.param("--lora 2", "--strategy fsdp --nproc 2", marks=pytest.mark.ranks),
        pytest.param("", "--strategy fsdp --nproc 2", marks=pytest.mark.ranks),
    ],
)
def test_first_steps_from_a_folder_in_several_files_are_proved(
    adapts: str, way: str, copy: Path, run_folder: Path
) -> None:
    """``fsdp`` reads slices of them, and the copy that its first steps are compared with is
    whole.
    """
    in_several_files(copy / "base")
    flags = f"{TRAINING.replace('--lora 2', adapts)} --max-steps 3 --prove on {way}"
    data = run_folder.parent / "rows.jsonl"
    command = f"train --model {copy}/base --data {data} --out {copy}/proved {flags}"
    assert main(command.split()) == 0
    proof = json.loads((copy / "proved/report.json").read_text())["proof"]
    assert (proof["steps"], proof["why"]) == (2, "")
    assert max(proof[figure] for figure in ("loss", "norm")) < 1e-5
