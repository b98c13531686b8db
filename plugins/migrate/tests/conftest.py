"""Data files as the example scripts take them, and a small model folder of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import image_cases
import pytest

LINES: dict[str, dict[str, Any]] = {
    "glue.jsonl": {"sentence1": "rivers flow north", "sentence2": "to the north", "label": 1},
    "text.jsonl": {"text": "rivers flow north " * 12},
    "ner.jsonl": {"id": "0", "tokens": ["rivers", "flow"], "ner_tags": ["B-X", "O"]},
    "news.jsonl": {"article": "rivers flow north", "highlights": "north"},
    "en-ro.jsonl": {"en": "rivers", "ro": "râuri"},
}
"""One row of each file; a second kind of row follows, so that there are two classes."""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of 40 rows, text and labels from row to row different."""
    folder = tmp_path_factory.mktemp("published")
    for name, row in LINES.items():
        rows = []
        for number in range(40):
            new = {
                key: f"{number} {value}" if isinstance(value, str) else value
                for key, value in row.items()
            }
            if "label" in new:
                new["label"] = number % 2
            rows.append(json.dumps(new))
        (folder / name).write_text("\n".join(rows) + "\n")
    (folder / "news.csv").write_text("article,highlights\n" + "rivers flow north,north\n" * 40)
    image_cases.in_folders(folder / "images", 20)
    return folder


@pytest.fixture(scope="session")
def models(files: Path) -> Path:
    """The same folder, with models of two layers in it: bert, gpt2, t5, vit."""
    import transformers as hf
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "rivers", "flow", "north", "to", "the"]
    base = Tokenizer(
        WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    base.pre_tokenizer = Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=base,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="[SEP]",
    )
    tiny: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    # the config takes what a writing model needs, too
    decoder: dict[str, Any] = {"decoder_start_token_id": 0}
    made = {
        "bert": hf.BertForMaskedLM(hf.BertConfig(**tiny, intermediate_size=64)),
        "gpt2": hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=2)),
        "t5": hf.T5ForConditionalGeneration(
            hf.T5Config(
                **decoder, vocab_size=16, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2
            )
        ),
        "vit": hf.ViTForImageClassification(
            hf.ViTConfig(
                **{key: tiny[key] for key in tiny if key != "vocab_size"},
                intermediate_size=64,
                image_size=16,
                patch_size=8,
            )
        ),
    }
    for name, model in made.items():
        model.save_pretrained(files / name)
        if name != "vit":
            tokenizer.save_pretrained(files / name)
    processor: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 16, "width": 16},
    }
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (files / "vit/preprocessor_config.json").write_text(json.dumps(processor))
    return files
