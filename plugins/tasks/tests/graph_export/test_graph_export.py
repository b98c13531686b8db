"""Exports as a graph answer as ``distcore predict`` does, in the programs that they are
for, by the card's code.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distcore.cli.main import main

ROWS = 200
FORMATS = ("onnx", "torch-export")


def scores_by_card(folder: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Run the code of the card on ``texts``; the scores, as it computes them."""
    monkeypatch.chdir(folder.parent)
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"texts": texts}
    exec(code.replace('["a text"]', "texts"), names)
    return np.asarray(torch.as_tensor(names["scores"]).detach().float())


def exported(run: Path, to: Path, *flags: str) -> Path:
    assert main(["checkpoint", "export", str(run), "--to", str(to), *flags]) == 0
    return to


@pytest.fixture(scope="module")
def predicted(
    run_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], np.ndarray, list[str]]:
    """Texts, the probabilities that predict gives them, and the names of the
    classes in their order.
    """
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("predicted")
    texts = [f"{'good' if row % 3 else 'bad'} {row} " * (1 + row % 7) for row in range(ROWS)]
    (folder / "new.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert (
        main(f"predict {run_folder} --data {folder}/new.jsonl --out {folder}/lines.jsonl".split())
        == 0
    )
    lines = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    names = json.loads((run_folder / "labels.json").read_text())
    return texts, np.array([[line["scores"][name] for name in names] for line in lines]), names


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


@pytest.mark.programs
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "most"), [("fp32", 2e-5), pytest.param("fp16", 5e-3, marks=pytest.mark.slow)]
)
def test_a_graph_answers_as_predict_does_on_200_rows(
    run_folder: Path,
    predicted: Any,
    tmp_path: Path,
    monkeypatch: Any,
    form: str,
    dtype: str,
    most: float,
) -> None:
    texts, expected, names = predicted
    model = exported(run_folder, tmp_path / "model", "--format", form, "--dtype", dtype)
    assert list(json.loads((model / "config.json").read_text())["label2id"]) == names
    scores = softmax(scores_by_card(model, texts, monkeypatch))
    assert scores.shape == expected.shape
    assert np.abs(scores - expected).max() < most
    certain = np.abs(expected[:, 0] - expected[:, 1]) > 2 * most
    assert (scores.argmax(1) == expected.argmax(1))[certain].all()
    assert certain.mean() > 0.8 or dtype != "fp32"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that told which text of a pair is the second one: without token types it could not."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"text": "a b", "text_pair": "b a", "label": n % 2} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = (
        f"train --data {folder}/rows.jsonl --text-pair-column text_pair --model bert-tiny"
        " --max-steps 1"
    )
    assert main([*job.split(), "--eval-every", "0", "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.mark.programs
@pytest.mark.parametrize(
    ("form", "data"), [("onnx", "there"), ("torch-export", "there"), ("torch-export", "moved")]
)
def test_a_graph_takes_the_token_types_that_the_run_used(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, data: str
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if form == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    rows = pairs.parent / "rows.jsonl"
    if data == "moved":
        rows.rename(pairs.parent / "moved.jsonl")
    try:
        graph = exported(pairs, tmp_path / "graph", "--format", form)
    finally:
        if data == "moved":
            (pairs.parent / "moved.jsonl").rename(rows)
    card = (graph / "README.md").read_text()
    assert (
        "its loss on 4 evaluation rows is"
        if data == "there"
        else "it answers drawn inputs as the model"
    ) in card
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert '["a text"], ["its pair"]' in code
    names: dict[str, Any] = {}
    exec(code, names)
    whole = exported(pairs, tmp_path / "whole")
    model: Any = AutoModelForSequenceClassification.from_pretrained(whole).eval()
    inputs = AutoTokenizer.from_pretrained(whole)(["a text"], ["its pair"], return_tensors="pt")
    assert inputs["token_type_ids"].max() == 1
    with torch.no_grad():
        expected = model(**inputs).logits
        without = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits
    scores = torch.as_tensor(np.asarray(torch.as_tensor(names["scores"]).detach()))
    assert (scores - expected).abs().max() < 1e-5
    assert (without - expected).abs().max() > 1e-4


@pytest.mark.programs
def test_a_graph_of_images_is_traced_at_the_size_of_the_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (24, 40, 40, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(24) % 2)
    job = (
        f"train --task image-classification --model resnet-tiny --data {tmp_path}/images.npz"
        " --max-steps 1"
    )
    assert main([*job.split(), "--eval-every", "0", "--out", str(tmp_path / "run")]) == 0
    graph = exported(tmp_path / "run", tmp_path / "graph", "--format", "torch-export")
    assert "Read back by torch.export, its loss on " in (graph / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.programs
def test_a_graph_has_the_adapter_merged_and_no_folder_of_this_machine(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("peft")
    data = run_folder.parent / "rows.jsonl"
    job = (
        f"train --data {data} --model bert-tiny --lora 2 --lr 0.1 --max-steps 4 --out"
        f" {tmp_path}/run"
    )
    assert main(job.split()) == 0
    from transformers import AutoModelForSequenceClassification

    whole = exported(tmp_path / "run", tmp_path / "whole", "--merged")
    model = AutoModelForSequenceClassification.from_pretrained(whole).eval()
    ids = torch.tensor([[2, 5, 6, 3]])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    program = exported(tmp_path / "run", tmp_path / "graph", "--format", "torch-export")
    graph = torch.export.load(program / "model.pt2").module()
    assert torch.allclose(
        graph(input_ids=ids, attention_mask=torch.ones_like(ids)), expected, atol=1e-6
    )
    onnx = exported(tmp_path / "run", tmp_path / "onnx", "--format", "onnx")
    package = str(Path(torch.__file__).parents[1]).encode()
    assert all(
        package not in file.read_bytes() for folder in (program, onnx) for file in folder.iterdir()
    )


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.parametrize(
    "job",
    [
        "causal-lm",
        "image-classification --model resnet-tiny",
        "token-classification",
        "masked-lm",
        "embedding",
    ],
)
def test_graphs_of_other_tasks_have_the_scores_of_the_model_that_transformers_loads(
    job: str, tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    import transformers

    assert (
        main(f"train --task {job} --max-steps 2 --eval-every 0 --out {tmp_path}/run".split()) == 0
    )
    whole = exported(tmp_path / "run", tmp_path / "whole")
    [kind] = json.loads((whole / "config.json").read_text())["architectures"]
    model = getattr(transformers, kind).from_pretrained(whole).eval()
    folders = {
        form: exported(tmp_path / "run", tmp_path / form, "--format", form) for form in FORMATS
    }
    graph = torch.export.load(folders["torch-export"] / "model.pt2").module()
    session = onnxruntime.InferenceSession(folders["onnx"] / "model.onnx")
    settings = whole / "preprocessor_config.json"
    side = json.loads(settings.read_text())["size"]["height"] if settings.is_file() else 0
    inputs = inputs_of(model, ROWS, side)
    with torch.no_grad():
        expected = model(**inputs)[0]
        assert torch.equal(graph(**inputs), expected)
    [scores] = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    assert np.abs(scores - expected.numpy()).max() < 2e-5 * expected.abs().max()
    assert (scores.argmax(-1) == expected.numpy().argmax(-1)).mean() >= 0.995


def inputs_of(model: Any, rows: int, side: int = 0) -> dict[str, torch.Tensor]:
    """Random images of this height and width, or random tokens of which a part is padding."""
    chance = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        return {
            "pixel_values": torch.randn(
                rows, model.config.num_channels, side, side, generator=chance
            )
        }
    tokens = torch.randint(5, model.config.vocab_size, (rows, 19), generator=chance)
    lengths = torch.randint(1, 20, (rows, 1), generator=chance)
    return {"input_ids": tokens, "attention_mask": (torch.arange(19) < lengths).long()}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--format onxn",
            "no exporter named 'onxn' (installed: ",
        ),
        (
            "--format onnx --dtype bf16",
            "--dtype bf16: onnxruntime computes with fp32 and fp16; name one of these",
        ),
    ],
)
def test_a_graph_that_cannot_be_exported_is_one_line_and_leaves_nothing(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: str, says: str
) -> None:
    pytest.importorskip("onnxscript")
    command = ["checkpoint", "export", str(run_folder), "--to", str(tmp_path / "model")]
    command += flags.split()
    assert main(command) == 2
    assert says in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "model").exists()


@pytest.mark.programs
def test_a_model_of_two_passes_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"source": "a b", "target": "b a"}\n' * 40)
    job = (
        f"train --task seq2seq --data {tmp_path}/rows.jsonl --max-seq-len 16 --max-steps 1 --out"
        f" {tmp_path}/run"
    )
    assert main(job.split()) == 0
    command = ["checkpoint", "export", f"{tmp_path}/run", "--to", f"{tmp_path}/model"]
    command += ["--format", "torch-export"]
    assert main(command) == 2
    says = (
        "error: --format torch-export: takes models of transformers that read tokens or images in"
        " one pass, not a "
    )
    assert capfd.readouterr().err.splitlines()[-1].startswith(says)
