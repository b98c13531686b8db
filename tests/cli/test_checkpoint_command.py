"""``distcore checkpoint``: what it prints, its exit status, and an
export that transformers loads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_cases import state, write
from work_folder import write_rows

from distcore.checkpoint import Checkpoint
from distcore.cli.main import main
from distcore.jobs.export import fill
from distcore.plugin.strategy.state import State

pytestmark = pytest.mark.needs("distcore-tasks")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A trained tiny BERT with checkpoints after steps 2 and 3; its data and all that was made
    of them are gone.
    """
    folder = tmp_path_factory.mktemp("trained")
    rows = write_rows(folder)
    flags = (
        "--model bert-tiny --global-batch-size 8 --max-steps 3 --save-every 2 --set"
        " extensions.progress=false"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTCORE_CACHE", str(folder / "cache"))
        command = ["train", "--data", str(rows), "--out", str(folder / "run"), *flags.split()]
        assert main(command) == 0
        rows.unlink()
        shutil.rmtree(folder / "cache")
        yield folder / "run"


def test_ls_has_a_line_for_each(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(run_folder)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step-00000002  epoch 0  samples 16  ")
    assert second.startswith("step-00000003  epoch 0  samples 24  ")
    assert "MiB  best loss" in second


def test_verify_names_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        write(tmp_path / "checkpoints", [state(1.0)], step)
    file = tmp_path / "checkpoints/step-00000002/model-00000-000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step-00000001  whole"
    assert second == f"step-00000002  {file}: damaged: its SHA-256 is not the one in the manifest"


def test_diff_names_the_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (
        write(tmp_path, [state(1.0)], 1),
        write(tmp_path, [state(1.0) | {"model/weight": torch.zeros(40)}], 2),
    )
    assert main(["checkpoint", "diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "0 of 2 tensors differ\n"
    assert main(["checkpoint", "diff", str(one), str(other)]) == 1
    assert (
        "model/weight  largest difference 1, relative 1\n1 of 2 tensors differ"
        in capsys.readouterr().out
    )


def test_diff_is_a_summary_of_the_worst_unless_all_are_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors: list[State] = [
        {f"model/layer.{number}": torch.full((3,), 1.0 + number * moved) for number in range(8)}
        for moved in (0, 1)
    ]
    paths = [str(write(tmp_path, [state], step)) for step, state in enumerate(tensors)]
    assert main(["checkpoint", "diff", *paths]) == 1
    *worst, last = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in worst] == [
        f"model/layer.{number}" for number in (7, 6, 5, 4, 3)
    ]
    assert last == "7 of 8 tensors differ; the 5 that differ most are above, --all shows each"
    assert main(["checkpoint", "diff", *paths, "--all"]) == 1
    *every, last = capsys.readouterr().out.splitlines()
    assert (len(every), last) == (7, "7 of 8 tensors differ")


def test_an_export_loads_in_transformers_and_computes_the_same(
    run_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert main(["checkpoint", "export", str(run_folder), "--to", str(tmp_path / "hf")]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    saved = Checkpoint(run_folder / "checkpoints/step-00000003")
    assert all(
        torch.equal(value, saved[f"model/{name}"]) for name, value in model.named_parameters()
    )
    assert model(**tokenizer(["good text"], return_tensors="pt")).logits.shape == (1, 2)
    assert model.config.id2label == {0: "0", 1: "1"}
    assert not list((tmp_path / "hf").glob("*/"))  # nothing else of the run folder came along


def test_an_export_of_a_step_has_its_weights(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    command = ["checkpoint", "export", str(run_folder), "--step", "2", "--to", str(tmp_path / "hf")]
    assert main(command) == 0
    assert (
        "exporting step-00000002; the best by loss is step-00000003: --best\n"
        in capsys.readouterr().err
    )
    saved = Checkpoint(run_folder / "checkpoints/step-00000002")
    exported = load_file(tmp_path / "hf/model.safetensors")
    assert torch.equal(exported["classifier.weight"], saved["model/classifier.weight"])


def test_an_export_needs_the_data_where_there_is_no_run_folder(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_folder / "checkpoints/step-00000003", tmp_path / "alone")
    command = ["checkpoint", "export", str(tmp_path / "alone"), "--to", str(tmp_path / "hf")]
    assert main(command) == 2
    assert "rows.json: no such file" in capsys.readouterr().err


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    shape = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    trained, fresh = BertForMaskedLM(shape), BertForMaskedLM(shape)
    tensors: State = {f"model/{name}": value.detach() for name, value in trained.named_parameters()}
    fill(fresh, Checkpoint(write(tmp_path, [tensors])))
    fresh.save_pretrained(tmp_path / "hf")
    loaded = BertForMaskedLM.from_pretrained(tmp_path / "hf")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    embedding = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(
        dict(loaded.named_parameters())[embedding], dict(trained.named_parameters())[embedding]
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("ls nowhere", "nowhere: no checkpoints there"),
        ("verify nowhere", "nowhere: no checkpoints there"),
        ("diff nowhere", "checkpoint diff: expected 2 path(s), found 1"),
        ("export nowhere", "checkpoint export: needs --to DIR"),
        ("ls nowhere --to x", "checkpoint ls: takes no --to DIR"),
        (
            "export nowhere --to x",
            "nowhere: no such folder; expected a run folder or a folder step-NNNNNNNN",
        ),
        ("export run --to x --step 1", "run: no checkpoint of step 1 (there are: 2, 3)"),
        ("export run --to x --step 2 --best", "--best: not allowed with argument --step"),
        (
            "export run/checkpoints/step-00000002 --to x --best",
            "is a checkpoint; --best and --step choose one of a",
        ),
        ("ls run --step 2", "checkpoint ls: --step belongs to export"),
        ("ls run --all", "checkpoint ls: --all belongs to diff"),
        ("verify run --best", "checkpoint verify: --best belongs to export"),
        ("export run --to .", "--to .: already exists and is not empty"),
    ],
)
def test_bad_input_is_one_line(
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    line: str,
) -> None:
    monkeypatch.chdir(run_folder.parent)
    assert main(["checkpoint", *arguments.split()]) == 2
    assert line in capsys.readouterr().err
