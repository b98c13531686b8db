"""The files in which sentence-transformers says how the states of an
encoder become an embedding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from distcore import ModelError
from distcore_tasks.embedding.text_settings import MODULES, PROMPTS, TextSettings
from distcore_tasks.shared.pretrained import one_line_errors

Pooling = Literal["mean", "cls"]
OWNER = "sentence_transformers."
"""Begins the types of its own modules; others are code of a folder or of another package."""
KINDS = ("Transformer", "Pooling", "Normalize")
"""The modules that this task has, in order."""
POOLING = "1_Pooling"
"""The folder of the part that pools."""


def check_modules(name: str, folder: Path) -> None:
    """Raise ModelError if embeddings of the model ``name`` pass other modules than ``KINDS``.

    Each may be passed once, in this order.
    """
    if not (folder / MODULES).is_file():
        return
    with one_line_errors(f"model {name}: {MODULES} cannot be read"):
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        types = [str(module["type"]) for module in modules]
    for index, type_ in enumerate(types):
        _, _, kind = type_.rpartition(".")
        is_of_library = type_.startswith(OWNER)
        if not is_of_library or KINDS[index : index + 1] != (kind,):
            # Of a module of another package the whole name says where it is from.
            module = kind if is_of_library else type_
            before = ", ".join(KINDS[:index]) or "the beginning"
            raise ModelError(
                f"model {name}: its embeddings pass a module {module}, which this task does not"
                f" have behind {before}; take another model"
            )


def saved_pooling(name: str, folder: Path) -> Pooling:
    """Return the pooling in the folder of the model ``name``, ``mean`` if it says nothing.

    Raises ModelError for a pooling that this task does not have.
    """
    with one_line_errors(f"model {name}: its pooling cannot be read"):
        file = pooling_folder(name, folder) / "config.json"
        is_of_sentence_transformers = (folder / MODULES).is_file()
        modes = _modes(file) if is_of_sentence_transformers and file.is_file() else ["mean"]
    if modes == ["mean"]:
        return "mean"
    if modes == ["cls"]:
        return "cls"
    raise ModelError(
        f"model {name}: pools by {', '.join(modes)}; --pooling mean or cls trains it with another"
        " pooling"
    )


def pooling_folder(name: str, folder: Path) -> Path:
    """Return the folder of the pooling of the model ``name``, which need not be there."""
    if not (folder / MODULES).is_file():
        return folder / POOLING
    with one_line_errors(f"model {name}: {MODULES} cannot be read"):
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        for module in modules:
            if str(module["type"]).endswith(".Pooling"):
                return folder / str(module["path"])
    return folder / POOLING


def write_modules(
    folder: Path, pooling: Pooling, size: int | None, max_seq_len: int, settings: TextSettings
) -> None:
    """Write the files that sentence-transformers needs besides an encoder of this hidden size."""
    kinds = (("", "Transformer"), (POOLING, "Pooling"), ("2_Normalize", "Normalize"))
    modules = []
    for number, (path, kind) in enumerate(kinds):
        modules.append(
            {
                "idx": number,
                "name": str(number),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
        )
    flags = {
        "word_embedding_dimension": size,
        "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_mean_tokens": pooling == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "include_prompt": settings.pools_prompt,
    }
    encoder = {"max_seq_length": max_seq_len, "do_lower_case": settings.lowers}
    trees: dict[str, object] = {
        MODULES: modules,
        f"{POOLING}/config.json": flags,
        "sentence_bert_config.json": encoder,
    }
    if settings.prompts:
        prompts = dict(settings.prompts)
        trees[PROMPTS] = {"prompts": prompts, "default_prompt_name": settings.default}
    (folder / POOLING).mkdir(exist_ok=True)
    for name, tree in trees.items():
        text = json.dumps(tree, indent=2)
        (folder / name).write_text(f"{text}\n", encoding="utf-8")


def _modes(file: Path) -> list[str]:
    """Return the poolings in the config of a pooling module, in sentence-transformers' words."""
    config = json.loads(file.read_text(encoding="utf-8"))
    named = config.get("pooling_mode")
    if named is not None:
        return [named] if isinstance(named, str) else list(named)
    # Earlier releases have a flag for each, such as pooling_mode_cls_token.
    modes = []
    for key, is_on in config.items():
        if is_on and key.startswith("pooling_mode_"):
            mode = key.removeprefix("pooling_mode_")
            modes.append(mode.removesuffix("_tokens").removesuffix("_token"))
    return modes or ["mean"]
