"""An export works in transformers as it is, and answers as ``distcore predict`` does; a full
disk is one line.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from distcore import load_config
from distcore.cli.main import main
from distcore.lab import resolve

LONG = "good text " * 400
"""More tokens than the model has positions."""


@pytest.mark.programs
def test_a_pipeline_answers_as_predict_does_also_for_texts_that_are_too_long(
    run_folder: Path, tmp_path: Path
) -> None:
    from transformers import pipeline

    assert main(["checkpoint", "export", str(run_folder), "--to", str(tmp_path / "model")]) == 0
    texts = [LONG, "bad 3"]
    (tmp_path / "new.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    assert (
        main(
            f"predict {run_folder} --data {tmp_path}/new.jsonl --out {tmp_path}/lines.jsonl".split()
        )
        == 0
    )
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]

    classify: Any = pipeline("text-classification", str(tmp_path / "model"))
    assert (
        len(classify.tokenizer(LONG)["input_ids"]) > classify.model.config.max_position_embeddings
    )
    for batch_size in (1, 2):  # two rows of unlike length need the padding token
        answers = classify(texts, truncation=True, batch_size=batch_size)
        assert [answer["label"] for answer in answers] == [line["prediction"] for line in lines]
        expected = [line["scores"][line["prediction"]] for line in lines]
        assert [answer["score"] for answer in answers] == pytest.approx(expected, abs=2e-5)
    assert set(classify.model.config.id2label.values()) == {"good", "bad"}


def test_a_full_disk_is_one_line_and_leaves_nothing(
    run_folder: Path, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (small_disk / "ballast").write_bytes(bytes(1_500_000))
    assert main(["checkpoint", "export", str(run_folder), "--to", str(small_disk / "model")]) == 2
    _, error = capfd.readouterr().err.splitlines()
    assert error.startswith(f"error: --to {small_disk}/model: cannot be written: ")
    assert "No space left on device" in error
    assert os.listdir(small_disk) == ["ballast"]


def test_the_card_says_what_was_trained_and_nothing_of_this_machine(
    run_folder: Path, tmp_path: Path
) -> None:
    command = ["checkpoint", "export", str(run_folder), "--to", str(tmp_path / "model")]
    command += ["--step", "5"]
    assert main(command) == 0
    assert main(["checkpoint", "export", str(run_folder), "--to", str(tmp_path / "last")]) == 0
    card, last = (str(ModelCard.load(tmp_path / name / "README.md")) for name in ("model", "last"))
    assert "trained with distcore for 5 optimizer steps" in card
    assert "| loss |" not in card  # no evaluation after that step
    metrics = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    *_, loss = [line["eval/loss"] for line in metrics if "eval/loss" in line]
    assert f"| loss | {loss:.4g} |" in last
    assert re.search(
        r"by transformers, its loss on 8 evaluation rows is (\d\.\d+); that of the run is \1\.",
        last,
    )
    assert "- training: rows.jsonl, 108 rows" in last
    assert str(run_folder.parent) not in last
    assert f"torch {version('torch')}" in last
    (tmp_path / "config.yaml").write_text(last.split("```yaml\n")[1].split("```")[0])
    again, there = (
        load_config(str(folder / "config.yaml"), {}) for folder in (tmp_path, run_folder)
    )
    resolved = resolve(again).config
    assert resolved.task_options | {"data": ""} == there.task_options | {"data": ""}
    rest: dict[str, Any] = {"task_options": {}, "padding_free": "auto", "out": None}
    rest["schedule"] = there.schedule  # with its warm-up in steps
    assert resolved.model_copy(update=rest) == there.model_copy(update=rest)


def test_the_card_has_what_differs_from_the_defaults_and_no_more(
    run_folder: Path, tmp_path: Path
) -> None:
    assert main(["checkpoint", "export", str(run_folder), "--to", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model/README.md").read_text()
    assert yaml.safe_load(card.split("```yaml\n")[1].split("```")[0]) == {
        "task": "text-classification",
        "task_options": {"model": "bert-tiny", "data": "rows.jsonl"},
        "max_steps": 6,
        "schedule": {"name": "constant"},
        "save_every": 5,
        "checkpoints": {"keep_last": 3},
    }


def test_the_card_says_how_to_load_the_model(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["checkpoint", "export", str(run_folder), "--to", str(tmp_path / "model")]) == 0
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec((tmp_path / "model/README.md").read_text().split("```python\n")[1].split("```")[0], names)
    tokens = names["tokenizer"]("good text", return_tensors="pt")
    assert names["model"](**tokens).logits.shape == (1, 2)


def test_a_card_names_the_pipeline_that_takes_the_model(run_folder: Path, tmp_path: Path) -> None:
    assert main(["checkpoint", "export", str(run_folder), "--to", str(tmp_path / "model")]) == 0
    data = ModelCard.load(tmp_path / "model/README.md").data
    assert (data.pipeline_tag, data.library_name, data.tags) == (
        "text-classification",
        "transformers",
        ["distcore"],
    )


def test_a_run_that_was_killed_within_a_line_is_exported(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "eval/lo')
    command = ["checkpoint", "export", str(tmp_path / "run"), "--to", str(tmp_path / "model")]
    assert main(command) == 0
    assert "| loss |" in (tmp_path / "model/README.md").read_text()


@pytest.mark.programs
def test_a_language_model_whose_tokenizer_could_not_pad_is_exported_with_one_that_does(
    tmp_path: Path,
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, pipeline

    words = ["<end>", "one", "two", "three", "four"]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<end>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapper: Any = PreTrainedTokenizerFast
    wrapper(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "small")
    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    shape = GPT2Config(vocab_size=len(words), n_embd=32, n_layer=1, n_head=2, n_positions=32, **ids)
    model: Any = GPT2LMHeadModel(shape)
    model.save_pretrained(tmp_path / "small")
    rows = [{"text": f"{words[1 + n % 4]} {words[1 + n // 4 % 4]}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = (
        f"--task causal-lm --data {tmp_path}/rows.jsonl --model {tmp_path}/small --max-seq-len 16"
        " --max-steps 1"
    )
    assert main(["train", *job.split(), "--out", str(tmp_path / "run")]) == 0
    command = ["checkpoint", "export", str(tmp_path / "run"), "--to", str(tmp_path / "model")]
    assert main(command) == 0
    generate: Any = pipeline("text-generation", str(tmp_path / "model"))
    assert generate.tokenizer.pad_token == "<end>"
    # rows of unlike length need padding
    answers = generate(["one", "two three"], batch_size=2, max_new_tokens=2)
    assert [answer["generated_text"].startswith(("one", "two three")) for (answer,) in answers] == [
        True,
        True,
    ]


def test_the_files_of_an_export_have_the_mode_that_the_umask_leaves(
    run_folder: Path, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        assert main(["checkpoint", "export", str(run_folder), "--to", str(tmp_path / "model")]) == 0
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "model").iterdir()} == {0o640}
