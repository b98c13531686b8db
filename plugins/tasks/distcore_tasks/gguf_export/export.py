"""The exporter ``gguf``: a file that llama.cpp and the programs around it read,
with weights and tokenizer.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distcore import ConfigError, TrainedModel
from distcore.registry import is_installed
from distcore_tasks.gguf_export.families import family_of
from distcore_tasks.gguf_export.file import write_gguf
from distcore_tasks.gguf_export.read_back import prove
from distcore_tasks.gguf_export.vocabulary import vocabulary_of
from distcore_tasks.graph_export.graph import finish
from distcore_tasks.huggingface_export.card import GGUF
from distcore_tasks.shared.generation.settings import ends_of, settings_of_text

log = logging.getLogger("distcore")

merges = True
"""A file has no place for an adapter."""
exempt = {
    "has-the-weights": "queries and keys have their rows in another order",
    "keeps-the-dtype": "norms and biases are in fp32",
}
"""Laws of exporters that do not hold, with reasons."""


def export(trained: TrainedModel, to: Path, merged: bool) -> None:
    """Write ``model.gguf``, the config, the tokenizer and a card to the new folder ``to``.

    A LoRA adapter is always merged. Raises ConfigError without the library gguf, and for a model or
    a tokenizer that llama.cpp would compute otherwise; and OSError.
    """
    if not is_installed("gguf"):
        raise ConfigError("--format gguf: gguf is not installed; pip install gguf")
    module: Any = trained.module
    family = family_of(module)
    with TemporaryDirectory() as folder:
        trained.save_task_files(Path(folder))
        module.config.save_pretrained(folder)
        settings = vars(module.generation_config)
        vocabulary = vocabulary_of(Path(folder), module.config.vocab_size, ends_of(settings))
    if lost := settings_of_text(settings):
        log.warning(
            "--format gguf: a file has no place for these settings of generation_config.json, which"
            " predict follows: %s; give llama.cpp settings of its own",
            ", ".join(f"{key} = {value!r}" for key, value in lost.items()),
        )
    to.mkdir(exist_ok=True)
    write_gguf(to / GGUF, module, family, vocabulary)
    finish(to, trained, partial(prove, to / GGUF, trained))
