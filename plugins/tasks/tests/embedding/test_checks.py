"""Bad input is refused in one line; folders of sentence-transformers say their pooling."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distcore import ModelError, RunConfig
from distcore.cli.main import main
from distcore_tasks.embedding.models import check_model
from distcore_tasks.embedding.modules import check_modules
from distcore_tasks.embedding.task import Embedding

ROW = {"anchor": "a question", "positive": "an answer", "negative": "another answer"}


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["train", "--task", "embedding", "--device", "cpu", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    ("rows", "words", "says"),
    [
        ([{"anchor": "a"}] * 2, [], "positive"),
        (
            [ROW, ROW | {"positive": " "}],
            [],
            "row 2: positive is empty: fill it in or remove the row",
        ),
        ([ROW, ROW | {"anchor": 3}], [], "row 2: anchor is an integer (3), expected a string"),
        (
            [ROW, ROW, ROW | {"negative": None}],
            ["--negative-column", "negative"],
            "row 3: negative is missing (null), expected a string",
        ),
        ([ROW] * 3, ["--negative-column", "other"], "other"),
        ([ROW], [], "holds one row, so none is left for evaluation"),
        (
            [ROW] * 3,
            ["--dims", "129,64"],
            "dims = [129, 64]: an embedding of bert-tiny has 128 numbers; use at most 128",
        ),
        ([ROW] * 3, ["--dims", "64,64"], "dims = [64, 64]: names a size twice"),
        (
            [ROW] * 3,
            ["--global-batch-size", "1"],
            "global_batch_size = 1: the negatives of a row are the others",
        ),
        ([ROW] * 3, ["--scale", "0"], "scale"),
        ([ROW] * 3, ["--pooling", "max"], "pooling"),
    ],
)
def test_bad_input_is_one_line(
    rows: list[Any],
    words: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert says in error_of(["--data", "rows.jsonl", *words], capsys)


def test_the_embedded_rows_have_no_negatives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "dataset stdlib-search: has no negatives" in error_of(
        ["--negative-column", "negative"], capsys
    )


def test_sizes_without_the_whole_one_are_said() -> None:
    small: dict[str, Any] = {"data": str(Path(__file__).with_name("triplets.jsonl"))}
    said = [
        Embedding(**small, dims=dims).prepare(RunConfig()).warnings
        for dims in ((64, 32), (128, 64))
    ]
    assert said == [
        ("dims = [64, 32]: whole embeddings, of 128 numbers, are not trained as such; add 128",),
        (),
    ]


def folder_with(folder: Path, kinds: list[str], pooling: dict[str, object]) -> Embedding:
    from transformers import BertConfig, BertModel

    from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

    shape: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    BertModel(BertConfig(**shape, intermediate_size=16)).save_pretrained(folder)
    as_transformers(train_wordpiece(["a few words"], 64)).save_pretrained(folder)
    modules = [
        {
            "path": "" if kind == "Transformer" else kind,
            "type": f"sentence_transformers.models.{kind}",
        }
        for kind in kinds
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "Pooling").mkdir()
    (folder / "Pooling/config.json").write_text(json.dumps(pooling))
    return Embedding(model=str(folder))


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"word_embedding_dimension": 16}, "mean"),
    ],
)
def test_a_folder_says_its_pooling(pooling: dict[str, object], mode: str, tmp_path: Path) -> None:
    assert folder_with(tmp_path, ["Transformer", "Pooling"], pooling).pools == mode


def test_a_folder_with_other_parts_is_refused(tmp_path: Path) -> None:
    dense = folder_with(
        tmp_path / "dense", ["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"}
    )
    with pytest.raises(
        ModelError, match="its embeddings pass a module Dense, which this task does not have"
    ):
        check_modules("m", Path(dense.model))
    with pytest.raises(ModelError, match="its embeddings pass a module Dense"):
        check_model(replace(dense, pooling="cls"))  # another pooling leaves no module out
    foreign = [{"type": "modeling_mine.Transformer", "path": ""}]
    Path(dense.model, "modules.json").write_text(json.dumps(foreign))
    with pytest.raises(
        ModelError, match=r"its embeddings pass a module modeling_mine.Transformer, which"
    ):
        check_modules("m", Path(dense.model))
    both = folder_with(
        tmp_path / "both", ["Transformer", "Pooling"], {"pooling_mode": ["mean", "max"]}
    )
    with pytest.raises(ModelError, match="pools by mean, max; --pooling mean or cls"):
        _ = both.pools


def test_a_decoder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_with(tmp_path / "model", ["Transformer"], {})
    config = json.loads((tmp_path / "model/config.json").read_text())
    for change, says in (
        ({"model_type": "gpt2"}, "gpt2 is not an encoder"),
        ({"is_encoder_decoder": True}, "is not an encoder, but an encoder with a decoder"),
    ):
        (tmp_path / "model/config.json").write_text(json.dumps(config | change))
        assert says in error_of(["--model", str(tmp_path / "model"), "--max-seq-len", "16"], capsys)
