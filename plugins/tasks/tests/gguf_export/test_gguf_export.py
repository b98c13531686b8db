"""A GGUF file answers as ``distcore predict`` does, in llama.cpp and, where it has all
of a family, in transformers.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest
import torch
from config_keys import changes
from gguf_models import TEXTS
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from distcore import ConfigError
from distcore.cli.main import main
from distcore_tasks.gguf_export import families
from distcore_tasks.gguf_export.families import family_of, rope_factors
from distcore_tasks.gguf_export.file import write_gguf
from distcore_tasks.gguf_export.vocabulary import Vocabulary, vocabulary_of

ROOT = Path(__file__).parents[4]
PYTHON = ROOT / "build/gguf/bin/python"
"""Has llama-cpp-python, by ``make exports``."""


def written(name: str, folder: Path) -> tuple[Any, Path]:
    """The model ``name`` of transformers, and its file."""
    pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(gguf_models.make(name, folder)).eval()
    write_gguf(
        folder / "model.gguf",
        model,
        family_of(model),
        vocabulary_of(folder, model.config.vocab_size),
    )
    return model, folder / "model.gguf"


def by_llama_cpp(file: Path, texts: list[str], count: int = 0) -> list[dict[str, Any]]:
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}: make exports makes it")
    command = [str(PYTHON), str(ROOT / "tests/support/read_gguf.py"), str(file), str(count)]
    done = subprocess.run(
        command, input=json.dumps(texts), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


@pytest.mark.programs
@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_transformers_reads_the_weights_and_the_tokens_of_a_file(name: str, tmp_path: Path) -> None:
    model, file = written(name, tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    tokens = torch.randint(
        3, model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    ours, theirs = (
        AutoTokenizer.from_pretrained(file.parent, **more)
        for more in ({}, {"gguf_file": file.name})
    )
    assert [ours(text).input_ids for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]


@pytest.mark.programs
def test_norms_are_in_fp32_and_pieces_are_merged_by_their_numbers(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(gguf_models.make("llama", tmp_path)).half()
    write_gguf(
        tmp_path / "model.gguf",
        model,
        family_of(model),
        vocabulary_of(tmp_path, model.config.vocab_size),
    )
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in read.tensors}
    assert {kind for name, kind in kinds.items() if "norm" in name or name.endswith(".bias")} == {
        "F32"
    }
    assert {
        kind for name, kind in kinds.items() if "norm" not in name and name.endswith(".weight")
    } == {"F16"}
    scores = read.fields["tokenizer.ggml.scores"].contents()
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == model.config.vocab_size


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_llama_cpp_computes_and_cuts_texts_as_transformers_does(name: str, tmp_path: Path) -> None:
    model, file = written(name, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(file.parent)
    texts = [*TEXTS, "  two spaces", "\u00e4 \U0001f600\n", "<s>said</s>", "1234567's"]
    read = by_llama_cpp(file, texts)
    assert [one["tokens"] for one in read] == [tokenizer(text).input_ids for text in texts]
    alike = []
    for one in read:
        with torch.no_grad():
            scores = model(torch.tensor([one["tokens"]])).logits[0].numpy()
        alike.append(scores.argmax(1) == one["best"])
    assert np.concatenate(alike).mean() >= 0.995


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned to count on, with 200 prompts beside it."""
    folder = tmp_path_factory.mktemp("counts")
    rows = [{"prompt": f"{n} {n + 1}", "completion": f" {n + 2} {n + 3}"} for n in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = (
        f"train --task causal-lm --model llama-tiny --data {folder}/rows.jsonl --max-seq-len 32"
        " --max-steps 40"
    )
    command = [*job.split(), "--lr", "3e-3", "--eval-every", "0", "--out", str(folder / "run")]
    assert main(command) == 0
    return folder / "run"


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_llama_cpp_answers_200_prompts_as_predict_does(
    run: Path, tmp_path: Path, dtype: str
) -> None:
    lines = tmp_path / "lines.jsonl"
    command = (
        f"predict {run} --data {run.parent}/rows.jsonl --out {lines} --set"
        " task_options.max_new_tokens=6"
    )
    assert main(command.split()) == 0
    expected = {
        line["prompt"]: line["generated"]
        for line in map(json.loads, lines.read_text().splitlines())
    }
    model = tmp_path / "model"
    assert main(f"checkpoint export {run} --to {model} --format gguf --dtype {dtype}".split()) == 0
    read = by_llama_cpp(model / "model.gguf", list(expected), 6)
    same = [one["answer"] == answer for one, answer in zip(read, expected.values(), strict=True)]
    assert np.mean(same) >= 0.995


@pytest.mark.programs
def test_an_export_has_a_card_and_an_adapter_merged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gguf = pytest.importorskip("gguf")
    base = gguf_models.make("mistral", tmp_path / "base")
    settings = json.loads((base / "generation_config.json").read_text())
    settings |= {"eos_token_id": [2, 300], "repetition_penalty": 1.2}
    (base / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    )
    job = (
        f"train --task causal-lm --model {base} --data {tmp_path}/rows.jsonl --lora 2 --max-steps 2"
        " --max-seq-len 32"
    )
    assert main([*job.split(), "--eval-every", "0", "--out", str(tmp_path / "run")]) == 0
    folders = tmp_path / "whole", tmp_path / "gguf"
    for folder, flags in zip(folders, (["--merged"], ["--format", "gguf"]), strict=True):
        command = ["checkpoint", "export", str(tmp_path / "run"), "--to", str(folder), *flags]
        assert main(command) == 0
    whole = AutoModelForCausalLM.from_pretrained(folders[0])
    again = AutoModelForCausalLM.from_pretrained(
        folders[1], gguf_file="model.gguf", dtype=torch.float32
    )
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert (again(tokens).logits - whole(tokens).logits).abs().max() < 1e-5
    fields = gguf.GGUFReader(folders[1] / "model.gguf").fields
    roles = (fields[f"tokenizer.ggml.{role}_token_id"].contents() for role in ("eos", "eot"))
    assert [*roles] == [2, 300]  # llama.cpp ends texts at both
    card = (folders[1] / "README.md").read_text()
    assert "library_name: gguf" in card
    assert re.search(
        r"its loss on \d evaluation rows is (\d\.\d+); that of the run is \1\.", card
    ), card
    assert 'Llama("gguf/model.gguf", n_ctx=0)' in card
    assert str(tmp_path) not in card
    assert "follow `repetition_penalty = 1.2`, too, for which a file has no place." in card
    assert "which predict follows: repetition_penalty = 1.2; give" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("mistral", {"sliding_window": 8}, "llama.cpp's llama has no sliding_window = 8"),
        ("qwen2", {"hidden_act": "gelu"}, "llama.cpp's qwen2 has no hidden_act = 'gelu'"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "has no scale_attn_by_inverse_layer_idx = True",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "no rope_type = 'yarn'",
        ),
    ],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(
    name: str, values: dict[str, Any], says: str
) -> None:
    config, usual, _ = gguf_models.MODELS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(vocab_size=300, **usual | values))
    with pytest.raises(ConfigError, match="--format gguf") as error:
        family_of(model)
    assert says in str(error.value)


READ_WHOLE = {"mistral", "qwen2"}
"""Models of whose files transformers reads each setting. Of the others llama.cpp does."""
UNBUILT = {"add_cross_attention", "layer_types", "per_layer_config", "rope_parameters"}
"""Keys of which transformers itself refuses some value, in some types of models."""


def changed_model(name: str, weights: dict[str, torch.Tensor], **values: Any) -> Any:
    """The model ``name`` with other settings, and ``weights`` where they have its sizes."""
    config, usual, _ = gguf_models.MODELS[name]
    ends = {"vocab_size": 600, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**ends | usual | values)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
    own = model.state_dict()
    fitting = {
        at: held for at, held in weights.items() if at in own and own[at].shape == held.shape
    }
    model.load_state_dict(fitting, strict=False)
    return model


def logits_of(model: Any) -> torch.Tensor:
    tokens = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


@pytest.mark.programs
@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_each_key_that_answers_follow_is_written_or_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    gguf_models.make(name, tmp_path / "tokenizer")
    usual = changed_model(name, {})
    expected, weights = logits_of(usual), usual.state_dict()
    write_gguf(tmp_path / "usual.gguf", usual, family_of(usual), vocabulary(tmp_path, usual))
    lost, unbuilt = [], set()
    for key, value in changes(usual.config):
        try:
            model = changed_model(name, weights, **{key: value})
            logits = logits_of(model)
        except Exception:  # of the model itself, of whatever class
            unbuilt.add(key)
            continue
        if torch.equal(logits, expected):
            continue
        try:
            family = family_of(model)
        except ConfigError:
            continue
        write_gguf(tmp_path / "model.gguf", model, family, vocabulary(tmp_path, model))
        is_read_back = name in READ_WHOLE and rope_factors(model) is None
        if is_read_back:
            read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
            is_followed = torch.equal(logits_of(read), logits)
        else:
            is_followed = not same_files(tmp_path / "usual.gguf", tmp_path / "model.gguf")
        if not is_followed:
            lost.append((key, value))
    assert lost == []
    assert unbuilt <= UNBUILT


def vocabulary(folder: Path, model: Any) -> Vocabulary:
    return vocabulary_of(folder / "tokenizer", model.config.vocab_size)


def same_files(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


def test_more_ends_than_a_file_has_room_for_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    gguf_models.make("llama3", tmp_path)
    roles = vocabulary_of(tmp_path, 600, [1, 4, 5]).special.special_token_ids
    assert (roles["eos"], roles["eot"], roles["eom"]) == (1, 4, 5)
    with pytest.raises(ConfigError, match=r"eos_token_id of generation_config.json has 4 tokens"):
        vocabulary_of(tmp_path, 600, [1, 4, 5, 6])


def test_a_model_of_another_family_is_refused_with_the_way_around() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt_neox", hidden_size=64, num_hidden_layers=1)
        )
    with pytest.raises(
        ConfigError,
        match=r"takes language models of gpt2, llama, .* not a GPTNeoXForCausalLM; export",
    ):
        family_of(model)
    assert families.FAMILIES.keys() == {"gpt2", "llama", "mistral", "qwen2", "qwen3"}


NFC = {"type": "NFC"}
PREPEND = {"type": "Prepend", "prepend": "\u2581"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
METASPACE = {
    "type": "Metaspace",
    "replacement": "\u2581",
    "prepend_scheme": "always",
    "split": True,
}
ADDED = {
    "content": "<x>",
    "id": 3,
    "special": False,
    "lstrip": False,
    "rstrip": False,
    "single_word": False,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [{"type": "NFKC"}, PREPEND, REPLACE],
                }
            },
            "normalizer NFKC",
        ),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, REPLACE]}},
            "normalizer Lowercase",
        ),
        ({"normalizer": NFC}, "a normalizer NFC"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [REPLACE, PREPEND]}},
            "a normalizer of other steps",
        ),
        (
            {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
            "a split of texts by Digits",
        ),
        (
            {"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "first"}},
            "prepend_scheme: first",
        ),
        (
            {"normalizer": None, "pre_tokenizer": METASPACE},
            "pieces of several words, and a split into words",
        ),
        (
            {"added_tokens": [ADDED | {"normalized": True}]},
            "'<x>' that it looks for as '\u2581<x>' (normalized = true)",
        ),
        ({"added_tokens": [ADDED | {"rstrip": True}]}, "an added token '<x>' with rstrip = true"),
    ],
)
def test_pieces_that_llama_cpp_would_make_of_another_text_are_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    vocabulary = {"<unk>": 0, "a": 1, "a\u2581": 2} | {
        f"<0x{byte:02X}>": 3 + byte for byte in range(256)
    }
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "byte_fallback": True,
        "vocab": vocabulary,
        "merges": [],
    }
    usual = {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}
    rest = {
        "version": "1.0",
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
    }
    known = {
        "model": model,
        "pre_tokenizer": None,
        "normalizer": usual,
        "added_tokens": [],
        **rest,
    } | change
    for added in known["added_tokens"]:
        added.setdefault("normalized", False)
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="--format gguf: the tokenizer has ") as error:
        vocabulary_of(tmp_path, 300)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "another pattern that splits texts"),
        (
            {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
            "another pattern that splits texts",
        ),
        ({"normalizer": {"type": "Lowercase"}}, "a normalizer Lowercase"),
        ({"normalizer": NFC}, "a normalizer NFC, which llama.cpp lacks"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [NFC, {"type": "NFKC"}]}},
            "a normalizer NFKC",
        ),
        ({"model": {"type": "WordPiece"}}, "a model WordPiece"),
        (
            {"model": {"type": "BPE", "end_of_word_suffix": "</w>"}},
            "a model with end_of_word_suffix = '</w>'",
        ),
        ({"added_tokens": [ADDED | {"lstrip": True}]}, "an added token '<x>' with lstrip = true"),
        (
            {"added_tokens": [ADDED | {"single_word": True}]},
            "an added token '<x>' with single_word = true",
        ),
        (
            {
                "model": {
                    "type": "BPE",
                    "byte_fallback": True,
                    "vocab": {"ab": 2, "abc": 1},
                    "merges": ["a b", "ab c"],
                }
            },
            "pieces whose numbers are not in the order of their merges",
        ),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    usual = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    known = {
        "model": {"type": "BPE"},
        "pre_tokenizer": usual,
        "normalizer": None,
        "added_tokens": [],
    } | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    with pytest.raises(ConfigError, match="--format gguf: the tokenizer has ") as error:
        vocabulary_of(tmp_path, 300)
    assert says in str(error.value)


def test_a_tokenizer_with_other_tokens_around_a_text_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    gguf_models.make("llama3", tmp_path)
    file = tmp_path / "tokenizer.json"
    known = json.loads(file.read_text())
    known["post_processor"]["special_tokens"]["<s>"]["ids"] = [7]
    file.write_text(json.dumps(known))
    with pytest.raises(
        ConfigError, match="other tokens around a text than bos_token and eos_token"
    ):
        vocabulary_of(tmp_path, 600)
