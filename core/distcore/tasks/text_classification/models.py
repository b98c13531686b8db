"""Classification models: built-in BERTs with random weights, local Hugging Face folders, models of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore.errors import ConfigError, ModelError, nearest
from distcore.tasks.text_classification.options import TextOptions

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class BertShape:
    """Size of a BERT. Attention heads are 64 wide, and the feed-forward layer is four times the hidden size."""

    layers: int
    """Transformer layers."""
    hidden: int
    """Hidden size, a multiple of 64."""
    lr: float
    """Peak learning rate from random weights. At 5e-4 bert-small does not learn; the larger models use its rate."""


BUILT_IN_MODELS = {
    "bert-tiny": BertShape(2, 128, 5e-4),
    "bert-mini": BertShape(4, 256, 5e-4),
    "bert-small": BertShape(4, 512, 1e-4),
    "bert-medium": BertShape(8, 512, 1e-4),
    "bert-base": BertShape(12, 768, 1e-4),
}
"""The built-in models, by the name that follows ``--model``."""
PRETRAINED_LR = 3e-5
"""Peak learning rate for fine-tuning pretrained weights."""

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
"""A model folder must have at least one of these vocabulary files."""


def from_scratch(options: TextOptions) -> bool:
    """True for a built-in model, which starts from random weights and trains its own tokenizer."""
    return options.model in BUILT_IN_MODELS


def suggested_lr(name: str) -> float:
    """Return the peak learning rate to use for the model where the config says ``auto``."""
    built_in = BUILT_IN_MODELS.get(name)
    return built_in.lr if built_in else PRETRAINED_LR


def model_folder(name: str) -> Path:
    """Return the local folder of a model that is not built in; a hub model is downloaded if it is not cached yet.

    The folder holds config, weights and tokenizer. Raises ModelError, one line.
    """
    folder = Path(name).expanduser()
    if not folder.exists():
        return _hub_folder(name)
    if not folder.is_dir():
        raise ModelError(f"model {name}: is a file, expected a folder with config.json, weights and tokenizer")
    _check_folder(name, folder)
    return folder


def read_config(name: str, folder: Path) -> dict[str, Any]:
    """Return the folder's config.json. Raises ModelError if it is not a JSON object with a ``model_type``."""
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name}: config.json cannot be read: {error}") from None
    if not isinstance(tree, dict) or "model_type" not in tree:
        raise ModelError(f"model {name}: config.json has no 'model_type', so it is not a transformers model")
    return tree


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer's files in ``folder``, sorted by name."""
    files = (folder / name for name in {*TOKENIZERS, "merges.txt"})
    return sorted({*folder.glob("*token*.json"), *(file for file in files if file.is_file())})


def check_length(options: TextOptions, folder: Path) -> None:
    """Raise ConfigError if ``max_seq_len`` exceeds the positions that the model in ``folder`` has."""
    tree = read_config(options.model, folder)
    positions = tree.get("max_position_embeddings")
    if not isinstance(positions, int):
        return
    # RoBERTa and its relatives number positions from pad_token_id + 1, so they have fewer than their config says.
    reserved = int(tree.get("pad_token_id") or 0) + 1 if "roberta" in tree["model_type"] else 0
    if options.max_seq_len > positions - reserved:
        where = f"model {options.model} has positions for {positions - reserved} tokens"
        raise ConfigError(f"max_seq_len = {options.max_seq_len}: {where}; use --max-seq-len {positions - reserved}")


def load_tokenizer(name: str, folder: Path) -> Any:
    """Load the folder's tokenizer with ``AutoTokenizer``. Raises ModelError, one line."""
    with _quiet(), _one_line(f"model {name}: tokenizer cannot be loaded"):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def build_classifier(options: TextOptions, classes: Sequence[str], *, vocab_size: int, pad_token: int) -> nn.Module:
    """Return the configured model in fp32, with a classification head for ``classes``.

    Under torch's meta device it has no weights, and none are read. ``vocab_size`` and ``pad_token`` are the
    tokenizer's; a pretrained model keeps the vocabulary size of its weights. Raises ModelError.
    """
    labels: dict[str, Any] = {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
        "pad_token_id": pad_token,
    }
    built_in = BUILT_IN_MODELS.get(options.model)
    if built_in is not None:
        return _build_from_scratch(built_in, options, vocab_size, labels)
    return _load_pretrained(options, labels)


def _build_from_scratch(
    built_in: BertShape, options: TextOptions, vocab_size: int, labels: dict[str, Any]
) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    shape = BertConfig(
        vocab_size=vocab_size,
        hidden_size=built_in.hidden,
        num_hidden_layers=built_in.layers,
        num_attention_heads=built_in.hidden // 64,
        intermediate_size=4 * built_in.hidden,
        max_position_embeddings=max(512, options.max_seq_len),  # 512 as in BERT, more for longer rows
        **labels,
    )
    _set_dropout(shape, options.dropout)
    model: nn.Module = BertForSequenceClassification(shape)
    return model


def _load_pretrained(options: TextOptions, labels: dict[str, Any]) -> nn.Module:
    import torch

    folder = model_folder(options.model)
    with _quiet(), _one_line(f"model {options.model}: cannot be loaded"):
        from transformers import AutoConfig, AutoModelForSequenceClassification

        auto: Any = AutoModelForSequenceClassification
        saved = AutoConfig.from_pretrained(folder, local_files_only=True)
        # A head for another number of classes gets new weights; any other mismatch of shapes stays an error.
        other_head = saved.num_labels != labels["num_labels"]
        shape = AutoConfig.from_pretrained(folder, local_files_only=True, **labels)
        _set_dropout(shape, options.dropout)
        if torch.get_default_device().type == "meta":
            skeleton: nn.Module = auto.from_config(shape)
            return skeleton
        # fp32 even if the files hold half precision: these are the master weights.
        model: nn.Module = auto.from_pretrained(
            folder, config=shape, local_files_only=True, ignore_mismatched_sizes=other_head
        ).float()
    return model


def _set_dropout(shape: Any, dropout: float | None) -> None:
    """Set every dropout probability of a transformers config; the fields' names differ from model to model."""
    if dropout is None:
        return
    for name, value in shape.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and (value is None or isinstance(value, float | int)):
            setattr(shape, name, dropout)


def _check_folder(name: str, folder: Path) -> None:
    if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
        export = f"distcore checkpoint export {name} --to DIR"
        raise ModelError(f"model {name}: is a run folder; make a model folder of it: {export}, and then --model DIR")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {name}: the folder has no config.json, so it is not a Hugging Face model folder")
    read_config(name, folder)
    for files, what in ((WEIGHTS, "weights"), (TOKENIZERS, "tokenizer")):
        if not any((folder / file).is_file() for file in files):
            raise ModelError(f"model {name}: the folder has no {what} (any of {', '.join(files[:3])} …)")


def _hub_folder(name: str) -> Path:
    # Names of the hub have at most one slash: this was meant as a path.
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model {name}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hint, known = nearest(name, BUILT_IN_MODELS), ", ".join(BUILT_IN_MODELS)
    wanted = ["*.json", "*.txt", "*.model", "*.safetensors"]
    try:
        # The local cache first, so that a cached model needs no network.
        folder = _snapshot(snapshot_download, name, local_files_only=True)
        # Pickled weights are downloaded only if there are no safetensors.
        for patterns in (wanted, [*wanted, "pytorch_model*.bin"]):
            folder = folder or _snapshot(snapshot_download, name, allow_patterns=patterns)
    except HFValidationError:
        raise ModelError(
            f"model {name!r}: not built in ({known}), not a folder, and not a valid hub name{hint}"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = _first_line(error)
        where = f"not built in ({known}), not a local folder, and not available from the hub"
        raise ModelError(f"model {name!r}: {where}: {reason}{hint}") from None
    if folder is None:
        raise ModelError(f"model {name!r}: its hub repository lacks config, weights or tokenizer in a known format")
    return folder


def _snapshot(download: Any, name: str, **options: Any) -> Path | None:
    """Return the snapshot's folder, or ``None`` if a file that the model needs is missing from it."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with _quiet():
            folder = Path(download(name, **options))
        _check_folder(name, folder)
    except LocalEntryNotFoundError:
        if "local_files_only" in options:
            return None
        raise
    except ModelError:
        return None
    return folder


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings, which the user cannot act on."""
    from transformers.utils import logging

    library: Any = logging
    level, bar = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bar:
            library.enable_progress_bar()


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn any exception that a library raises for a user's files into a one-line ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
