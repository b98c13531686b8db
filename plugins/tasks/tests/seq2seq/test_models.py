"""The model families: what a row's loss is alone and in a batch, with and without
smoothing; what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
)

from distcore.config import RunConfig
from distcore.errors import ConfigError, DataError, DistcoreError, ModelError
from distcore_tasks.seq2seq.models import build_model
from distcore_tasks.seq2seq.shapes import SHAPES
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.seq2seq.vocabulary import train_tokenizer
from distcore_tasks.shared.jagged import IGNORED

VOCABULARY = 300
TOKENS = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
BART = TOKENS | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "encoder_layerdrop": 0.5,
    "forced_eos_token_id": None,
}
T5 = TOKENS | {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": T5,
    "mt5": T5,
    "bart": BART,
    "blenderbot": BART,
    "blenderbot-small": BART,
    "pegasus": BART,
}
ROWS = [
    (f"source {'of words ' * (row % 4)}{row}", f"target {'and so on ' * (row % 3)}{row}")
    for row in range(10)
]


def saved(kind: str, folder: Path, **changes: Any) -> str:
    """A model folder with random, large weights and a byte-level tokenizer."""
    torch.manual_seed(0)
    shape = AutoConfig.for_model(kind, **(FAMILIES[kind] | changes))
    model: Any = AutoModelForSeq2SeqLM.from_config(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / kind)
    train_tokenizer([" ".join(row) for row in ROWS], VOCABULARY).save_pretrained(folder / kind)
    return str(folder / kind)


def task_of(folder: Path, **options: Any) -> Seq2Seq:
    file = folder / "rows.json"
    file.write_text(json.dumps(ROWS))
    few: dict[str, Any] = {
        "data": str(file),
        "eval_data": str(file),
        "dropout": 0.0,
        "max_seq_len": 64,
    }
    return Seq2Seq(**(few | options))


def built(task: Seq2Seq) -> tuple[Any, Any]:
    data: Any = task.prepare(RunConfig())
    torch.manual_seed(0)
    return data.evaluation, task.build_model(RunConfig(), data)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_row_has_one_loss_alone_and_padded(kind: str, smoothing: float, tmp_path: Path) -> None:
    task = task_of(tmp_path, model=saved(kind, tmp_path), label_smoothing=smoothing)
    dataset, model = built(task)
    assert model.config.model_type == kind
    rows = np.arange(len(dataset))
    with torch.no_grad():
        together = task.outputs(model, dataset.batch(rows))
        alone = [
            task.outputs(model, dataset.batch(rows[row : row + 1])) for row in range(len(rows))
        ]
        # no layer is skipped, though the config says so
        total = task.loss(model.train(), dataset.batch(rows))
    tokens: Any = together["tokens"]
    assert tokens.tolist() == dataset.items.tolist()
    for name in ("loss", "surprise") if smoothing else ("loss",):
        values: Any = together[name]
        assert values.tolist() == pytest.approx([float(one[name]) for one in alone], rel=1e-5)  # type: ignore[arg-type]
    losses: Any = together["loss"]
    assert float(total) == pytest.approx(float(losses.sum()), rel=1e-5)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_model_reads_each_target_shifted_by_one_behind_its_start_token(
    kind: str, tmp_path: Path
) -> None:
    task = task_of(tmp_path, model=saved(kind, tmp_path))
    dataset, model = built(task)
    batch = dataset.batch(np.arange(4))
    start = torch.zeros(4, 1, dtype=torch.long)  # decoder_start_token_id
    shifted = torch.cat([start, batch["labels"][:, :-1]], 1).clamp(min=0)  # 0 pads, too
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model.eval()
    with torch.no_grad():
        likely = model(**inputs, decoder_input_ids=shifted).logits.log_softmax(-1)
        counted = batch["labels"] != IGNORED
        expected = -likely[counted].gather(1, batch["labels"][counted][:, None]).sum()
        assert float(task.loss(model, batch)) == pytest.approx(float(expected), rel=1e-5)


def test_the_decoder_of_fsmt_reads_the_labels_behind_their_end(tmp_path: Path) -> None:
    """transformers' FSMT makes no decoder inputs of labels: a run failed in its first step."""
    torch.manual_seed(0)
    sizes = {
        key: value for key, value in BART.items() if key not in ("vocab_size", "encoder_layerdrop")
    }
    vocabularies = {
        "src_vocab_size": VOCABULARY,
        "tgt_vocab_size": VOCABULARY,
        "langs": ["en", "de"],
    }
    shape = AutoConfig.for_model("fsmt", **(sizes | vocabularies | {"decoder_start_token_id": 1}))
    AutoModelForSeq2SeqLM.from_config(shape).save_pretrained(tmp_path / "fsmt")
    train_tokenizer([" ".join(row) for row in ROWS], VOCABULARY).save_pretrained(tmp_path / "fsmt")
    task = task_of(tmp_path, model=str(tmp_path / "fsmt"))
    dataset, model = built(task)
    batch = dataset.batch(np.arange(4))
    start = torch.ones(4, 1, dtype=torch.long)  # decoder_start_token_id, which is the end token
    shifted = torch.cat([start, batch["labels"][:, :-1]], 1)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model.eval()
    with torch.no_grad():
        likely = model(
            **inputs, decoder_input_ids=shifted.clamp(min=0), use_cache=False
        ).logits.log_softmax(-1)
        counted = batch["labels"] != IGNORED
        expected = -likely[counted].gather(1, batch["labels"][counted][:, None]).sum()
        assert float(task.loss(model, batch)) == pytest.approx(float(expected), rel=1e-5)
        alone = [
            float(task.loss(model, dataset.batch(np.arange(row, row + 1)))) for row in range(4)
        ]
    assert sum(alone) == pytest.approx(float(expected), rel=1e-5)


def test_smoothing_spreads_its_part_over_the_vocabulary_and_padding_never_counts() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 7), torch.tensor([[1, 2, 3], [4, IGNORED, IGNORED]])

    class Model(torch.nn.Module):
        def forward(self, **inputs: Any) -> Any:
            from transformers.modeling_outputs import Seq2SeqLMOutput

            return Seq2SeqLMOutput(logits=logits)

    batch = dict.fromkeys(("input_ids", "attention_mask"), labels) | {"labels": labels}
    likely = logits.log_softmax(-1)
    expected = [
        sum(
            float(-0.9 * likely[row, at, labels[row, at]] - 0.1 * likely[row, at].mean())
            for at in range(count)
        )
        for row, count in enumerate((3, 1))
    ]
    task = Seq2Seq(label_smoothing=0.1)
    outputs = task.outputs(Model(), batch)
    assert outputs["loss"].tolist() == pytest.approx(expected, rel=1e-5)  # type: ignore[union-attr]
    assert float(task.loss(Model(), batch)) == pytest.approx(sum(expected), rel=1e-5)
    report = task.report(dict(outputs), None)  # type: ignore[arg-type]
    assert report["loss"] == pytest.approx(sum(expected) / 4, rel=1e-5)
    plain = (
        -sum(
            float(likely[row, at, labels[row, at]]) for row, at in ((0, 0), (0, 1), (0, 2), (1, 0))
        )
        / 4
    )
    assert report["perplexity"] == pytest.approx(np.exp(plain), rel=1e-5)


def test_a_target_ends_though_its_tokenizer_does_not_say_so(tmp_path: Path) -> None:
    folder = Path(saved("blenderbot-small", tmp_path))
    tokenizer = train_tokenizer(["a b c"], VOCABULARY)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A", pair=None, special_tokens=[]
    )
    tokenizer.save_pretrained(folder)
    dataset, _ = built(task_of(tmp_path, model=str(folder), max_target_len=9))
    labels = dataset.batch(np.arange(len(dataset)))["labels"]
    assert (labels == 1).sum(1).tolist() == [1] * len(dataset)
    assert set(labels[torch.arange(len(dataset)), (labels != IGNORED).sum(1) - 1].tolist()) == {1}


def test_a_target_of_which_nothing_is_left_is_named(tmp_path: Path) -> None:
    folder = Path(saved("t5", tmp_path))
    tokenizer = train_tokenizer(["a b c"], VOCABULARY)
    both = [("</s>", 1), ("<pad>", 0)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A </s>", pair=None, special_tokens=both
    )
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        DataError, match=r"row 1: the target is cut off entirely: .*max_target_len=N \(now 2\)"
    ):
        task_of(tmp_path, model=str(folder), max_target_len=2).prepare(RunConfig())


def test_t5_takes_texts_of_any_length_and_others_those_that_they_have_positions_for(
    tmp_path: Path,
) -> None:
    t5 = saved("t5", tmp_path, n_positions=8)
    built(task_of(tmp_path, model=t5, max_seq_len=100))
    bart = saved("bart", tmp_path)
    for option in ("max_seq_len", "max_target_len", "max_new_tokens"):
        with pytest.raises(
            ConfigError, match=rf"{option} = 65: model .* positions for 64 tokens; use --.*64$"
        ):
            task_of(tmp_path, model=bart, **{option: 65}).prepare(RunConfig())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"model_type": "gpt2"},
            "gpt2 does not write a text for one that it has read; take a model such as T5",
        ),
        ({"decoder_start_token_id": None}, "config.json has no decoder_start_token_id"),
    ],
)
def test_a_model_that_does_not_serve_is_named(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = Path(saved("bart", tmp_path))
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | change))
    with pytest.raises(ModelError, match=problem):
        task_of(tmp_path, model=str(folder)).prepare(RunConfig())


def joined(folder: Path, **changes: Any) -> str:
    """A folder of an encoder and a decoder that were models of their own, as BERT2BERT."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = AutoConfig.for_model("bert", **shape)
    decoder = AutoConfig.for_model("bert", **shape, is_decoder=True, add_cross_attention=True)
    config: Any = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model: Any = EncoderDecoderModel(config)
    for key, value in changes.items():
        setattr(model.config, key, value)
    model.save_pretrained(folder / "joined")
    train_tokenizer([" ".join(row) for row in ROWS], VOCABULARY).save_pretrained(folder / "joined")
    return str(folder / "joined")


def test_a_decoder_that_was_joined_to_an_encoder_begins_its_texts_as_in_training(
    tmp_path: Path,
) -> None:
    """transformers does not take its first token over into the generation config."""
    folder = joined(tmp_path, decoder_start_token_id=5)
    task = task_of(tmp_path, model=folder, max_new_tokens=3)
    dataset, model = built(task)
    assert model.generation_config.decoder_start_token_id == 5
    batch = dataset.batch(np.arange(2))
    assert float(task.loss(model.eval(), batch)) > 0
    assert len(task.generate(model, batch, in_step=False)["generated"]) == 2
    with pytest.raises(ModelError, match=r"config.json has no decoder_start_token_id"):
        task_of(tmp_path, model=joined(tmp_path)).prepare(RunConfig())


def test_an_unknown_model_lists_those_that_are_built_in(tmp_path: Path) -> None:
    with pytest.raises(DistcoreError, match=r"not built in \(t5-tiny, t5-mini, t5-medium\)"):
        task_of(tmp_path, model="./t5-tinny".removeprefix("./")).prepare(RunConfig())


@pytest.mark.parametrize("name", SHAPES)
def test_a_built_in_model_has_its_layers_and_width(name: str) -> None:
    with torch.device("meta"):
        model: Any = build_model(Seq2Seq(model=name), vocab_size=300, pad=0, end=1)
    shape = SHAPES[name]
    assert (model.config.num_layers, model.config.num_decoder_layers) == (
        shape.layers,
        shape.layers,
    )
    assert model.config.d_model == shape.hidden
