"""Encoders: built-in BERTs with random weights, local folders and hub models, also those of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import ConfigError, ModelError
from distcore_tasks.embedding.options import EmbeddingOptions, Pooling
from distcore_tasks.shared.bert import SHAPES, bert_config, check_encoder, hidden_size
from distcore_tasks.shared.pretrained import load_model, one_line_errors, read_config

if TYPE_CHECKING:
    from torch import nn

MODULES = "modules.json"
"""The file in which sentence-transformers lists the parts of a model."""
NO_ENCODER = "is not an encoder"


def build_encoder(options: EmbeddingOptions, *, vocab_size: int, pad: int) -> nn.Module:
    """Return the configured encoder in fp32, without a head. Under torch's meta device, no weights are read.

    ``vocab_size`` and ``pad``, the padding token, come from the tokenizer. Raises ModelError.
    """
    length, dropout, shape = options.max_seq_len, options.dropout, SHAPES.get(options.model)
    if shape is None:
        model: Any = load_model("AutoModel", options.model, options.model_folder(), dropout)
    else:
        from transformers import BertModel

        model = BertModel(
            bert_config(shape, vocab_size=vocab_size, max_seq_len=length, dropout=dropout, pad_token_id=pad)
        )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # embeddings do not read it, so it would get no gradient
    whole: nn.Module = model
    return whole


def check_model(options: EmbeddingOptions) -> None:
    """Raise ModelError or ConfigError, one line, unless the model is an encoder that the options fit."""
    check_encoder(options, options.max_seq_len, "MASKED_LM", NO_ENCODER)
    if not options.from_scratch and read_config(options.model, options.model_folder()).get("is_encoder_decoder"):
        raise ModelError(
            f"model {options.model}: {NO_ENCODER}, but an encoder with a decoder; take a model such as BERT or RoBERTa"
        )
    size = hidden_size(options)
    if isinstance(size, int) and max(options.dims, default=1) > size:
        raise ConfigError(
            f"dims = {list(options.dims)}: an embedding of {options.model} has {size} numbers; use at most {size}"
        )
    _ = options.pools  # so that it raises before the data are read


def saved_pooling(options: EmbeddingOptions) -> Pooling:
    """Return the pooling in a folder of sentence-transformers, ``mean`` for another model.

    Raises ModelError for a pooling that this task does not have, and for a folder with other modules.
    """
    if options.from_scratch or not (options.model_folder() / MODULES).is_file():
        return "mean"
    name, folder = options.model, options.model_folder()
    with one_line_errors(f"model {name}: {MODULES} cannot be read"):
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        paths = {str(module["type"]).rpartition(".")[2]: folder / str(module["path"]) for module in modules}
        modes = _modes(paths["Pooling"]) if "Pooling" in paths else ["mean"]
    if other := sorted(paths.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise ModelError(f"model {name}: its embeddings pass a module {other[0]}, which this task does not have")
    if modes == ["mean"]:
        return "mean"
    if modes == ["cls"]:
        return "cls"
    raise ModelError(f"model {name}: pools by {', '.join(modes)}; --pooling mean or cls trains it with another pooling")


def write_modules(folder: Path, options: EmbeddingOptions, size: int) -> None:
    """Write to ``folder`` what sentence-transformers needs beside the encoder to give the same embeddings."""
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds)
    ]
    pooling = {
        "word_embedding_dimension": size,
        "pooling_mode_cls_token": options.pools == "cls",
        "pooling_mode_mean_tokens": options.pools == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, tree in (
        (MODULES, modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": options.max_seq_len, "do_lower_case": False}),
    ):
        (folder / name).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _modes(folder: Path) -> list[str]:
    """Return the poolings in the folder of such a module; earlier releases have a flag for each."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if (named := config.get("pooling_mode")) is not None:
        return [named] if isinstance(named, str) else list(named)
    kinds = [key.removeprefix("pooling_mode_") for key in config if key.startswith("pooling_mode_") and config[key]]
    return [kind.removesuffix("_tokens").removesuffix("_token") for kind in kinds] or ["mean"]
